"""A part whose last replica dies is taken over from a copy, or by a peer that joins; no more is lost than a step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Fault, JoinerStorm, Kill, Moment, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending
from swarm.events import (
    Committed,
    CopyHeld,
    FrozenReady,
    JourneyCompleted,
    PeerLost,
    PeerReady,
    StepClosed,
    StepGivenUp,
)
from swarm.health.verdicts import ANEW_S
from swarm.ids import ENDS
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.harness.expect import eventually
from tests.harness.faults_memory import MemoryWorld

STEPS = 6
MIDST = On(JourneyCompleted, peer="trainer-0", where={"step": 3})
DECIDED = On(Committed, where={"step": 2})
"""A majority has accepted step 2, and nobody was told yet."""
NOTICED = On(PeerLost, after="kill")


def holders(swarm: SimSwarm, part: str, step: int = -1) -> list[str]:
    """The peers that hold a part, by name, as a record says: by default the newest that the bootstrap has."""
    return [member["name"] for member in swarm.history()[step]["roster"] if member["part"] == part]


def swarm_of(
    root: Path,
    hosts: int,
    trainers: int,
    *,
    steps: int = STEPS,
    copies: int = 2,
    ends: str = "private",
    hop_s: float = 0.0,
    **model: Any,
) -> SimSwarm:
    """Two stages; a peer's events are in its home."""
    run, split = {"steps": steps, "copies": copies}, {"stages": 2, "ends": ends}
    stage_s = {"forward": hop_s, "backward": hop_s} if hop_s else None
    links = Links.parse({"default": {"latency_ms": 20}}) if hop_s else None
    return SimSwarm(
        root, hosts=hosts, trainers=trainers, run=run, split=split, stage_s=stage_s, links=links, model=model
    )


def struck(swarm: SimSwarm, victims: tuple[str, ...], *then: Fault, when: On = MIDST) -> None:
    """Run it to its end; the victims are killed in the midst of step 3, what follows happens when one is missed."""
    after = (Strike(f"then-{index}", NOTICED, fault) for index, fault in enumerate(then))
    plan = FaultPlan(Strike("kill", when, Kill(victims)), *after, world=MemoryWorld(swarm))
    try:
        run_world(swarm.run(timeout_s=600.0))
    finally:
        plan.assert_fired()


