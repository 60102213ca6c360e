"""Whether a device keeps the promises that peers rely on: near a CPU's results, and some of them to the bit."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm.models.passes import summed
from swarm.models.registry import family_of
from swarm.models.spec import DType, ModelConfig
from swarm.optim.part import TrainedPart
from swarm.state.snapshot import digest
from tests.benchmarks._stage import SMALL, Size, ends_spec, first_snapshot, normal, trained_part

TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative L2 distance that a device's result may have from a CPU's: some hundred and some ten roundings of each.

Both compute in the same format and add in another order. Float32 rounds to 6e-8, and orders of some thousand additions
give 1e-6 to 1e-5; products in TF32, the error to be caught, 3e-4 and more. Bfloat16 rounds to 4e-3: on a CPU it takes
our stage 9e-3 away from float32 and a Llama's 1.1e-2, so two honest ones are at most some twice that apart."""

_CPU = torch.device("cpu")
Answers = dict[str, float | bool]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may fail by itself: the answers that it gives, by name, and what gives them."""

    names: tuple[str, ...]
    work: Callable[[], Answers]


def checks(device: torch.device, size: Size = SMALL) -> list[Check]:
    """All but the codecs: :func:`check_stage` of our stage, :func:`check_steps`, and parity of our ends and of a
    Llama's parts, where transformers is installed."""
    found: list[Check] = []
    for compute in TOLERANCE:
        kept = tuple(f"{compute}_{what}" for what in ("distance", "parity", "repeats", "repeats_deterministic"))
        found.append(Check(kept, partial(check_stage, device, size, compute)))
    steps = ("install_keeps_digest", "step_digest_equals_cpu", "prepare_repeats", "swap_holds_what_was_prepared")
    found.append(Check(steps, partial(check_steps, device, size)))
    made: list[tuple[str, Callable[[DType], ModelConfig], Callable[..., float]]] = [("ends", size.model, ends_distance)]
    if importlib.util.find_spec("transformers") is not None:
        made += [("hf_stage", size.llama, stage_distance), ("hf_ends", size.llama, ends_distance)]
    for name, model, distance in made:
        found += [
            Check(_pair(name, compute), partial(_parity, name, distance, model, compute, (device, size)))
            for compute in TOLERANCE
        ]
    return found


def check(device: torch.device, size: Size = SMALL) -> Answers:
    """The answers of all :func:`checks`; whatever one raises passes through."""
    return {name: answer for one in checks(device, size) for name, answer in one.work().items()}


def _pair(name: str, compute: DType) -> tuple[str, str]:
    return f"{name}_{compute}_distance", f"{name}_{compute}_parity"


# --- near the CPU ----------------------------------------------------------------------------------------------------


def check_stage(device: torch.device, size: Size, compute: DType) -> Answers:
    """Our stage with dropout: its distance from the CPU's and whether that is within :data:`TOLERANCE` (``*_parity``),
    and whether doing it again gives the same bits (``*_repeats``, and with torch's deterministic algorithms)."""
    model = size.model(compute, dropout=0.1)
    snapshot = first_snapshot(model)
    there = trained_part(model, device, snapshot)
    expected, first, second = _passes(trained_part(model, _CPU, snapshot), model, size), *_twice(there, model, size)
    distance = largest_distance(first, expected)
    return {
        f"{compute}_distance": distance,
        f"{compute}_parity": distance <= TOLERANCE[compute],
        f"{compute}_repeats": _same(first, second),
        f"{compute}_repeats_deterministic": _same(*_twice_deterministically(there, model, size)),
    }


def stage_distance(model: ModelConfig, device: torch.device, size: Size) -> float:
    """Return how far a stage's output, input gradient and parameters' gradients are from a CPU's: the largest."""
    snapshot = first_snapshot(model)
    here, there = (trained_part(model, where, snapshot) for where in (_CPU, device))
    return largest_distance(_passes(there, model, size), _passes(here, model, size))


