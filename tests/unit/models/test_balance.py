"""The balance loss of mixtures: each layer's own, whatever the cut, as heavy as the microbatch's targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.compression.dense import FLOAT32
from swarm.errors import Violation
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.balance import balance_loss, targets_counted, weighed
from swarm.models.family import PartModule
from swarm.models.hf.hf_config import HfConfig
from swarm.models.hf.hf_family import HfFamily
from swarm.models.layout import install_weights
from swarm.models.passes import run_backward, run_embedding, run_forward, run_head, run_loss, summed
from swarm.models.spec import SplitConfig, TensorSpec
from swarm.phases import Phases, complete
from swarm.pipeline.boundary import BoundarySpecs, RowNotes
from swarm.pipeline.compute import StageCompute
from tests.harness.rigs.foreign import foreign_model

COEFFICIENT, ROWS, LENGTH = 0.5, 2, 12
TOKENS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 3 % 96
TARGETS = (TOKENS * 5 + 1) % 96
TARGETS[0, :5] = -1  # as the questions of a conversation
COUNTED = 19


def balanced_model(name: str = "qwen3_moe", **changes: Any) -> HfConfig:
    return foreign_model(name, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **changes)


def drawn(family: HfFamily) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in family.initial_weights(0).items()
    }


def installed(family: HfFamily, weights: dict[str, Tensor], split: SplitConfig) -> list[PartModule]:
    parts = [family.build(spec) for spec in family.parts(split)]
    for part in parts:
        install_weights(part, weights, requires_grad=True)
    return parts


def plain_gradients(model: HfConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the whole model as transformers runs it, with the loss written out: the sum over counted targets of cross
    entropy and of the mean over layers of experts × Σ (share of the tokens that go there × mean probability)."""
    from swarm.models.hf.skeleton import skeleton

    holder = nn.Module()
    holder.model = skeleton(model)
    install_weights(holder, weights, requires_grad=True)
    answer = holder.model(input_ids=TOKENS, output_router_logits=True, use_cache=False)
    labels = TARGETS.masked_fill(TARGETS < 0, -100).reshape(-1)
    loss = F.cross_entropy(answer.logits.float().view(-1, 96), labels, reduction="sum")
    of_layers = []
    for logits in answer.router_logits:
        probabilities = logits.float().softmax(-1)
        taken = torch.zeros(probabilities.shape)
        for token, row in enumerate(probabilities):
            taken[token, row.detach().topk(2).indices] = 1.0
        of_layers.append(probabilities.shape[1] * sum((taken.mean(0) * probabilities.mean(0)).unbind()))
    total = loss + COUNTED * COEFFICIENT * torch.stack(of_layers).mean()
    named = dict(holder.named_parameters())
    return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


def cut_gradients(parts: Sequence[PartModule], *, defers: bool = False) -> dict[str, Tensor]:
    *stages, ends = parts
    with weighed(COUNTED):
        hidden, embedded = run_embedding(ends, TOKENS, seed=None)
        graphs = []
        for stage in stages:
            hidden, graph = run_forward(stage, hidden, seed=None, graph=True, defers=defers)
            assert graph is not None
            graphs.append(graph)
    _, counted, grad, found = run_head(ends, hidden, TARGETS)
    assert counted == COUNTED
    back: Tensor | None = grad
    for graph in reversed(graphs):
        back, more = run_backward(graph, back)
        found = [*found, *more]
    return dict(summed([*found, *run_backward(embedded, back)[1]]))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5 * max(scale, 1.0), msg=name)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe", "jamba"])
def test_gradients_of_a_cut_are_those_of_the_whole_with_each_layers_loss(name: str) -> None:
    changes = {"num_experts": 4} if name == "jamba" else {}  # half of its layers have any
    model = balanced_model(name, **changes)
    family = HfFamily(model)
    weights = drawn(family)
    expected = plain_gradients(model, weights)
    without = cut_gradients(installed(HfFamily(foreign_model(name, **changes)), weights, SplitConfig(stages=2)))
    for stages in (1, 2):
        found = cut_gradients(installed(family, weights, SplitConfig(stages=stages)))
        assert_close(found, expected)
    routers = [key for key in expected if (expected[key] - without[key]).abs().max() > 1e-3]
    assert any("router" in key or "gate.weight" in key for key in routers), "the loss is felt"


