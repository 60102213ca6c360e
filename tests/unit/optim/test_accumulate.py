from __future__ import annotations

import pytest
import torch

from swarm.errors import BugError, Violation
from swarm.models.layout import FlatLayout
from swarm.models.passes import Gradients
from swarm.optim.accumulate import Accumulator
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
