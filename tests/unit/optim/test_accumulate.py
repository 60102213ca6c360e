from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BugError, Violation
from swarm.models.layout import FlatLayout
from swarm.models.passes import Bound, Gradients
from swarm.optim.accumulate import Accumulator, length_of
from tests.harness.rigs.optim import work

LAYOUT = FlatLayout.from_shapes([("a", (3, 5)), ("b", (4,))])
CPU = torch.device("cpu")


def gradients(seed: int, scale: float = 1.0) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    return [(slot.name, torch.randn(slot.shape, generator=generator) * scale) for slot in LAYOUT.slots]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_accumulator_sums_each_microbatch_once(dtype: str) -> None:
    accumulator = Accumulator(LAYOUT, dtype, CPU)
    for position in range(3):
        accumulator.add(work(position), list(reversed(gradients(position))))
    expected = sum(dict(gradients(position))["a"].double() for position in range(3))
    assert torch.allclose(LAYOUT.views(accumulator.total)["a"].double(), expected, atol=1e-6)
    assert accumulator.work == {work(position) for position in range(3)}
    with pytest.raises(BugError, match="already"):
        accumulator.add(work(1), gradients(1))
    accumulator.reset()
    assert accumulator.total.abs().max() == 0
    assert accumulator.work == frozenset()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_accumulator_refuses_values_not_finite_before_adding_anything(bad: float) -> None:
    accumulator = Accumulator(LAYOUT, "float32", CPU)
    accumulator.add(work(0), gradients(0))
    before, poisoned = accumulator.total.clone(), gradients(1)
    poisoned[1][1][2] = bad
    with pytest.raises(Violation, match="gradient of b is not finite"):
        accumulator.add(work(1), poisoned)
    assert torch.equal(accumulator.total, before)
    accumulator.add(work(1), gradients(1))


@pytest.mark.parametrize(
    "wrong",
    [
        gradients(0)[:1],
        [*gradients(0), gradients(0)[0]],
        [("a", torch.zeros(3, 5)), ("b", torch.zeros(5))],
        [("a", torch.zeros(3, 5)), ("c", torch.zeros(4))],
    ],
)
def test_accumulator_incomplete_gradients_are_a_bug(wrong: Gradients) -> None:
    accumulator = Accumulator(LAYOUT, "float32", CPU)
    with pytest.raises(BugError):
        accumulator.add(work(0), wrong)
    assert accumulator.work == frozenset()


def test_accumulator_float64_bits_do_not_depend_on_order_or_placement() -> None:
    scales = [10.0 ** (position % 9 - 5) for position in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    forward, shuffled, left, right = (Accumulator(LAYOUT, "float64", CPU) for _ in range(4))
    for position, other in enumerate(order):
        forward.add(work(position), gradients(position, scales[position]))
        shuffled.add(work(other), gradients(other, scales[other]))
        (left if other % 3 else right).add(work(other), gradients(other, scales[other]))
    assert torch.equal(forward.total, shuffled.total)
    assert torch.equal(forward.total, left.total + right.total)


def test_accumulator_remove_undoes_an_addition_exactly_in_float64() -> None:
    accumulator, without = (Accumulator(LAYOUT, "float64", CPU) for _ in range(2))
    for position in range(6):
        accumulator.add(work(position), gradients(position, 10.0**position))
        if position != 2:
            without.add(work(position), gradients(position, 10.0**position))
    accumulator.remove(work(2), gradients(2, 100.0))
    assert torch.equal(accumulator.total, without.total)
    assert accumulator.work == without.work
    with pytest.raises(BugError, match="not in the sum"):
        accumulator.remove(work(2), gradients(2, 100.0))


# --- influence -------------------------------------------------------------------------------------------------------


@given(
    scales=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6),
    most=st.floats(1e-3, 10.0),
    order=st.randoms(use_true_random=False),
)
def test_bounded_microbatch_comes_out_as_it_went_in_and_goes_in_again_with_the_same_bits(
    scales: list[float], most: float, order: random.Random
) -> None:
    without, with_it = Accumulator(LAYOUT, "float64", CPU), Accumulator(LAYOUT, "float64", CPU)
    others = list(enumerate(scales[1:], start=1))
    for position, scale in others:
        without.add(work(position), gradients(position, scale), bound=Bound(most))
    order.shuffle(others)
    for position, scale in [(0, scales[0]), *others]:
        with_it.add(work(position), gradients(position, scale), bound=Bound(most))
    whole = with_it.total.clone()
    with_it.remove(work(0), gradients(0, scales[0]))
    assert torch.equal(with_it.total, without.total)
    assert with_it.lengths == without.lengths
    without.add(work(0), gradients(0, scales[0]), bound=Bound(most))
    assert torch.equal(without.total, whole)


@pytest.mark.parametrize("scale", [1.0, 50.0, 1e15])
def test_microbatch_is_scaled_down_to_the_most_and_a_shorter_one_keeps_its_bits(scale: float) -> None:
    accumulator, found = Accumulator(LAYOUT, "float32", CPU), gradients(0, scale)
    accumulator.add(work(0), found, bound=Bound(2.0 * length_of(gradients(0))))
    length = float(accumulator.total.double().norm())
    assert length == pytest.approx(length_of(gradients(0)) * min(scale, 2.0), rel=1e-6)
    plain = Accumulator(LAYOUT, "float32", CPU)
    plain.add(work(0), found)
    assert torch.equal(accumulator.total, plain.total) == (scale == 1.0)
    assert accumulator.lengths == (length_of(found), 0.0)
    assert plain.lengths == (0.0, 0.0)


def test_lengths_are_the_medians_of_what_is_there_before_it_is_scaled() -> None:
    accumulator = Accumulator(LAYOUT, "float32", CPU)
    for position in range(4):
        accumulator.add(work(position), gradients(1, 10.0**position), bound=Bound(1.0, float(position)))
    one = length_of(gradients(1))
    assert accumulator.lengths == (pytest.approx(10 * one), 2.0), "no gradient came for the first"
    accumulator.remove(work(0), gradients(1))
    accumulator.remove(work(1), gradients(1, 10.0))
    assert accumulator.lengths == (pytest.approx(100 * one), 2.0)
    accumulator.reset()
    assert accumulator.lengths == (0.0, 0.0)


def test_length_of_numbers_whose_squares_are_none_is_more_than_any_bound_and_leaves_nothing() -> None:
    accumulator = Accumulator(LAYOUT, "float32", CPU)
    accumulator.add(work(0), gradients(0, 1e30), bound=Bound(math.inf))
    assert accumulator.lengths[0] == 1e100
    accumulator.reset()
    accumulator.add(work(0), gradients(0, 1e30), bound=Bound(1.0))
    assert float(accumulator.total.abs().max()) < 1e-30