def test_whatever_computes_a_stage_gives_the_same_bits() -> None:
    family = HfFamily(balanced_model())
    weights = drawn(family)
    kept = cut_gradients(installed(family, weights, SplitConfig(stages=2)))
    again = installed(family, weights, SplitConfig(stages=2))
    for part in again:
        part.activation_checkpointing = True
    for found in (
        cut_gradients(again),
        cut_gradients(installed(family, weights, SplitConfig(stages=2)), defers=True),
        cut_gradients(installed(family, weights, SplitConfig(stages=4))),
    ):
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_loss_that_is_reported_and_evaluated_is_the_language_models_alone() -> None:
    family, plain = HfFamily(balanced_model()), HfFamily(foreign_model("qwen3_moe"))
    weights = drawn(family)
    hosted = SplitConfig(stages=1, ends="hosted")
    (with_loss,), (without,) = (installed(one, weights, hosted) for one in (family, plain))
    with weighed(COUNTED):
        loss, counted, graph = run_loss(with_loss, TOKENS, TARGETS, seed=None, graph=True)
    assert (loss, counted) == run_loss(without, TOKENS, TARGETS, seed=None, graph=False)[:2]
    assert with_loss.evaluate(TOKENS, TARGETS) == without.evaluate(TOKENS, TARGETS)
    assert graph is not None
    assert_close(dict(run_backward(graph, None)[1]), plain_gradients(balanced_model(), weights))


def test_even_use_of_experts_costs_least() -> None:
    even = torch.eye(4).repeat(3, 1) * 20
    assert float(balance_loss(even, 1)) == pytest.approx(1.0)
    assert float(balance_loss(even[:1].repeat(12, 1), 1)) == pytest.approx(4.0)
    assert float(balance_loss(torch.eye(4) + torch.eye(4).roll(1, 0), 2)) == pytest.approx(2.0)


def test_count_of_targets_is_of_the_thread_that_computes_and_while_it_does() -> None:
    with weighed(3):
        with weighed(5):
            assert targets_counted() == 5
        assert targets_counted() == 3
    assert targets_counted() == 0


class FakePart:
    """Notes how many targets it is told of."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, Any]:
        self.told.append(targets_counted())
        return x + 1, None


def run(phases: Phases[Any]) -> Any:
    return complete(phases)


def test_count_goes_from_stage_to_stage_behind_the_tensor_and_no_larger_than_the_microbatch() -> None:
    shape = TensorSpec((1, 4, 2), "float32")
    specs = BoundarySpecs(
        activation=shape, tokens=TensorSpec((1, 4), "int64"), codec=FLOAT32, hosted=False, counted=True, packed=True
    )
    work, part = StepWork(1, MicrobatchId(PeerId("tr"), "00" * 8, 0, 0)), FakePart()
    compute = StageCompute(part, specs, torch.device("cpu"))  # type: ignore[arg-type]
    positions = torch.tensor([[0, 1, 0, 1]])
    payload = specs.joined(bytes(32), RowNotes(positions, 3))
    assert memoryview(payload).nbytes == specs.activation_bytes == specs.arriving_bytes(1, "forward")[0] == 32 + 1 + 4
    output, _ = run(compute.forward(payload, 0, work, first=False))
    assert bytes(output) == bytes(compute.output(payload, 0, work, first=False))
    assert specs.parted(output)[1].counted == 3
    assert torch.equal(specs.parted(output)[1].positions, positions)  # type: ignore[arg-type]
    assert part.told == [3, 3]
    with pytest.raises(Violation, match="5 targets where a microbatch has 4"):
        run(compute.forward(specs.joined(bytes(32), RowNotes(positions, 5)), 0, work, first=False))
    bare = replace(specs, counted=False, packed=False)
    assert bare.joined(payload, RowNotes(positions, 3)) is payload
    assert bare.parted(payload) == (payload, RowNotes())
