"""What the benchmark ``recovery`` makes of the events and faults of a run."""

from __future__ import annotations

from typing import Any

import pytest

from peers.chaos.invariants.evidence import Evidence, Fact, FaultFact
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.pipeline.trainer.route import Receipt
from tests.benchmarks._forked_run import Seen
from tests.benchmarks._recovery_figures import Recovery, normal, p95, recoveries
from tests.benchmarks._recovery_peer import HopBegan, HopDone, ToldWay
from tests.benchmarks.recovery import reroutes, row

VICTIM, OTHER, TRAINER = PeerId("victim"), PeerId("other"), PeerId("trainer")
KILL = FaultFact(10.0, "kill", (VICTIM,))
PAUSE = FaultFact(10.0, "pause", (VICTIM,), seconds=20.0)
MICROBATCH = (TRAINER, "00" * 8, 0, 7)


def fact(wall: float, kind: str, peer: PeerId = TRAINER, **fields: Any) -> Fact:
    return Fact(peer, 1, wall, kind, fields)


def began(wall: float, replica: PeerId, stage: int = 1) -> Fact:
    return fact(wall, "HopBegan", step=4, microbatch=MICROBATCH, stage=stage, replica=replica, work="forward")


def done(wall: float, replica: PeerId, *, back: bool = False) -> Fact:
    return fact(wall, "HopDone", step=4, microbatch=MICROBATCH, stage=1, replica=replica, back=back)


def home(wall: float) -> Fact:
    return fact(wall, "JourneyCompleted", step=4, microbatch=MICROBATCH)


def closed(*walls: float) -> list[Fact]:
    return [fact(wall, "StepClosed", step=step) for step, wall in enumerate(walls, 1)]


CLOSED = closed(3.0, 5.0, 7.0, 9.0, 14.5)


def recovery(*facts: Fact, fault: FaultFact = KILL, more: tuple[FaultFact, ...] = ()) -> Recovery:
    """What one fault did to a run that closes a step every two seconds."""
    (found,), step_s = recoveries(Evidence((*facts, *CLOSED), (), (fault, *more)))
    assert step_s == 2.0
    return found


def test_commit_gap_is_what_the_next_step_takes_beyond_a_normal_one() -> None:
    found = recovery()
    assert (found.to_close_s, found.commit_gap_s) == (4.5, 2.5)


def test_fault_that_met_no_work_is_no_sample_of_rerouting() -> None:
    found = recovery(began(8.0, VICTIM), done(9.5, VICTIM), began(9.6, OTHER))
    assert (found.affected, found.reroute_s) == (0, None)
    assert reroutes([found]) == []


def test_reroute_ends_when_the_replica_is_asked_that_then_does_the_hop() -> None:
    tried_in_vain = began(10.5, PeerId("third"))
    found = recovery(began(9.9, VICTIM), tried_in_vain, began(11.5, OTHER), done(13.0, OTHER))
    assert (found.affected, found.reroute_s) == (1, 1.5)


def test_reroute_of_what_came_to_the_victim_later_counts_from_there() -> None:
    assert recovery(began(11.0, VICTIM), began(11.2, OTHER), done(12.0, OTHER)).reroute_s == pytest.approx(0.2)


def test_contribution_that_died_is_done_again() -> None:
    died = [began(8.0, VICTIM), done(9.0, VICTIM, back=True)]
    found = recovery(*died, began(10.1, OTHER), done(10.8, OTHER, back=True), home(12.0))
    assert found.reroute_s == pytest.approx(0.1)
    assert recovery(*died, home(9.5)).affected == 0  # that is for the closing of the step
    assert recovery(*died, home(10.2)).affected == 0  # it came home all the same


def test_last_words_of_the_victim_are_no_reroute() -> None:
    assert recovery(began(9.9, VICTIM), done(10.01, VICTIM)).affected == 0


def test_pause_that_nobody_took_over_lasts_until_the_victim_answers() -> None:
    found = recovery(began(9.9, VICTIM), done(14.0, VICTIM), fault=PAUSE)
    assert (found.kind, found.reroute_s) == ("pause", 4.0)


def test_victim_that_goes_on_is_not_away_any_more() -> None:
    resumed = FaultFact(11.0, "resume", (VICTIM,))
    found = recovery(began(11.5, VICTIM), began(12.5, OTHER), done(13.0, OTHER), fault=PAUSE, more=(resumed,))
    assert found.affected == 0


def test_microbatch_whose_step_closed_without_it_is_abandoned() -> None:
    found = recovery(began(9.9, VICTIM), began(10.2, OTHER))
    assert (found.affected, found.abandoned, found.reroute_s) == (1, 1, None)


def test_hops_of_other_stages_are_not_mixed_up() -> None:
    assert recovery(began(9.9, VICTIM), began(10.1, OTHER, stage=2), done(12.0, OTHER)).reroute_s == 2.0


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


def test_row_counts_faults_without_work_and_abandoned_microbatches() -> None:
    one = recovery(began(9.9, VICTIM), began(10.5, OTHER), done(13.0, OTHER))
    kind, times, idle, microbatches, abandoned, *spread = row("kill", [one, recovery()])
    assert (kind, times, idle, microbatches, abandoned) == ("kill", 2, 1, 1, 0)
    assert spread == [0.5, 0.5, 0.5, 2.5, 2.5, 2.5]


def test_seen_counts_on_a_victim_again_when_it_is_ready_or_closes_a_later_step() -> None:
    seen = Seen(ready={"stage-0-1"})
    seen.note("trainer-0", "HopBegan", {"step": 5})
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


def test_told_way_says_whose_turn_it_is_and_who_did_the_hop() -> None:
    told: list[Any] = []
    way = ToldWay([VICTIM, OTHER])
    way.key, way.tell = JourneyKey(4, MicrobatchId(TRAINER, "00" * 8, 0, 7), 0, "ab"), told.append
    way.begin_turn(0, 1.0, 2.0, "forward")
    way.forwarded(1, OTHER)  # the last one's output is here, whoever has not reported
    way.back = True
    way.contributed(1, OTHER, Receipt(b""))
    way.contributed(1, OTHER, Receipt(b""))  # no news
    place = {"step": 4, "microbatch": way.key.microbatch}
    assert told == [
        HopBegan(**place, stage=0, replica=VICTIM, work="forward"),
        HopDone(**place, stage=0, replica=VICTIM, back=False),
        HopDone(**place, stage=1, replica=OTHER, back=False),
        HopDone(**place, stage=1, replica=OTHER, back=True),
    ]
