"""When a daemon that dies is started again, and when no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.libp2p.supervisor import LONGEST_PAUSE_S, RestartLimits, Restarts


def test_restarts_of_one_death_now_and_then_are_immediate_for_ever() -> None:
    restarts = Restarts(RestartLimits())
    assert [restarts.died(minute * 61.0) for minute in range(100)] == [0.0] * 100


def test_restarts_wait_longer_and_end_with_the_fifth_death_within_a_minute() -> None:
    restarts = Restarts(RestartLimits())
    assert [restarts.died(float(second)) for second in range(5)] == [0.0, 0.25, 0.5, 1.0, None]
    assert restarts.said == "5 times within 60 s"


@pytest.mark.parametrize(("fifth", "mended"), [(59.9, False), (60.0, True)])
def test_restarts_forget_a_death_after_a_minute(fifth: float, mended: bool) -> None:
    restarts = Restarts(RestartLimits())
    for second in (0.0, 1.0, 2.0, 3.0):
        restarts.died(second)
    assert (restarts.died(fifth) is not None) == mended


@given(st.lists(st.floats(0, 200), min_size=1, max_size=60), st.integers(1, 6), st.floats(0.1, 100))
def test_restarts_end_exactly_when_the_window_holds_too_many(times: list[float], deaths: int, within_s: float) -> None:
    restarts = Restarts(RestartLimits(deaths=deaths, within_s=within_s))
    times.sort()
    for index, now in enumerate(times):
        recent = sum(1 for earlier in times[: index + 1] if earlier > now - within_s)
        pause_s = restarts.died(now)
        assert (pause_s is None) == (recent >= deaths)
        assert pause_s is None or 0 <= pause_s <= LONGEST_PAUSE_S
