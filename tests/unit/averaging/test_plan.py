"""Plans, cuts, strategies: what all members compute alike."""

from __future__ import annotations

import dataclasses

import pytest

from swarm.averaging.allreduce.partition import (
    CHUNK_ELEMENTS,
    LARGEST_CHUNK_ELEMENTS,
    chunk_elements_of,
    cut,
    part_bounds,
)
from swarm.averaging.allreduce.plan import MAX_WINDOW, MIN_WINDOW
from swarm.averaging.strategies import STRATEGIES
from swarm.config import AveragingConfig
from swarm.errors import BugError
from swarm.ids import PeerId
from tests.harness.rigs.averaging import make_plan, names


def test_part_bounds_equal_shares_differ_by_one_element() -> None:
    assert part_bounds(10, [1, 1, 1]) == ((0, 3), (3, 6), (6, 10))


def test_part_bounds_fewer_elements_than_reducers_leave_some_empty() -> None:
    assert sorted(stop - start for start, stop in part_bounds(2, [1, 1, 1])) == [0, 1, 1]


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1]])
def test_part_bounds_without_positive_share_are_a_bug(shares: list[int]) -> None:
    with pytest.raises(BugError):
        part_bounds(10, shares)


def test_cut_of_a_large_vector_has_chunks_of_a_quarter_mebibyte() -> None:
    chunks = cut(3 * CHUNK_ELEMENTS, [1, 1])
    assert [chunk.elements for chunk in chunks] == [CHUNK_ELEMENTS, CHUNK_ELEMENTS // 2] * 2
    assert [chunk.rank for chunk in chunks] == [0, 0, 1, 1]


def test_chunks_of_long_vectors_are_longer_within_bounds() -> None:
    lengths = [chunk_elements_of(elements) for elements in (0, 1, 1 << 22, (1 << 23) - 1, 1 << 23, 25_000_000, 10**9)]
    assert lengths == [CHUNK_ELEMENTS] * 4 + [2 * CHUNK_ELEMENTS] + [LARGEST_CHUNK_ELEMENTS] * 2


def test_plan_with_an_observer_gives_it_nothing_to_reduce() -> None:
    plan = make_plan([3, 0, 5], 8)
    assert plan.chunks_of(PeerId("p1")) == ()
    assert plan.contributors == (PeerId("p0"), PeerId("p2"))
    assert plan.total_weight == 8


def test_plan_with_shares_follows_them() -> None:
    plan = make_plan([1, 1, 0], 8, shares={PeerId("p2"): 3, PeerId("p0"): 1})
    assert [sum(chunk.elements for chunk in plan.chunks_of(peer)) for peer in plan.members] == [2, 0, 6]


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"members": names(2) + names(1)},
        {"weights": {PeerId("p0"): 1}},
        {"divide_by": -1},
        {"divide_by": 1, "gives": "sum"},
        {"divide_by": 1, "guarded": True},
        {"weights": {PeerId("p0"): -1, PeerId("p1"): 2}},
        {"shares": {PeerId("p0"): 0}},
        {"shares": {PeerId("p7"): 1}},
        {"elements": -1},
        {"timeout_s": 0.0},
    ],
)
def test_plan_that_cannot_be_carried_out_is_a_bug(change: dict[str, object]) -> None:
    with pytest.raises(BugError):
        dataclasses.replace(make_plan([1, 1], 8), **change)


def test_plan_digest_covers_all_but_the_time_out() -> None:
    plan = make_plan([1, 2], 8)
    assert dataclasses.replace(plan, timeout_s=1.0).digest == plan.digest
    others = [
        make_plan([1, 3], 8),
        make_plan([1, 2], 9),
        make_plan([1, 2], 8, attempt=1),
        make_plan([1, 2], 8, dtype="float64"),
        make_plan([1, 2], 8, codec="int8"),
        make_plan([1, 2], 8, chunk_elements=5),
        make_plan([1, 2], 8, divide_by=2),
        make_plan([1, 2], 8, shares={PeerId("p0"): 2, PeerId("p1"): 1}),
        make_plan({PeerId("p1"): 2, PeerId("p0"): 1}, 8),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_plan_window_grows_with_the_vector_within_bounds() -> None:
    windows = [make_plan([1] * 4, n, chunk_elements=CHUNK_ELEMENTS).window for n in (1000, 20_000_000, 10**9)]
    assert windows == [MIN_WINDOW, 7, MAX_WINDOW]


def test_strategies_include_what_the_manifest_allows() -> None:
    assert AveragingConfig().strategy in STRATEGIES
