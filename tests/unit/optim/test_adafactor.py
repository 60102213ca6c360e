"""Adafactor: what its paper says, with the same bits in whatever order sums are taken."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FACTORS, FlatLayout
from swarm.optim import adafactor, update
from swarm.optim.adafactor import Adafactor
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import StepNumbers, Vectors, hashes_after, stepped

CONFIG = OptimizerConfig(name="adafactor", weight_decay=0.3, beta2=0.9)
SHAPES = [("norm", (5,)), ("matrix", (24, 40)), ("experts", (3, 16, 9)), ("scale", ()), ("row", (1, 70))]
LAYOUT = FlatLayout.from_shapes(SHAPES, {"matrix"}).kept_by(Adafactor(CONFIG).vectors)
LR, CLIP = 0.02, 0.5


def mean_of(step: int) -> Tensor:
    return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3 - 5)


def begin() -> Vectors:
    return torch.linspace(-1, 1, LAYOUT.elements), torch.zeros(LAYOUT.kept_in(FACTORS).elements)


def reference(weights: Tensor, gradients: list[Tensor], *, decays: bool) -> Tensor:
    """Some steps of one tensor, as the formula is written, in float64."""
    weights, square = weights.double(), 0.0
    rows, columns = (torch.zeros(()) for _ in range(2))
    for step, given in enumerate(gradients, 1):
        g, after = given.double() * CLIP, 1 - CONFIG.beta2**step
        if g.ndim > 1:
            rows, columns = (
                CONFIG.beta2 * old + (1 - CONFIG.beta2) * (g * g).mean(axis, keepdim=True)
                for old, axis in ((rows, -1), (columns, -2))
            )
            usual = rows * columns / rows.mean(-2, keepdim=True) / after
        else:
            square = CONFIG.beta2 * square + (1 - CONFIG.beta2) * g * g
            usual = square / after
        u = g / (usual.sqrt() + CONFIG.eps)
        rms = float(u.square().mean().sqrt())
        weights = weights * (1 - LR * CONFIG.weight_decay if decays else 1.0) - LR * u / max(1.0, rms)
    return weights


def test_steps_are_those_of_the_formula() -> None:
    state, steps = begin(), range(1, 8)
    for step in steps:
        numbers = StepNumbers(step=step, lr=LR, clip=CLIP)
        state = stepped(Adafactor(CONFIG).plan(state, mean_of(step), LAYOUT, numbers), state)
    for name, begun in LAYOUT.views(begin()[0]).items():
        expected = reference(begun, [LAYOUT.views(mean_of(step))[name] for step in steps], decays=name == "matrix")
        assert torch.allclose(LAYOUT.views(state[0])[name].double(), expected, rtol=0, atol=2e-6), name


def test_only_sums_of_rows_and_columns_are_kept() -> None:
    kept = {slot.name: slot.elements for slot in LAYOUT.kept_in(FACTORS).slots}
    assert kept == {"norm": 5, "matrix": 64, "experts": 75, "scale": 1, "row": 71}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_bits_are_the_same_in_whatever_order_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    state, numbers = begin(), StepNumbers(step=3, lr=LR, clip=CLIP)
    told = hashes_after(Adafactor(CONFIG).plan(state, mean_of(1), LAYOUT, numbers), state)
    honest, sums = Tensor.sum, list[int]()

    def backwards(values: Tensor, *axis: int) -> Tensor:
        sums.append(values.numel())
        assert values.dtype == torch.int64, "a sum whose order would matter"
        return honest(values.flip([*range(values.ndim)]), *axis).flip(0) if axis else honest(values.flip(0))

    monkeypatch.setattr(Tensor, "sum", backwards)
    for elements, count in ((64, 1), (1 << 18, 3)):
        monkeypatch.setattr(adafactor, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(update, "CHUNK_ELEMENTS", elements)
        torch.set_num_threads(count)
        assert hashes_after(Adafactor(CONFIG).plan(state, mean_of(1), LAYOUT, numbers), state) == told
    assert len(sums) > 20, "nothing was summed otherwise"


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e-3, 1e15])
def test_step_is_finite_and_no_longer_than_the_learning_rate_of_gradients_of_any_size(scale: float) -> None:
    state, numbers = begin(), StepNumbers(step=1, lr=LR, clip=1.0)
    after = stepped(
        Adafactor(OptimizerConfig(weight_decay=0.0)).plan(state, mean_of(2) * scale, LAYOUT, numbers), state
    )
    for name, moved in LAYOUT.views(after[0] - state[0]).items():
        assert math.sqrt(float(moved.square().mean())) <= LR * 1.001, name
    assert all(bool(vector.isfinite().all()) for vector in after)
    assert torch.equal(after[0], state[0]) is (scale < 1e-9)


def test_mean_that_is_not_finite_is_a_bug() -> None:
    with pytest.raises(BugError, match="not finite"):
        Adafactor(CONFIG).plan(
            begin(), torch.full((LAYOUT.elements,), math.nan), LAYOUT, StepNumbers(step=1, lr=LR, clip=1.0)
        )
