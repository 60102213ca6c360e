"""Numbers: the mean, the norm, the digest."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.averaging.allreduce.output import ReducedVector, squared_norm, weighted_mean
from swarm.averaging.allreduce.plan import WireType
from swarm.errors import Violation
from swarm.ids import PeerId
from tests.harness.rigs.averaging import make_plan

A, B = PeerId("p0"), PeerId("p1")


def test_weighted_mean_adds_in_rank_order_whatever_the_order_of_the_sums() -> None:
    large, one = np.array([1e300]), np.array([1.0])
    sums = {A: large, B: -large, PeerId("c"): one}
    backwards = dict(reversed(sums.items()))
    assert weighted_mean(sums, tuple(sums), 4) == 0.25
    assert weighted_mean(backwards, tuple(sums), 4) == 0.25


def test_weighted_mean_rounds_once() -> None:
    ones = np.full(3, np.float32(1) + np.float32(2**-23))
    assert weighted_mean({A: ones, B: -np.ones(3, np.float32)}, (A, B), 1).tolist() == [2.0**-23] * 3


def test_weighted_mean_leaves_its_inputs_alone() -> None:
    sums = {A: np.ones(2, np.float32), B: np.ones(2, np.float32)}
    weighted_mean(sums, (A, B), 2)
    assert all((values == 1).all() for values in sums.values())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weighted_mean_of_a_value_that_is_not_finite_names_its_sender(value: float, dtype: type) -> None:
    bad = np.array([0.0, value], dtype)
    with pytest.raises(Violation) as caught:
        weighted_mean({A: np.zeros(2, dtype), B: bad}, (A, B), 1)
    assert caught.value.peer == B


@pytest.mark.parametrize(("dtype", "value"), [("float32", 1e39), ("float64", 1e200)])
def test_sums_whose_result_does_not_fit_are_held_against_the_largest_where_it_does_not(
    dtype: WireType, value: float
) -> None:
    ordinary, large = np.array([1e38, 1.0]), np.array([1.0, value])
    with pytest.raises(Violation, match="fit") as caught:
        weighted_mean({A: ordinary, B: large}, (A, B), 1, dtype)
    assert caught.value.peer == B


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 1000])
def test_squared_norm_of_whole_numbers_is_exact(size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    assert squared_norm(values) == sum(number * number for number in range(size))


def test_squared_norm_of_the_largest_floats_is_finite() -> None:
    assert np.isfinite(squared_norm(np.full(1000, np.finfo(np.float32).max)))


def test_output_filled_in_any_order_has_the_same_norm_and_digest() -> None:
    plan = make_plan([1, 1], 37)
    values = np.random.default_rng(0).standard_normal(37).astype(np.float32)
    outputs = [ReducedVector(plan), ReducedVector(plan)]
    for output, chunks in zip(outputs, (plan.chunks, plan.chunks[::-1]), strict=True):
        for chunk in chunks:
            output.store(chunk, values[chunk.start : chunk.stop].tobytes())
    assert outputs[0].digest() == outputs[1].digest()
    assert outputs[0].squared_norm() == outputs[1].squared_norm()
    assert np.array_equal(outputs[0].vector, values)


def test_output_with_one_bit_changed_has_another_digest() -> None:
    plan = make_plan([1], 2)
    digests = set()
    for value in (1.0, np.nextafter(np.float32(1), np.float32(2))):
        output = ReducedVector(plan)
        output.store(plan.chunks[0], np.array([0, value], np.float32).tobytes())
        digests.add(output.digest())
    assert len(digests) == 2


@pytest.mark.parametrize("encoded", [b"", bytes(7), np.array([np.nan, 0], np.float32).tobytes()])
def test_output_refuses_wrong_bytes_naming_the_reducer(encoded: bytes) -> None:
    output = ReducedVector(make_plan([0, 1], 2))
    with pytest.raises(Violation) as caught:
        output.store(make_plan([0, 1], 2).chunks[0], encoded)
    assert caught.value.peer == B
