"""Deadlines from what was measured, pauses that double, and what stands still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.waiting import LONGEST_S, SHORTEST_S, AdaptiveDeadline, ExponentialBackoff, StallDetector, doubled


def test_deadline_follows_what_was_measured_within_bounds() -> None:
    deadline = AdaptiveDeadline(floor_s=1.0, ceiling_s=30.0)
    assert deadline.seconds() == 30.0
    assert AdaptiveDeadline(floor_s=1.0, ceiling_s=30.0, first_s=5.0).seconds() == 5.0
    deadline.observe(0.01)
    assert deadline.seconds() == 1.0
    for _ in range(200):
        deadline.observe(2.0)
    assert deadline.seconds() == pytest.approx(8.0)
    for _ in range(200):
        deadline.observe(100.0)
    assert deadline.seconds() == 30.0


def test_deadline_after_few_durations_does_not_take_one_stall_for_the_rule() -> None:
    deadline = AdaptiveDeadline(floor_s=1.0, ceiling_s=30.0)
    deadline.observe(8.0)
    for _ in range(2):
        deadline.observe(0.5)
        assert deadline.seconds() == 30.0  # it may be the rule
    deadline.observe(0.5)
    assert deadline.seconds() == 2.0
    deadline.observe(8.0)
    assert deadline.seconds() == 30.0  # it happens again


@given(st.floats(0, 2 * LONGEST_S), st.integers(0, 20))
def test_backoff_doubles_within_its_bounds_and_begins_anew(first_s: float, times: int) -> None:
    backoff = ExponentialBackoff(first_s)
    pauses = [backoff.pause_s() for _ in range(times + 1)]
    assert pauses == [doubled(min(LONGEST_S, max(SHORTEST_S, first_s)), count, LONGEST_S) for count in range(times + 1)]
    backoff.restart()
    assert backoff.pause_s() == pauses[0]


def test_backoff_has_the_bounds_that_its_caller_knows() -> None:
    backoff = ExponentialBackoff(1.0, 60.0)
    assert [backoff.pause_s() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_stall_lasts_since_the_last_change_or_excuse() -> None:
    stall = StallDetector(10.0, "a")
    assert stall.look(12.0, "a") == 2.0
    assert stall.look(13.0, "b") == 0.0
    assert (stall.look(15.0, "b"), stall.still(16.0)) == (2.0, 3.0)
    stall.excuse(20.0)
    assert stall.look(21.0, "b") == 1.0
