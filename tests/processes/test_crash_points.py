"""Real peers kill themselves in the middle of closing a step, and on their way back in: nothing is lost or counted
twice, and nothing adds up.

Two moments, or with ``make nemesis`` fifty, of every kind that there is, one after the other in one run.
:mod:`tests.swarms.test_crash_points` has every moment of a run, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from peers.chaos.invariants.check import check_run
from tests.harness.crashes_processes import Burden, Death, live_through

HOSTS = ("stage-0-1", "stage-1-1", "stage-0-2", "stage-1-2")
TRAINERS = ("trainer-0", "trainer-1")
OF_HOSTS = (
    "Accumulated", "RoundDone", "StepClosed", "answers pipeline/1/forward", "answers pipeline/1/backward",
    "asks trainer/1/hop", "asks averaging/1/enter", "asks averaging/1/chunk", "answers averaging/1/chunk",
    "answers averaging/1/agree", "answers step/1/reconcile", "answers step/1/apply", "answers step/1/propose",
    "answers step/1/decide",
)  # fmt: skip
OF_TRAINERS = (
    "JourneyStarted", "JourneyCompleted", "RoundDone", "StepClosed", "asks pipeline/1/forward", "asks lead/1/lease",
    "asks lead/1/complete", "answers trainer/1/output", "answers trainer/1/gradient", "answers step/1/reconcile",
    "answers step/1/propose",
)  # fmt: skip
OF_LEADERS = (
    "Committed", "asks step/1/reconcile", "asks step/1/apply", "asks step/1/propose", "asks step/1/decide",
    "answers lead/1/lease", "answers lead/1/complete",
)  # fmt: skip
OF_JOINERS = ("PartAssigned", "asks state/1/chunk", "StateDownloaded", "asks lead/1/join", "PeerReady", "RunStarted")
CYCLES = 50
WARM_UP = 10
MAX_GROWTH = 1.05
TWO = (Death("stage-0-1", "answers step/1/propose"), Death("trainer-0", "RoundDone"))

pytestmark = pytest.mark.process


def fifty() -> list[Death]:
    """Hosts and trainers take turns, each with the next moment of its kind; then from the beginning."""
    hosts = [*((kind, False) for kind in (*OF_HOSTS, *OF_LEADERS)), *((kind, True) for kind in OF_JOINERS)]
    trainers = [*((kind, False) for kind in OF_TRAINERS), ("asks state/1/chunk", True), ("PeerReady", True)]
    chosen = []
    for turn in range(CYCLES):
        names, kinds = (TRAINERS, trainers) if turn % 3 == 2 else (HOSTS, hosts)
        count = turn // 3 if turn % 3 == 2 else turn - turn // 3
        kind, joining = kinds[count % len(kinds)]
        chosen.append(Death(names[count % len(names)], kind, 1 if joining else 1 + turn % 3, joining))
    assert len({(one.kind, one.joining) for one in chosen}) >= 30
    return chosen


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(TWO, marks=pytest.mark.long, id="two"),
        pytest.param(fifty(), marks=[pytest.mark.nemesis, pytest.mark.timeout(3600)], id="fifty"),
    ],
)
def test_peers_that_die_at_all_kinds_of_moments_come_back_and_leave_nothing_behind(
    tmp_path: Path, planned: Sequence[Death]
) -> None:
    aftermath = live_through(tmp_path / "crashes", planned)
    assert aftermath.deaths.total() == len(planned) + sum(one.joining for one in planned)
    assert set(aftermath.deaths) == {one.peer for one in planned}
    check_run([tmp_path / "crashes" / "run"]).assert_sound()
    print(f"{aftermath.deaths.total()} deaths in {aftermath.closed} steps")
    if len(planned) > WARM_UP:
        assert_flat(aftermath.burdens[WARM_UP : WARM_UP + 5], aftermath.burdens[-5:])


def assert_flat(before: Sequence[Burden], after: Sequence[Burden]) -> None:
    """Nothing adds up in the one peer that never died, nor on the machine."""
    print(f"{before[0]} -> {after[-1]}")
    assert middle(after, "memory_bytes") <= MAX_GROWTH * middle(before, "memory_bytes")
    assert middle(after, "descriptors") <= middle(before, "descriptors") + 2, "streams come and go, by twos"
    for name in ("threads", "processes", "files"):
        assert middle(after, name) <= middle(before, name)


def middle(burdens: Sequence[Burden], name: str) -> float:
    """Of some returns: a measurement may meet a stream that is just being opened."""
    return median(getattr(burden, name) for burden in burdens)
