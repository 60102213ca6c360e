"""Traces of machines that a spot market takes back, and what capacity is left of those that are there."""

from __future__ import annotations

import statistics

import pytest

from peers.chaos.figures import ReplicaPresence, capacity
from peers.chaos.schedule import (
    BULK_MEAN,
    BULK_MOST,
    DOWN_SHARE,
    NOTICED_SHARE,
    Removal,
    mean_bulk,
    removed,
    spot_trace,
)

LONG_S = 60_000.0


def long_trace(churn: float = 0.01, seed: int = 1) -> tuple[Removal, ...]:
    return spot_trace(places=24, churn=churn, step_s=5.0, until_s=LONG_S, seed=seed)


def test_trace_is_determined_by_its_seed() -> None:
    assert long_trace(seed=3) == long_trace(seed=3)
    assert long_trace(seed=3) != long_trace(seed=4)


def test_trace_removes_as_many_as_it_is_told_of_those_that_are_up() -> None:
    trace = long_trace()
    down_s = sum(back - one.at_s for one in trace for back in one.back_s)
    up_steps = (24 * LONG_S - down_s) / 5.0
    assert removed(trace) / up_steps == pytest.approx(0.01, rel=0.05)


def test_trace_removes_in_bulk_as_the_public_ones_do() -> None:
    sizes = [len(removal.places) for removal in long_trace()]
    assert statistics.mean(sizes) == pytest.approx(mean_bulk(), rel=0.03)
    assert mean_bulk() == pytest.approx(BULK_MEAN, rel=0.05)
    assert max(sizes) == BULK_MOST
    assert sum(size > 1 for size in sizes) / len(sizes) == pytest.approx(0.51, abs=0.04), "Bamboo's p3: 51 %"


def test_trace_brings_machines_back_after_a_tenth_of_a_life() -> None:
    gone = [back - removal.at_s for removal in long_trace() for back in removal.back_s]
    assert statistics.mean(gone) == pytest.approx(DOWN_SHARE * 5.0 / 0.01, rel=0.05)


def test_trace_announces_its_share_and_never_removes_what_is_not_there() -> None:
    trace = long_trace(churn=0.05)
    assert sum(one.noticed for one in trace) / len(trace) == pytest.approx(NOTICED_SHARE, abs=0.03)
    back_at: dict[int, float] = {}
    for removal in trace:
        assert len(set(removal.places)) == len(removal.places)
        assert all(back_at.get(place, 0.0) <= removal.at_s for place in removal.places)
        back_at |= dict(zip(removal.places, removal.back_s, strict=True))
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)


def test_capacity_is_what_the_stage_with_the_fewest_takes_at_each_moment() -> None:
    lives = [
        ReplicaPresence("stage-0", 0.0, 10.0),
        ReplicaPresence("stage-0", 0.0, 10.0),
        ReplicaPresence("stage-1", 0.0, 10.0),
        ReplicaPresence("stage-1", 4.0, 6.0),
    ]
    assert capacity(iter(lives), 2, 3.0, 0.0, 10.0) == pytest.approx(3.0 * (10.0 + 2.0))


def test_capacity_counts_nothing_outside_the_window_and_nothing_while_a_stage_has_nobody() -> None:
    lives = [
        ReplicaPresence("stage-0", -5.0, 20.0),
        ReplicaPresence("stage-1", -5.0, 3.0),
        ReplicaPresence("stage-1", 7.0, 30.0),
        ReplicaPresence("stage-1", 40.0, 50.0),
    ]
    assert capacity(lives, 2, 1.0, 0.0, 10.0) == pytest.approx(6.0)
    assert capacity([], 2, 1.0, 0.0, 10.0) == 0.0
