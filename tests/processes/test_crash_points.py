"""Real peers kill themselves in the middle of closing a step, and on their way back in: nothing is lost or counted
twice.

Two moments only; :mod:`tests.nemesis.test_crash_points_processes` has all kinds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.chaos.invariants.check import check_run
from tests.harness.crashes_processes import Death, live_through

pytestmark = [pytest.mark.process, pytest.mark.nemesis, pytest.mark.timeout(300)]


def test_replica_and_trainer_that_die_while_a_step_closes_come_back(tmp_path: Path) -> None:
    aftermath = live_through(
        tmp_path / "crashes", [Death("stage-0-1", "answers step/1/propose"), Death("trainer-0", "RoundDone")]
    )
    assert aftermath.deaths == {"stage-0-1": 1, "trainer-0": 1}
    check_run([tmp_path / "crashes" / "run"]).assert_sound()
