"""What the benchmark ``recovery`` makes of the events and faults of a run."""

from __future__ import annotations

from typing import Any

import pytest

from peers.chaos.invariants.evidence import Evidence, Fact, FaultFact
from swarm.ids import PeerId
from tests.benchmarks._forked_run import Seen
from tests.benchmarks._recovery_figures import Recovery, normal, p95, recoveries
from tests.benchmarks.recovery import reroutes, row

VICTIM, OTHER, TRAINER = PeerId("victim"), PeerId("other"), PeerId("trainer")
KILL = FaultFact(10.0, "kill", (VICTIM,))
PAUSE = FaultFact(10.0, "pause", (VICTIM,), seconds=20.0)


def fact(wall: float, kind: str, peer: PeerId = TRAINER, **fields: Any) -> Fact:
    return Fact(peer, 1, wall, kind, fields)


def moved(wall: float, old: PeerId = VICTIM) -> Fact:
    return fact(wall, "HopMoved", step=5, microbatch=MICROBATCH, old=old, new=OTHER)


MICROBATCH = (TRAINER, "ab" * 8, 0, 0)
CLOSED = [fact(wall, "StepClosed", step=step) for step, wall in enumerate((3.0, 5.0, 7.0, 9.0, 14.5), 1)]


def recovery(*facts: Fact, fault: FaultFact = KILL, more: tuple[FaultFact, ...] = ()) -> Recovery:
    """What one fault did to a run that closes a step every two seconds."""
    (found,), step_s = recoveries(Evidence((*facts, *CLOSED), (), (fault, *more)))
    assert step_s == 2.0
    return found


def test_commit_gap_is_what_the_next_step_takes_beyond_a_normal_one() -> None:
    found = recovery()
    assert (found.to_close_s, found.commit_gap_s) == (4.5, 2.5)


def test_reroute_ends_with_the_last_hop_that_was_moved_off_the_victim_while_it_was_away() -> None:
    found = recovery(moved(9.0), moved(10.5), moved(11.5), moved(12.0, OTHER))
    assert (found.moved, found.reroute_s) == (2, 1.5)
    later = fact(11.25, "JourneyStarted", step=5, microbatch=MICROBATCH)
    assert recovery(later, moved(11.5)).reroute_s == 0.25, "it set out after the fault"
    again = recovery(moved(10.5), moved(12.5), fault=PAUSE, more=(FaultFact(11.0, "resume", (VICTIM,)),))
    assert (again.kind, again.moved, again.reroute_s) == ("pause", 1, 0.5)


def test_fault_that_met_no_work_is_no_sample_of_rerouting() -> None:
    assert (recovery().moved, reroutes([recovery()])) == (0, [])
    assert row("kill", [recovery(moved(10.5)), recovery()]) == ["kill", 2, 1, 1, 0.5, 0.5, 0.5, 2.5, 2.5, 2.5]


def test_fault_after_the_last_closed_step_is_left_out() -> None:
    assert recoveries(Evidence(tuple(CLOSED), (), (FaultFact(20.0, "kill", (VICTIM,)),)))[0] == []


def test_normal_step_is_the_median_without_anybody_away() -> None:
    walls = [0.0, 2.0, 4.5, 6.5, 12.0, 14.0]
    assert normal(walls, [(7.0, 11.0)]) == 2.0
    assert normal(walls, [(1.0, 4.0), (7.0, 20.0)]) == 2.0
    with pytest.raises(ValueError, match="untouched"):
        normal(walls, [(0.0, 20.0)])


def test_p95_of_a_hundred_is_the_ninety_fifth() -> None:
    assert p95([float(value) for value in range(100, 0, -1)]) == 95.0
    assert p95([3.0]) == 3.0
    assert p95([]) is None


def test_seen_counts_on_a_victim_again_when_it_is_ready_or_closes_a_later_step() -> None:
    seen = Seen(ready={"stage-0-1"})
    seen.note("trainer-0", "Accumulated", {"step": 5})
    seen.gone("stage-0-1")
    seen.note("stage-0-1", "StepClosed", {"step": 6})  # it may be cut off with this one
    assert (seen.ready, seen.closed) == (set(), 6)
    seen.note("stage-0-1", "StepClosed", {"step": 7})
    assert seen.ready == {"stage-0-1"}
    seen.gone("stage-0-1")
    seen.note("stage-0-1", "PeerReady", {"step": 8})
    assert seen.ready == {"stage-0-1"}
    seen.note("stage-0-1", "CutOff", {"step": 8})
    assert not seen.ready
