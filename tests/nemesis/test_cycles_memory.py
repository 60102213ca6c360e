"""A thousand deaths and returns in one run in virtual time: what cannot be seen adding up in ten."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import median

import pytest

from peers.chaos.invariants.check import check_run
from tests.harness.cycles_memory import cycle

ROUNDS = 375
LEAST = 1000
WARM_UP = 25
MAX_GROWTH = 1.05

pytestmark = [pytest.mark.nemesis, pytest.mark.timeout(7200)]


def test_thousand_deaths_and_returns_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest keeps each record, with the exception in it, with all that it holds
    cycled = cycle(tmp_path, rounds=ROUNDS)
    assert cycled.cycles >= LEAST
    before, after = cycled.loads[WARM_UP : WARM_UP + 10], cycled.loads[-10:]
    early, late = cycled.loads[WARM_UP : WARM_UP + 50], cycled.loads[-50:]
    print(f"{cycled.cycles} deaths in {cycled.steps} steps: {before[0]} -> {after[-1]}")
    assert min(load.memory_bytes for load in after) <= MAX_GROWTH * min(load.memory_bytes for load in before)
    assert min(load.objects for load in after) <= MAX_GROWTH * min(load.objects for load in before)
    # There are more or fewer with what happens to be under way when everybody is back: 220 to 330.
    assert median(load.tasks for load in late) <= MAX_GROWTH * median(load.tasks for load in early)
    for load in after:
        assert load.descriptors <= max(one.descriptors for one in before)
        assert load.files <= max(one.files for one in before)
    check_run([tmp_path]).assert_sound(("I1", "I4", "I5", "I7", "I8", "I10", "I20", "I26"))
