"""Blockwise int8: its bound, its bytes, and what it does not let in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from swarm.compression.blockwise import BLOCK, INT8
from swarm.compression.codec import EncodeContext
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

CONTEXT = EncodeContext(step=1, direction="forward")

FLOATS = arrays(
    np.float32, st.integers(0, 3 * BLOCK), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
LARGEST = float(np.finfo(np.float32).max)


def round_trip(values: torch.Tensor) -> torch.Tensor:
    return INT8.decode(INT8.encode(values, CONTEXT), TensorSpec(tuple(values.shape), "float32"))


def bound(values: torch.Tensor) -> torch.Tensor:
    """What an element may be off by."""
    if not len(values):
        return torch.zeros(0)
    largest = [block.abs().max().double().expand(len(block)) for block in values.split(BLOCK)]
    return torch.cat(largest) * (1 / 254 + 2.0**-22) + 1.5e-36


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FLOATS)
def test_int8_of_any_finite_values_stays_finite_and_within_its_bound(values: np.ndarray) -> None:  # type: ignore[type-arg]
    tensor = torch.from_numpy(values)
    decoded = round_trip(tensor)
    assert decoded.isfinite().all()
    assert ((decoded.double() - tensor.double()).abs() <= bound(tensor)).all()


@pytest.mark.parametrize("value", [0.0, LARGEST, -LARGEST, 1e-45, 1.4e-38, 2e-36])
def test_int8_at_the_ends_of_the_format(value: float) -> None:
    tensor = torch.full((BLOCK + 3,), value)
    assert ((round_trip(tensor).double() - tensor.double()).abs() <= bound(tensor)).all()


def test_int8_keeps_whole_numbers_up_to_127_and_the_shape() -> None:
    tensor = torch.arange(-127, 128).float().reshape(5, 51)
    assert torch.equal(round_trip(tensor), tensor)
    assert torch.equal(round_trip(tensor.t()), tensor.t())


def test_int8_bytes_are_scales_then_steps() -> None:
    wire = bytes(INT8.encode(torch.tensor([127.0, -64.0] + [0.0] * (BLOCK - 2) + [2 * 127.0]), CONTEXT))
    assert np.frombuffer(wire[:8], "<f4").tolist() == [1.0, 2.0]
    assert np.frombuffer(wire[8:], np.int8)[[0, 1, 2, BLOCK]].tolist() == [127, -64, 0, 127]
    assert len(wire) == INT8.wire_bytes(TensorSpec((BLOCK + 1,), "float32")) == 8 + BLOCK + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_int8_value_that_is_not_finite_is_refused_by_whoever_decodes_it(bad: float) -> None:
    tensor = torch.ones(BLOCK + 8)
    tensor[BLOCK + 1] = bad
    with pytest.raises(Violation, match="scale"):
        round_trip(tensor)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, LARGEST / 126])
def test_int8_hostile_scale_is_a_violation(scale: float) -> None:
    wire = np.array([scale], "<f4").tobytes() + bytes(8)
    with pytest.raises(Violation, match="scale"):
        INT8.decode(wire, TensorSpec((8,), "float32"))


def test_int8_step_that_no_encoder_makes_is_a_violation() -> None:
    wire = np.array([1.0], "<f4").tobytes() + bytes([0x80] * 8)
    with pytest.raises(Violation, match="step"):
        INT8.decode(wire, TensorSpec((8,), "float32"))


def test_int8_carries_no_whole_numbers() -> None:
    with pytest.raises(BugError):
        INT8.encode(torch.ones(3, dtype=torch.int64), CONTEXT)
    with pytest.raises(BugError):
        INT8.decode(bytes(7), TensorSpec((3,), "int64"))
