"""Who computes a hop again on another machine accuses nobody: families, codecs, and the last bits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.compression.registry import codec_named
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.family import ModelFamily, PartModule
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.passes import Graph, run_backward_input, run_forward
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig, token_spec
from swarm.pipeline.boundary import BoundarySpecs, RowNotes, coming_back, going_forward
from swarm.pipeline.compute import Material, StageCompute
from swarm.pipeline.stage.auditing import compared
from tests.harness.rigs.foreign import foreign_model

ROWS, LENGTH = 2, 8
FAMILIES = ("gpt", "llama", "gpt2", "gemma2", "phi", "falcon", "qwen3_moe", "mixtral")
CODECS = ("float32", "int8", "int8h", "int4h")
NOISE = {"float32": (1e-7, 1.0), "bfloat16": (6e-3, 1 / 256)}
"""Relative, of what each matrix gives, and of how many numbers: between instruction sets all differ a little in
float32, and some by the last bit in bfloat16. (Measured: outputs by 2e-8 and 2.6e-4.)"""
FEW = 5e-3
"""Part of honest hops that may be in doubt, so that nobody judges them: of one family (gemma2) 3e-3 are."""


class Part:
    """A stage without an optimizer."""

    def __init__(self, module: PartModule) -> None:
        self.module = module

    def forward(self, x: Tensor, *, seed: int, work: StepWork, graph: bool = True) -> tuple[Tensor, Graph | None]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        return run_forward(self.module, x, seed=seed, graph=graph)

    def backward_input(self, graph: Graph, grad_output: Tensor | None) -> Any:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        return run_backward_input(graph, grad_output)


def part_of(family: ModelFamily) -> PartModule:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in family.initial_weights(0).items()
    }
    part = family.build(family.parts(SplitConfig(stages=2))[0])
    install_weights(part, weights, requires_grad=True)
    return part


@contextmanager
def another_machine(part: nn.Module, noise: float, share: float) -> Iterator[list[int]]:
    """Have matrices give the last bits otherwise; count the numbers."""
    generator, drawn = torch.Generator().manual_seed(1), list[int]()

    def shaken(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):  # a router's choice, of what was shaken before
            return output
        drawn.append(output.numel())
        shakes = torch.rand(output.shape, generator=generator) < share
        return output * (1 + noise * shakes * torch.randn(output.shape, generator=generator)).to(output.dtype)

    with ExitStack() as stack:
        for module in part.modules():
            if not list(module.children()) and any(one.ndim >= 2 for one in module.parameters(recurse=False)):
                stack.callback(module.register_forward_hook(shaken).remove)
        yield drawn


@pytest.mark.parametrize("hops", [1_000, pytest.param(100_000, marks=pytest.mark.nemesis)])
@pytest.mark.parametrize("dtype", list(NOISE))
@pytest.mark.parametrize("name", FAMILIES)
def test_honest_hop_is_found_right_by_another_machine(name: str, dtype: Any, hops: int) -> None:
    """Of so many hops of all families together."""
    each = math.ceil(hops / len(FAMILIES) / len(NOISE))
    ours = name == "gpt"
    config = GptConfig(layers=2, dim=32, context=LENGTH, compute=dtype) if ours else foreign_model(name, compute=dtype)
    family = family_of(config)
    part, spec = part_of(family), family.boundary(ROWS, LENGTH)
    generator, codecs = torch.Generator().manual_seed(2), CODECS if dtype == "float32" else ("bfloat16", *CODECS[1:])
    told, shaken = defaultdict[str, list[str]](list), 0
    for number in range(each):
        codec = codec_named(codecs[number % len(codecs)])
        tokens = token_spec(ROWS, LENGTH)
        specs = BoundarySpecs(activation=spec, tokens=tokens, codec=codec, hosted=False, counted=family.balances)
        compute = StageCompute(Part(part), specs, torch.device("cpu"))  # type: ignore[arg-type]
        work = StepWork(1, MicrobatchId(PeerId("tr"), "00" * 8, 0, number))
        came, back = (torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for _ in range(2))
        material = Material(
            work=work,
            seed=number,
            first=False,
            input=specs.joined(codec.encode(came, going_forward(work)), RowNotes(None, ROWS * LENGTH)),
            gradient=codec.encode(back * 1e-3, coming_back(work)),
        )
        output, sent = compute.again(material)
        if number < len(codecs):
            assert bytes(compute.again(material)[0] or b"") == bytes(output or b""), "here it has the same bits"
        with another_machine(part, *NOISE[dtype]) as drawn:
            other, other_sent = compute.again(material)
        shaken += bool(drawn) and (bytes(other or b""), bytes(other_sent.gradient or b"")) != (
            bytes(output or b""), bytes(sent.gradient or b""))  # fmt: skip
        for direction, ours, theirs in (("forward", other, output), ("backward", other_sent.gradient, sent.gradient)):
            assert ours is not None
            assert theirs is not None
            found = compared(specs, ours, theirs, 1, direction, mixture=family.mixture)  # type: ignore[arg-type]
            told[found.verdict].append(f"{codec.name} {direction}: {found.reason}")
    assert shaken > each / 8, "the machines were alike"
    assert told["wrong"] == []
    assert len(told["unjudged"]) <= FEW * each, told["unjudged"]
    assert family.mixture is (name in ("qwen3_moe", "mixtral"))