def ends_distance(model: ModelConfig, device: torch.device, size: Size) -> float:
    """The same of private ends: what they embed, the loss, its gradient, and the gradients of their parameters."""
    spec = ends_spec(model)
    snapshot = first_snapshot(model, spec)
    here, there = (trained_part(model, where, snapshot, spec) for where in (_CPU, device))
    return largest_distance(_ends_passes(there, model, size), _ends_passes(here, model, size))


def _parity(
    name: str,
    distance: Callable[[ModelConfig, torch.device, Size], float],
    model: Callable[[DType], ModelConfig],
    compute: DType,
    where: tuple[torch.device, Size],
) -> Answers:
    found = distance(model(compute), *where)
    return dict(zip(_pair(name, compute), (found, found <= TOLERANCE[compute]), strict=True))


def _passes(part: TrainedPart, model: ModelConfig, size: Size) -> list[Tensor]:
    """Output, input gradient and parameters' gradients of one fixed microbatch, on the CPU in float32."""
    output, graph = part.forward(_boundary(model, size, 1), seed=7)
    assert graph is not None
    grad_input, gradients = part.backward(graph, _boundary(model, size, 2))
    assert grad_input is not None
    return [tensor.float().cpu() for tensor in (output, grad_input, *(gradient for _, gradient in gradients))]


def _ends_passes(part: TrainedPart, model: ModelConfig, size: Size) -> list[Tensor]:
    tokens, targets = (_tokens(model, size, seed) for seed in (1, 2))
    targets[:, -1] = -1  # not counted
    embedded, graph = part.embed(tokens, seed=7)
    loss_sum, _, grad_hidden, head = part.loss(_boundary(model, size, 3), targets)
    gradients = summed([*part.embed_backward(graph, _boundary(model, size, 4)), *head])
    loss = torch.tensor([loss_sum])
    return [tensor.float().cpu() for tensor in (embedded, loss, grad_hidden, *(gradient for _, gradient in gradients))]


def _boundary(model: ModelConfig, size: Size, seed: int) -> Tensor:
    """What a peer decodes: in the dtype that crosses boundaries."""
    return normal(size.shape, seed).to(getattr(torch, family_of(model).boundary(*size.shape[:2]).dtype))


def _tokens(model: ModelConfig, size: Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, size.shape[:2], generator=generator)


def largest_distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative L2 distance of two tensors of these; infinity where one is not finite: JSON has no
    NaN, and no bound holds."""
    distances = [_distance(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
    return max(distances) if all(map(math.isfinite, distances)) else math.inf


# --- to the bit ------------------------------------------------------------------------------------------------------


def check_steps(device: torch.device, size: Size) -> Answers:
    """Three optimizer steps beside a CPU's with the same gradients: every digest must agree with the CPU's."""
    model = size.model("float32")
    snapshot = first_snapshot(model)
    here, there = trained_part(model, _CPU, snapshot), trained_part(model, device, snapshot)
    installed = digest(there.snapshot()) == digest(snapshot)
    agree = repeats = swapped = True
    for step in (1, 2, 3):
        mean = normal((there.layout.elements,), step) * 1e-3
        wanted, found, again = (part.prepare(mean, lr=1e-3, clip=0.7, step=step) for part in (here, there, there))
        agree, repeats = agree and found == wanted, repeats and found == again
        here.swap()
        there.swap()
        swapped = swapped and there.step == step and digest(there.snapshot()) == found
    return {
        "install_keeps_digest": installed,
        "step_digest_equals_cpu": agree,
        "prepare_repeats": repeats,
        "swap_holds_what_was_prepared": swapped,
    }


def _twice(part: TrainedPart, model: ModelConfig, size: Size) -> tuple[list[Tensor], list[Tensor]]:
    return _passes(part, model, size), _passes(part, model, size)


def _twice_deterministically(part: TrainedPart, model: ModelConfig, size: Size) -> tuple[list[Tensor], list[Tensor]]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _twice(part, model, size)
    finally:
        torch.use_deterministic_algorithms(before)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
