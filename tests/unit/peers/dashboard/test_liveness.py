"""How a run stands, and who of its members is silent: decided from what is known, without a clock."""

from __future__ import annotations

from typing import Any

import pytest

from peers.dashboard.liveness import SILENT_S, STALLED_S, UNHEARD_S, Pulse, Signs, fresh, standing

BUSY = {"begun": True, "heard_at": 1000.0, "step": 7, "step_at": 1000.0, "step_s": 1.0}
LATE = 1000.0 + STALLED_S + 1


@pytest.mark.parametrize(
    ("signs", "state", "why", "live"),
    [
        ({}, "waiting", "the run has not begun", True),
        ({"waits_for": "0 of 4 stage hosts are here"}, "waiting", "0 of 4 stage hosts are here", True),
        ({"begun": True}, "training", "step 1 is under way", True),
        (BUSY, "training", "", True),
        (BUSY | {"waits_for": "a replica of stage-1"}, "waiting", "a replica of stage-1", True),
        (BUSY | {"at": LATE, "heard_at": LATE, "waits_for": "a reply"}, "stalled", "; it waits for a reply", True),
        (BUSY | {"ended": True, "gone": "otter is gone"}, "ended", "", False),
        (BUSY | {"at": LATE, "heard_at": LATE}, "stalled", "no step has closed for 21 s, where one took 1.0 s", True),
        (BUSY | {"at": LATE, "heard_at": LATE, "silent": ["mole"]}, "stalled", "no answer from mole", True),
        (BUSY | {"at": LATE, "heard_at": LATE, "step_s": 60.0}, "training", "", True),
        (BUSY | {"at": LATE, "heard_at": None}, "training", "", True),
        (BUSY | {"at": 1000.0 + UNHEARD_S, "unheard": ("stalled", "otter hangs")}, "training", "", True),
        (BUSY | {"at": 1001.0 + UNHEARD_S, "unheard": ("stalled", "it hangs")}, "stalled", "it hangs; what", False),
        (BUSY | {"at": 1001.0 + UNHEARD_S, "unheard": ("away", "nobody answers")}, "away", "nobody answers", False),
        (BUSY | {"gone": "otter was killed"}, "away", "otter was killed; what is shown is from before", False),
        (BUSY | {"heard_at": None, "wrote_at": 999.0 - SILENT_S}, "past", "nobody writes to its files since", False),
        (BUSY | {"heard_at": None, "wrote_at": 999.0 - SILENT_S, "step_s": 90.0}, "training", "", True),
        ({"wrote_at": 0.0}, "past", "nobody writes to its files: the run is over", False),
    ],
)
def test_standing_of_a_run_and_why(signs: dict[str, Any], state: str, why: str, live: bool) -> None:
    known = Signs(**{"at": 1000.0} | signs)
    said, reason = standing(known)
    assert (said, why in reason, bool(why) == bool(reason)) == (state, True, True), reason
    assert fresh(said, known) == live


def test_time_without_an_answer_counts_from_the_last_one() -> None:
    pulse = Pulse()
    pulse.answered()
    assert pulse.tick(10.0, 3, None) == 10.0
    assert (pulse.heard_at, pulse.now) == (10.0, 10.0)
    pulse.missed("stalled", "otter hangs")
    assert pulse.tick(15.0, 3, None) == 10.0, "the step is the same"
    assert (pulse.heard_at, pulse.unheard) == (10.0, ("stalled", "otter hangs"))
    pulse.answered()
    assert pulse.tick(16.0, 4, 15.5) == 15.5, "it says itself when it closed"
    assert (pulse.heard_at, pulse.unheard) == (16.0, None)
    pulse.nobody_asks()
    pulse.tick(90.0, 4, 15.5)
    assert pulse.heard_at is None, "silence means nothing while nobody asks"