def check(swarm: SimSwarm, killed: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """Everybody else saw the run to its end, with one chain, of which step 3 is given up and nothing else is lost."""
    for name, peer in swarm.peers.items():
        assert name in killed or peer.outcome == "every step of the run is closed", (name, peer.outcome)
    records = {record["step"]: record for record in swarm.history()}
    assert [step for step, record in records.items() if record["void"]] == [3]
    assert records[3]["digests"] == records[2]["digests"]
    assert records[3]["cursors"] == records[2]["cursors"]
    assert {event.microbatches for event in swarm.events(StepClosed) if event.step == 3} == {0}
    check_run([swarm.root]).assert_sound()
    return records


def test_stage_whose_replicas_all_die_is_taken_over_from_a_copy(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=4, trainers=1)
    victims = ("host-1", "host-3")
    struck(swarm, victims)
    check(swarm, victims)
    lost = next(event.lost for event in swarm.events(StepGivenUp))
    (rescuer,) = holders(swarm, lost[0])
    membership = swarm.peers[rescuer].membership
    assert membership is not None
    assert membership.situation.phase == "ready"
    assert holders(swarm, lost[0], 2) == sorted(victims)
    assert [len(holders(swarm, part)) for part in ("ends", "stage-0", "stage-1")] == [1, 1, 1]
    assert {event.part for event in swarm.events(CopyHeld)} == {"ends", "stage-0", "stage-1"}


def test_stage_of_adapters_is_taken_over_with_what_is_frozen_beside_them(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=4, trainers=1, lora={"rank": 4, "base": "nf4"})
    victims = ("host-1", "host-3")
    struck(swarm, victims)
    check(swarm, victims)
    lost = next(event.lost for event in swarm.events(StepGivenUp))
    (rescuer,) = holders(swarm, lost[0])
    fetched = {event.part for event in swarm.peers[rescuer].events.of(FrozenReady)}
    assert fetched == {"stage-0", "stage-1"}  # its own part's, and those of the copy that it kept


@pytest.mark.parametrize("when", [DECIDED, On(StepClosed, peer="host-3", where={"step": 2})])
def test_stage_whose_replicas_die_with_a_decision_is_taken_over_after_that_step(tmp_path: Path, when: On) -> None:
    swarm = swarm_of(tmp_path, hosts=4, trainers=1, hop_s=0.1)
    victims = ("host-1", "host-3")
    struck(swarm, victims, when=when)
    records = check(swarm, victims)
    assert records[2]["committed"]
    assert {len(event.lost) for event in swarm.events(StepGivenUp)} == {1}


def test_stage_that_nobody_can_be_spared_for_is_taken_over_by_who_joins(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=2, trainers=2)
    struck(swarm, ("host-1",), JoinerStorm(1))
    check(swarm, ("host-1",))
    lost = next(event.lost for event in swarm.events(StepGivenUp))
    assert [name for name in holders(swarm, lost[0]) if name.startswith("joiner")]


def test_stage_is_taken_over_by_who_comes_back_and_held_another(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=3, trainers=2)  # three of five voters are left
    struck(swarm, ("host-0", "host-1"), Restart("host-1"))
    check(swarm, ("host-0", "host-1"))
    assert {event.lost for event in swarm.events(StepGivenUp)} == {("stage-1",)}
    assert (holders(swarm, "stage-0", 2), holders(swarm, "stage-1", 2)) == (["host-1", "host-2"], ["host-0"])
    assert len(holders(swarm, "stage-1")) == 1


def test_trainer_that_was_the_last_comes_back_gets_the_ends_from_a_copy_and_is_not_lost_again(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=3, trainers=1, hop_s=ANEW_S)
    struck(swarm, ("trainer-0",), Restart("trainer-0"))
    records = check(swarm, ("trainer-0",))
    assert {event.lost for event in swarm.events(StepGivenUp)} == {("ends",)}
    again = [one["microbatch"] for one in records[4]["committed"]]
    assert min(position for *_, position in again) == next(iter(records[2]["cursors"].values()))[1]
    assert {event.name for event in swarm.events(PeerLost)} == {"trainer-0"}
    assert "it was started anew" not in {event.reason for event in swarm.events(PeerLost)}, "for its former life"


def test_founder_that_came_back_keeps_the_copy_of_the_ends_from_which_the_run_goes_on(tmp_path: Path) -> None:
    swarm, again = swarm_of(tmp_path, hosts=3, trainers=1, steps=9, hop_s=0.1), "bootstrap-again-1"
    kept = On(CopyHeld, peer="bootstrap", where={"part": ENDS}, after="a member again")
    plan = FaultPlan(
        Strike("founder", On(StepClosed, peer="trainer-0", where={"step": 2}), Restart("bootstrap")),
        Strike("a member again", On(PeerReady, peer="bootstrap", after="founder"), Moment()),
        Strike("last trainer", kept, Kill(("trainer-0",))),
        Strike("another", On(PeerLost, after="last trainer"), Restart("trainer-0")),
        world=MemoryWorld(swarm),
    )
    try:
        run_world(swarm.run(timeout_s=600.0))
    finally:
        plan.assert_fired()
    (given_up,) = {(event.step, event.lost) for event in swarm.events(StepGivenUp)}
    assert given_up[1] == (ENDS,), "the fault: nobody else had them"
    records = {record["step"]: record for record in swarm.history(again)}
    assert records[given_up[0]]["digests"] == records[given_up[0] - 1]["digests"], "they are as they were"
    assert swarm.peers["trainer-0-again-1"].outcome == "every step of the run is closed"


def test_trainer_that_was_the_last_comes_back_where_the_ends_are_hosted(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=2, trainers=1, copies=0, ends="hosted")
    struck(swarm, ("trainer-0",), Restart("trainer-0"))
    check(swarm, ("trainer-0",))
    assert {event.lost for event in swarm.events(StepGivenUp)} == {("trainers",)}


@pytest.mark.parametrize("hosts", [2, 4])
def test_run_without_a_trainer_that_all_are_asked_to_leave_ends_at_every_peer(tmp_path: Path, hosts: int) -> None:
    """The ends are hosted: each part has a replica, and no record can follow all the same."""
    swarm = swarm_of(tmp_path, hosts=hosts, trainers=1, copies=1, ends="hosted", steps=1000, hop_s=0.1)
    swarm._may_fail = True

    async def story() -> None:
        await swarm.open()
        running = asyncio.get_running_loop().create_task(swarm.run())
        await eventually(lambda: swarm.peers["trainer-0"].events.of(StepClosed), deadline_s=300.0)
        swarm.kill("trainer-0")
        left = [name for name in swarm.peers if name != "trainer-0"]
        for name in left:
            membership = swarm.peers[name].membership
            assert membership is not None
            membership.leave("SIGTERM", Ending.DRAINED)
        await running
        for name in left:
            assert "the last trainer is lost: trainer-0" in repr(swarm.peers[name].outcome), name

    run_world(story())
