"""What the benchmark ``convergence`` compares: its mixings do what the strategies say, and its training is ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_shards.source import ShardSource
from peers.data.text import Corpus
from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import STRATEGIES
from swarm.ids import PeerId
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import FlatLayout, install_weights
from swarm.models.registry import family_of
from swarm.optim.outer import OuterNesterov
from swarm.optim.schedules import OptimizerConfig
from tests.benchmarks._convergence_mixing import Exact, Grouped, Local, Pushing
from tests.benchmarks._convergence_replicas import Replicas, Scale, make_text

PEERS = [PeerId(f"{number:02d}") for number in range(16)]
LAST = 100
SCALE = Scale(
    model=GptConfig(vocab_size=300, dim=16, layers=1, heads=2, context=16),
    optimizer=OptimizerConfig(),
    replicas=2,
    rows=2,
    steps=4,
    held_out_rows=3,
)


def values() -> Tensor:
    return torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def meet(mixed: Tensor, before: Tensor) -> bool:
    return torch.allclose(mixed, before.mean(0).expand_as(mixed))


def some(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def test_exact_gives_every_replica_the_mean_gradient() -> None:
    assert meet(Exact().gradients(values()), values())
    assert torch.equal(Exact().parameters(values(), 1, LAST), values())
    assert Exact().vectors(16, 1, LAST) == 2 * 15 / 16


def test_swapping_groups_meet_after_two_steps_and_fixed_ones_never() -> None:
    swapping, fixed = Grouped(STRATEGIES["grid"], PEERS), Grouped(STRATEGIES["grid"], PEERS, swap=False)
    once = swapping.parameters(values(), 1, LAST)
    assert not meet(once, values())
    assert meet(swapping.parameters(once, 2, LAST), values())
    apart = fixed.parameters(fixed.parameters(values(), 1, LAST), 2, LAST)
    assert torch.equal(apart, fixed.parameters(apart, 3, LAST))
    assert not meet(apart, values())
    assert swapping.vectors(16, 1, LAST) == fixed.vectors(16, 1, LAST) == 2 * 3 / 4


def test_groups_that_sync_meet_then_but_not_after_the_last_step() -> None:
    fixed = Grouped(STRATEGIES["grid"], PEERS, sync=10, swap=False)
    assert meet(fixed.parameters(values(), 10, LAST), values())
    assert not meet(fixed.parameters(values(), 9, LAST), values())
    assert not meet(fixed.parameters(values(), 100, LAST), values())
    assert fixed.vectors(16, 10, LAST) == 2 * 15 / 16


def test_pushing_meets_after_four_steps_of_one_vector_each() -> None:
    pushing, mixed = Pushing(PushSum(), PEERS), values()
    for step in range(1, 5):
        assert not meet(mixed, values())
        mixed = pushing.parameters(mixed, step, LAST)
        assert pushing.vectors(16, step, LAST) == 1.0
    assert meet(mixed, values())


def test_local_replicas_go_alone_and_then_on_from_one_anchor() -> None:
    local = Local(4, OuterNesterov(lr=1.0, momentum=0.0))
    anchor = torch.zeros(5)
    local.start(anchor)
    params = values().float()
    assert torch.equal(local.parameters(params, 3, LAST), params)
    assert local.vectors(16, 3, LAST) == 0.0
    assert torch.allclose(local.parameters(params, 4, LAST), params.mean(0).expand_as(params))
    assert local.vectors(16, 4, LAST) == 2 * 15 / 16


def test_local_replicas_meet_in_one_fragment_after_the_other() -> None:
    layout = FlatLayout.from_shapes([("one", (64,)), ("two", (64,))])
    local = Local(4, OuterNesterov(lr=1.0, momentum=0.0), layout, fragments=2)
    local.start(torch.zeros(128))
    params = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    first = local.parameters(params, 4, LAST)
    assert torch.equal(first[:, :64], params[:, :64])
    assert torch.allclose(first[:, 64:], params.mean(0)[64:].expand(16, 64), atol=1e-6)
    assert torch.equal(local.anchor, torch.cat([torch.zeros(64), first[0, 64:]]))
    assert local.vectors(16, 4, LAST) == 15 / 16
    assert meet(local.parameters(first, 8, LAST), params)


@pytest.fixture
def replicas(tmp_path: Path) -> Replicas:
    documents = tuple(f"Document {number}: {'word ' * 20}{number * 7919} ends." for number in range(60))
    return Replicas(SCALE, make_text(tmp_path, Corpus("made up", documents), SCALE, seed=0), seed=1)


def test_gradients_of_all_replicas_are_those_of_each_alone(replicas: Replicas, tmp_path: Path) -> None:
    together = replicas.gradients()
    family = family_of(SCALE.model)
    model = family.build(family.whole)
    install_weights(model, family.initial_weights(1))
    model.requires_grad_()
    layout = family.layout(model)
    for peer, gradient in zip(SCALE.peers, together, strict=True):
        batch = ShardSource(tmp_path / peer, trainer=peer, microbatch_size=2, context=16).take()
        model.zero_grad()
        total, count = model.loss(model(batch.inputs), batch.targets)
        (total / count).backward()
        alone = layout.flatten({name: some(parameter.grad) for name, parameter in model.named_parameters()})
        assert torch.allclose(gradient, alone, rtol=1e-4, atol=1e-6)


def test_step_of_equal_gradients_keeps_replicas_equal_and_lowers_the_loss(replicas: Replicas) -> None:
    before = replicas.held_out_losses(replicas.params)
    assert before[0] == before[1]
    for step in range(1, SCALE.steps + 1):
        replicas.step(Exact().gradients(replicas.gradients()), step)
    assert torch.equal(replicas.params[0], replicas.params[1])
    assert replicas.held_out_losses(replicas.params)[0] < before[0]
