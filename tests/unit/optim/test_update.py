"""A step is taken in place and known before: its digest, for every optimizer, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swarm.models.layout import FlatLayout
from swarm.optim.adafactor import Adafactor
from swarm.optim.adamw import AdamW
from swarm.optim.muon import Muon
from swarm.optim.outer import Outer, OuterNesterov
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.sgd import Sgd
from swarm.optim.tallies import Steering
from swarm.optim.update import (
    CHUNK_ELEMENTS,
    StepNumbers,
    Update,
    Vectors,
    hashes_after,
    stepped,
    take_step,
)
from swarm.state.snapshot import hashes_of

SHAPES = [("norm.weight", (37,)), ("table.weight", (CHUNK_ELEMENTS // 64 - 5, 64)), ("a.weight", (96, 80))]
LAYOUT = FlatLayout.from_shapes([*SHAPES, ("b.bias", (3,)), ("c.weight", (40, 7000))], {"a.weight", "c.weight"})
CPU = torch.device("cpu")
CONFIG = OptimizerConfig()
UPDATES: dict[str, Update] = {
    "adamw": AdamW(CONFIG),
    "adamw-apart": AdamW(CONFIG, in_c=False),
    "sgd": Sgd(CONFIG),
    "outer": Outer(OuterNesterov()),
    "fragment": Outer(OuterNesterov(), fragments=2),
    "muon": Muon(CONFIG),
    "adafactor": Adafactor(CONFIG),
    "steering": Steering(AdamW(CONFIG), rate=0.25),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def layout_of(update: Update) -> FlatLayout:
    return FlatLayout(
        LAYOUT.slots,
        LAYOUT.elements,
        LAYOUT.decayed,
        matrices=frozenset({"a.weight"}),
        steered=frozenset({"norm.weight"}),
        told=frozenset({"b.bias"}),
        vectors=update.vectors,
    )


def numbers(seed: int) -> Tensor:
    return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))


def state_of(update: Update) -> Vectors:
    lengths = enumerate(layout_of(update).lengths)
    return tuple(numbers(seed).abs()[:elements].clone() for seed, elements in lengths)


@pytest.mark.parametrize("name", UPDATES)
def test_step_in_place_is_the_one_beside_and_has_the_hashes_told_before(name: str, threads: int) -> None:
    update, mean = UPDATES[name], numbers(9)
    state, layout = state_of(update), layout_of(update)
    assert len(state[0]) > CHUNK_ELEMENTS
    averaged = update.averaged(layout, 3)
    plan = update.plan(state, mean[averaged], layout, StepNumbers(step=3, lr=0.01, clip=0.5), CPU)
    before = [vector.clone() for vector in state]
    told = hashes_after(plan, state)
    after = stepped(plan, state)
    assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True)), "nothing has changed yet"
    assert told == hashes_of([vector.view(torch.uint8).numpy().data for vector in after])
    take_step(plan, state, state)
    assert all(torch.equal(one, other) for one, other in zip(state, after, strict=True))
    assert not torch.equal(state[0][averaged], before[0][averaged])
    assert torch.equal(mean, numbers(9))


def test_steering_moves_each_element_by_what_it_counted_and_leaves_the_rest_to_the_optimizer() -> None:
    update = Steering(AdamW(CONFIG), rate=0.25)
    state, layout, mean = state_of(update), layout_of(update), numbers(9)
    counts, at = layout.views(mean)["norm.weight"], StepNumbers(step=3, lr=0.01, clip=0.5)
    counts.copy_(torch.arange(37) % 4)
    counts[:] = counts.sort().values * 2.0**-30
    counts[-1] += 37 * 1.5 * 2.0**-30 - counts.sum()
    assert counts[10:12].tolist() != counts[-2:].tolist()
    found, plain = (stepped(one.plan(state, mean, layout, at, CPU), state) for one in (update, update.inner))
    mine = layout.views(found[0])["norm.weight"] - layout.views(state[0])["norm.weight"]
    torch.testing.assert_close(mine, 0.25 * torch.sign(1.5 * 2.0**-30 - counts))
    for before, steered, others in zip(state, found, plain, strict=True):
        told, kept = (layout.views(vector)["b.bias"] for vector in (steered, before))
        assert torch.equal(told, kept), "what is for people alone stays"
        for name in ("table.weight", "a.weight", "c.weight"):
            assert torch.equal(layout.views(steered)[name], layout.views(others)[name])
    for before, steered in zip(state[1:], found[1:], strict=True):
        assert torch.equal(layout.views(steered)["norm.weight"], layout.views(before)["norm.weight"])
    even = mean.clone()
    layout.views(even)["norm.weight"].fill_(3 * 2.0**-30)
    stays = stepped(update.plan(state, even, layout, at, CPU), state)[0]
    assert torch.equal(layout.views(stays)["norm.weight"], layout.views(state[0])["norm.weight"])


def test_sgd_is_torchs_with_nesterov_and_decoupled_decay() -> None:
    config = OptimizerConfig(name="sgd", momentum=0.8, weight_decay=0.3)
    layout = FlatLayout.from_shapes([("norm", (5,)), ("matrix", (7, 5))], {"matrix"})
    start = torch.linspace(-1, 1, layout.elements)
    reference = {name: view.clone().requires_grad_() for name, view in layout.views(start).items()}
    sgd = torch.optim.SGD(reference.values(), lr=1.0, momentum=0.8, nesterov=True)
    state: Vectors = (start.clone(), torch.zeros_like(start))
    for step in range(1, 20):
        lr, mean = 0.1 / step, torch.randn(layout.elements, generator=torch.Generator().manual_seed(step))
        state = stepped(Sgd(config).plan(state, mean, layout, StepNumbers(step=step, lr=lr, clip=0.5)), state)
        for name, view in layout.views(mean).items():
            reference[name].grad = view * 0.5
        sgd.param_groups[0]["lr"] = lr
        with torch.no_grad():
            reference["matrix"].mul_(1 - lr * 0.3)
        sgd.step()
    for name, view in layout.views(state[0]).items():
        assert torch.allclose(view, reference[name], rtol=1e-5, atol=1e-6), name
