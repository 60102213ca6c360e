from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import ALIGNMENT, FlatLayout
from swarm.optim import update
from swarm.optim.outer import LEAST_ELEMENTS, LONGEST, Outer, OuterNesterov, OuterState, fragment_of
from swarm.optim.update import StepNumbers, stepped

ELEMENTS = 70_001
"""Beyond what torch gives to a single thread, and no multiple of a vector's width."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def vector(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * scale


def after(optimizer: OuterNesterov, rounds: int) -> OuterState:
    state = OuterState.first(vector(0))
    for number in range(1, rounds + 1):
        state = optimizer.step(state, vector(number, 0.01))
    return state


def test_outer_steps_are_sgd_with_nesterov_momentum() -> None:
    reference = vector(0).requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 13):
        reference.grad = vector(number, 0.01)
        sgd.step()
    state = after(OuterNesterov(), 12)
    assert torch.allclose(state.anchor, reference, rtol=1e-5, atol=1e-6)
    assert torch.allclose(state.momentum, sgd.state[reference]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_outer_step_is_what_single_roundings_give() -> None:
    anchor, momentum, delta = (vector(seed).numpy() for seed in range(3))
    lr, mu = np.float32(0.7), np.float32(0.9)
    new = OuterNesterov().step(OuterState(*map(torch.from_numpy, (anchor, momentum))), torch.from_numpy(delta))
    velocity = momentum * mu + delta
    assert np.array_equal(new.momentum.numpy(), velocity)
    assert np.array_equal(new.anchor.numpy(), anchor - (velocity * mu + delta) * lr)


@pytest.mark.usefixtures("threads")
def test_outer_bits_do_not_depend_on_threads_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    alone = after(OuterNesterov(), 3)
    torch.set_num_threads(2)
    together = after(OuterNesterov(), 3)
    monkeypatch.setattr(update, "CHUNK_ELEMENTS", 1001)
    in_pieces = after(OuterNesterov(), 3)
    for other in (together, in_pieces):
        assert torch.equal(other.anchor, alone.anchor)
        assert torch.equal(other.momentum, alone.momentum)


def test_outer_without_momentum_at_rate_one_averages_the_parameters() -> None:
    anchor = vector(0)
    replicas = [anchor * (1 + 0.01 * vector(seed).clamp(-9, 9)) for seed in (1, 2, 3, 4)]
    deltas = torch.stack([anchor - params for params in replicas])
    mean = deltas.double().mean(0).float()
    state = OuterNesterov(lr=1.0, momentum=0.0).step(OuterState.first(anchor), mean)
    assert torch.equal(state.anchor, anchor - mean)
    assert torch.equal(state.momentum, mean)
    exact = torch.stack(replicas).double().mean(0)
    assert ((state.anchor.double() - exact).abs() <= exact.abs() * 2**-23).all()


def test_outer_step_of_replicas_that_stayed_is_no_step() -> None:
    state = OuterNesterov().step(OuterState.first(vector(0)), torch.zeros(ELEMENTS))
    assert torch.equal(state.anchor, vector(0))
    assert state.momentum.abs().max() == 0


def test_outer_step_touches_no_input() -> None:
    state, delta = OuterState(vector(0), vector(1)), vector(2)
    OuterNesterov().step(state, delta)
    assert torch.equal(state.anchor, vector(0))
    assert torch.equal(state.momentum, vector(1))
    assert torch.equal(delta, vector(2))


def test_outer_step_of_nothing_is_nothing() -> None:
    state = OuterNesterov().step(OuterState.first(torch.empty(0)), torch.empty(0))
    assert state.anchor.shape == (0,)


def test_outer_delta_of_another_kind_is_a_bug() -> None:
    state = OuterState.first(vector(0))
    for wrong in (torch.zeros(3), torch.zeros(ELEMENTS, dtype=torch.float64)):
        with pytest.raises(BugError, match="delta"):
            OuterNesterov().step(state, wrong)
    with pytest.raises(BugError, match="scalar"):
        OuterNesterov(lr=float("inf")).step(state, vector(1))


# --- fragments -------------------------------------------------------------------------------------------------------

LAYERS = FlatLayout.from_shapes([(f"layers.{number}", (100 + number % 3,)) for number in range(40)])
ONE_LONG = FlatLayout.from_shapes([("short", (40,)), ("long", (5000,)), ("last", (30,))])


def cuts(layout: FlatLayout, fragments: int) -> list[slice]:
    return [fragment_of(layout, fragments, step) for step in range(fragments)]


@pytest.mark.parametrize("layout", [LAYERS, ONE_LONG], ids=["layers", "one long"])
@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 7])
def test_fragments_cover_a_part_once_and_none_is_much_longer_than_its_share(layout: FlatLayout, fragments: int) -> None:
    found = cuts(layout, fragments)
    assert [0, *(one.stop for one in found)] == [*(one.start for one in found), layout.elements]
    assert all(0 < one.stop - one.start <= LONGEST * layout.elements / fragments + ALIGNMENT for one in found)
    assert all(one.start % ALIGNMENT == 0 for one in found)
    assert fragment_of(layout, fragments, 5 * fragments + 1) == found[1 % fragments]


def test_fragment_has_whole_parameters_and_only_a_long_one_is_cut() -> None:
    begins = {slot.offset for slot in LAYERS.slots}
    assert all(one.start in begins for one in cuts(LAYERS, 4))
    assert any(one.start not in {slot.offset for slot in ONE_LONG.slots} for one in cuts(ONE_LONG, 4))


def test_part_that_is_too_short_has_fewer_fragments() -> None:
    tiny = FlatLayout.from_shapes([("tiny", (LEAST_ELEMENTS * 2,))])
    assert [one.start for one in cuts(tiny, 4)] == [0, LEAST_ELEMENTS, 0, LEAST_ELEMENTS]
    assert cuts(FlatLayout.from_shapes([]), 4) == [slice(0, ALIGNMENT)] * 4


def test_step_of_a_fragment_is_that_of_the_whole_there_and_leaves_anchor_and_momentum_elsewhere() -> None:
    outer, whole = Outer(OuterNesterov(), fragments=4), Outer(OuterNesterov())
    layout = LAYERS.kept_by(outer.vectors)
    state = tuple(torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mean = torch.randn(layout.elements, generator=torch.Generator().manual_seed(9))
    numbers = StepNumbers(step=6, lr=0.1, clip=0.5)
    part = outer.averaged(layout, 6)
    found = stepped(outer.plan(state, mean[part], layout, numbers), state)
    expected = stepped(whole.plan(state, mean, layout, numbers), state)
    for old, new, full in zip(state, found, expected, strict=True):
        assert torch.equal(new[part], full[part])
        assert torch.equal(new[: part.start], old[: part.start])
        assert torch.equal(new[part.stop :], old[part.stop :])
    assert not torch.equal(found[1][part], state[1][part])
    with pytest.raises(BugError):
        outer.plan(state, mean, layout, numbers)
