"""Waiting: at once when it is true, the last value when it never is."""

from __future__ import annotations

import pytest

from tests.harness.expect import NotInTime, eventually, wait_until


def test_wait_until_of_a_true_condition_gives_its_value() -> None:
    values = iter([0, "", "there"])
    assert wait_until(lambda: next(values)) == "there"


def test_wait_until_past_the_deadline_tells_the_last_value() -> None:
    with pytest.raises(NotInTime, match=r"the queue did not come true in 0\.02 s; last seen: \[\]"):
        wait_until(list, deadline_s=0.02, what="the queue")


async def test_eventually_past_the_deadline_tells_the_last_value() -> None:
    with pytest.raises(NotInTime, match="last seen: 0"):
        await eventually(lambda: 0, deadline_s=0.02)


async def test_eventually_of_a_true_condition_gives_its_value() -> None:
    values = iter([None, 7])
    assert await eventually(lambda: next(values)) == 7
