"""A part that stages share: the gradient is the sum over all hops, and its state becomes that of each stage."""

from __future__ import annotations

import torch

from swarm.columns import digests_said, shared_tokens
from swarm.ids import shared_part
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import Parting, TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from tests.harness.rigs.optim import MODEL, work

SPLIT = SplitConfig(stages=2)
SHARED = shared_part(2)
CONFIG = MODEL.model_copy(update={"layers": 4, "dropout": 0.0})


def trained(name: str, state: Snapshot | None = None) -> TrainedPart:
    family = family_of(CONFIG)
    spec = family.part(SPLIT, name)  # type: ignore[arg-type]
    assert spec is not None
    part = TrainedPart(spec, CONFIG, AdamW(OptimizerConfig()), accumulator="float64")
    if state is None:
        state = initial_snapshot(spec.name, part.layout, family.initial_weights(0, spec))
    part.install(state)
    return part


def with_stages() -> tuple[TrainedPart, list[TrainedPart]]:
    """A shared part, and two stages with the same numbers that share nothing."""
    shared = trained(SHARED)
    stages = [trained(name) for name in ("stage-0", "stage-1")]
    shared.parting = Parting(1, {stage.spec.name: stage.layout for stage in stages})
    for stage in stages:
        stage.install(shared.parted(stage.spec.name).apart())
    return shared, stages


def there_and_back(parts: list[TrainedPart]) -> None:
    """One microbatch through these, one after the other, and into their sums."""
    hidden, graphs = torch.randn(2, 8, CONFIG.dim, generator=torch.Generator().manual_seed(1)), []
    for part in parts:
        hidden, graph = part.forward(hidden, seed=None)
        graphs.append(graph)
    grad: torch.Tensor | None = torch.ones_like(hidden)
    for hop in reversed(range(len(parts))):
        grad, gradients = parts[hop].backward(graphs[hop], grad)
        parts[hop].accumulate(work(0)._replace(hop=hop if parts[0] is parts[1] else 0), gradients)


def test_tied_gradient_is_the_sum_over_the_stages_and_counts_a_token_once() -> None:
    shared, stages = with_stages()
    there_and_back([shared, shared])
    there_and_back(stages)
    assert torch.equal(shared.gradient_sum(), stages[0].gradient_sum() + stages[1].gradient_sum())
    assert shared.accumulated(1) == {work(0), work(0)._replace(hop=1)}
    assert shared_tokens(SHARED, [40, 24]) == 32
    assert shared_tokens(stages[0].spec.name, [40, 24]) == 0


def test_state_becomes_that_of_each_stage_with_the_digests_that_were_said() -> None:
    shared, stages = with_stages()
    there_and_back([shared, shared])
    said = shared.prepare(shared.gradient_sum().float() / 16, lr=1e-3, clip=1.0, step=1)
    shared.swap()
    digests = digests_said(SHARED, said)
    assert list(digests) == [stage.spec.name for stage in stages]
    for stage in stages:
        state = shared.parted(stage.spec.name)
        assert digest(state) == digests[stage.spec.name]
        assert all(torch.equal(*pair) for pair in zip(state.vectors, shared.snapshot().vectors, strict=True))
        trained(stage.spec.name, state)  # it fits
    assert "+" not in trained(SHARED).prepare(torch.zeros(shared.layout.elements), lr=1e-3, clip=1.0, step=1)
