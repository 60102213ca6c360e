"""Whole simulations journey by journey: the pace, what deaths cost, and that the same seed gives the same run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from peers.chaos.schedule import Removal
from swarm.ids import PeerId, StepWork, stage_part
from swarm.sim.flow import PacedFlow
from swarm.sim.journeys import JourneysPlay
from swarm.sim.machines import Heap, LinkedMachine, PieceOfWork, SimReplica, microbatch, send
from swarm.sim.simulation import SimulationResult
from swarm.sim.turnover import Turnover
from tests.unit.sim.test_paced_flow import case, gone


def play(*trace: Removal, **more: Any) -> SimulationResult:
    return JourneysPlay(case(*trace, **{"microbatches": 200, **more})).run()


def test_undisturbed_steps_take_nearly_what_is_reckoned() -> None:
    found, reckoned = play(steps=4), PacedFlow(case(steps=4, microbatches=200)).run()
    assert len(found.steps) == 4
    assert found.steps[-1].seconds == pytest.approx(reckoned.steps[-1].seconds, rel=0.02)


def test_death_slows_the_step_and_its_work_is_done_again() -> None:
    whole = play(steps=3).steps
    found = play(gone(whole[1].closed_s + whole[2].seconds / 2, 0), steps=4)
    assert found.steps[2].seconds > 1.1 * whole[2].seconds
    assert found.steps[3].seconds == pytest.approx(4 / 3 * whole[2].seconds, rel=0.06)


def test_death_between_the_last_microbatch_and_the_record_delays_it() -> None:
    whole = play(steps=1).steps[0].closed_s
    found = play(gone(whole - 0.001, 0), steps=1)
    assert found.steps[0].seconds > whole + 1.0, "what it had added is done again"


def test_another_machine_takes_its_place() -> None:
    found = play(gone(5.0, 0, back_s=80.0), steps=4)
    assert found.counts["joins"] == 1
    assert found.steps[-1].peers == 8


def test_lost_stage_is_given_up_and_goes_on_from_a_copy() -> None:
    there = Turnover(case(hosts=4).turnover)
    first = tuple(there.place_of[peer] for peer in there.computing()[there.parts[0]])
    found = play(gone(20.0, *first), hosts=4, steps=2, microbatches=60)
    assert found.counts["given up"] == 1
    assert len(found.steps) == 2


def test_fast_replicas_do_more_and_moves_are_made() -> None:
    found = play(speeds=(4.0, 1.0), even=True, steps=3)
    slow = play(steps=3)
    assert found.steps[-1].seconds < 0.55 * slow.steps[-1].seconds
    there = Turnover(case().turnover)
    two = tuple(there.place_of[peer] for peer in there.computing()[there.parts[0]][:2])
    assert play(gone(1.0, *two), rule="ours", steps=3).counts["moves"] > 0


def test_same_seed_gives_the_same_run_and_another_one_another() -> None:
    trace = (gone(30.0, 1, back_s=70.0), gone(45.0, 6, 7, back_s=100.0))
    runs = [play(*trace, seed=seed, steps=4) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_it_ends_when_its_time_is_over() -> None:
    first = play(steps=1).steps[0].closed_s
    found = play(steps=100, until_s=1.5 * first)
    assert (len(found.steps), found.ended_s) == (1, 1.5 * first)


def test_large_messages_wait_for_each_other_and_small_ones_overtake() -> None:
    heap, came = Heap(), list[tuple[str, float]]()
    one, other = (LinkedMachine(up=1e6, down=2e6, part_s=0.5) for _ in range(2))
    for name, size in (("first", 1e6), ("second", 1e6), ("small", 100.0)):
        send(heap, one, other, size, lambda name=name: came.append((name, heap.now)))
    while heap.next_s < 10:
        heap.turn()
    assert came == [("small", pytest.approx(1.0001)), ("first", 2.0), ("second", 3.0)]


def test_replica_works_backward_before_forward_before_weights() -> None:
    heap, done = Heap(), list[tuple[str, float]]()
    replica = SimReplica(up=1e9, down=1e9, part_s=0.0, heap=heap, peer=PeerId("A"), part=stage_part(0), whole_s=3.0)
    numbers = itertools.count()
    for kind in ("forward", "weights", "forward", "backward", "again"):
        work = StepWork(1, microbatch(PeerId("T"), next(numbers)))
        replica.push(work, PieceOfWork(kind, 0.0, lambda took, waited, kind=kind: done.append((kind, took))))
    while heap.next_s < 100:
        heap.turn()
    assert [kind for kind, _ in done] == ["forward", "backward", "forward", "weights", "again"]
    assert sum(took for kind, took in done if kind != "again") == pytest.approx(3.0 + 1.0)
    assert not replica.waits
