"""Whole runs whose sums travel along trees: the weights are those of the direct way, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.averaging.schedules import SCHEDULES
from swarm.events import AttemptFailed, DigestMismatch, RoundDone, StepClosed
from swarm.sim.loop import run_world
from tests.harness.faults_memory import MemoryWorld
from tests.harness.faults_messages import messages_told
from tests.harness.swarm import LocalSwarm
from tests.swarms.story import DONE

SHAPE: dict[str, Any] = {
    "hosts": 4,
    "trainers": 3,
    "split": {"stages": 1},
    "run": {"reproducible": True, "steps": 4},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 6},
}


async def digests(root: Path, schedule: str) -> tuple[list[dict[str, str]], LocalSwarm]:
    """The weights after each step, by part."""
    swarm = LocalSwarm(root, averaging={"schedule": schedule}, **SHAPE)
    await swarm.run()
    assert not swarm.events(DigestMismatch)
    return [record["digests"] for record in swarm.history()], swarm


async def test_every_schedule_gives_the_weights_of_the_direct_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, _ = await digests(tmp_path_factory.mktemp("direct"), "direct")
    for schedule in ("ring", "tree", "halving", "butterfly"):
        found, swarm = await digests(tmp_path_factory.mktemp(schedule), schedule)
        assert found == expected
        rounds = swarm.events(RoundDone)
        assert {event.schedule for event in rounds} == {schedule}
        assert all(event.reason for event in rounds)
        assert len(rounds) == (4 + 3) * 4


async def test_auto_chooses_alike_at_all_members_and_gives_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected, _ = await digests(tmp_path_factory.mktemp("direct"), "direct")
    found, swarm = await digests(tmp_path_factory.mktemp("auto"), "auto")
    assert found == expected
    chosen: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for event in swarm.events(RoundDone):
        assert event.schedule in SCHEDULES
        chosen.setdefault((event.step, event.part), set()).add((event.schedule, event.reason))
        assert ("measured yet" if event.step == 1 else "expected") in event.reason
    assert all(len(each) == 1 for each in chosen.values()), chosen


@pytest.mark.parametrize("schedule", ["ring", "halving", "butterfly"])
def test_replica_killed_in_the_middle_of_a_round_voids_it_and_the_run_goes_on(tmp_path: Path, schedule: str) -> None:
    swarm = SimSwarm(tmp_path, averaging={"schedule": schedule}, may_fail=True, **SHAPE)
    strikes = Strike("death", On("asks averaging/1/chunk", peer="host-2", nth=5), Kill(("host-2",)))
    with MemoryWorld(swarm) as world, messages_told(world):
        plan = FaultPlan(strikes, world=world)
        run_world(swarm.run(timeout_s=600.0))
    plan.assert_fired()
    assert {peer.outcome for name, peer in swarm.peers.items() if name != "host-2"} == {DONE}
    check_run([tmp_path]).assert_sound()
    assert swarm.events(AttemptFailed), "the round was void"
    last = [event for event in swarm.events(RoundDone) if event.step == 4 and event.part == "stage-0"]
    assert {(event.schedule, event.members) for event in last} == {(schedule, 3)}
    assert max(event.step for event in swarm.events(StepClosed)) == 4
