"""What a leader may not decide though its numbers are right is vetoed, and the next in the succession leads at once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from peers.chaos.liars.made_up import Inventor
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord, voters
from swarm.consensus.roster import Roster
from swarm.events import PeerLost, RecordRefused, StepClosed, TermBegan
from swarm.ids import PeerId
from swarm.sim.loop import run_world
from tests.harness.bad_leaders import (
    Attack,
    bends_quota,
    evicts,
    evicts_after_trying,
    forges_rows,
    striking,
    sybils_join,
    victim_of,
)
from tests.harness.expect import eventually
from tests.swarms.story import DONE

STEP, STEPS = 3, 6
AT_ONCE_S = 15.0


def records(swarm: SimSwarm) -> list[CloseRecord]:
    """What the founder knows was decided."""
    return [CloseRecord.model_validate_json(json.dumps(one)) for one in swarm.history()]


def struck(swarm: SimSwarm, attack: Attack) -> TermBegan:
    """Play the attack to the end of the run; returns how the next leader began."""
    with striking(attack, step=STEP) as done:
        run_world(swarm.run(timeout_s=600.0))
    assert done
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    (began,) = [event for event in swarm.events(TermBegan) if event.step == STEP]
    assert began.reason.startswith("its leader is overdue: ")
    assert max(event.seconds for event in swarm.events(StepClosed) if event.step == STEP) < AT_ONCE_S
    assert not [event for event in swarm.events(TermBegan) if event.step != STEP]
    return began


@pytest.mark.parametrize("victim_is", ["stage", "trainer", "successor"])
def test_member_that_is_heard_is_not_evicted(victim_is: str, tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=3, run={"steps": STEPS})
    began = struck(swarm, evicts(victim_of(swarm, STEP, victim_is)))
    why = "it has had all answers" if victim_is == "successor" else "is there, as far as is known here"
    assert why in began.reason
    assert not any(record.absent for record in records(swarm))
    assert not swarm.events(PeerLost)


def test_member_that_answers_is_not_evicted_after_an_attempt_with_it(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=3, run={"steps": STEPS})
    began = struck(swarm, evicts_after_trying(victim_of(swarm, STEP, "stage")))
    assert "fewer than two leaders have gone on without it" in began.reason
    assert not any(record.absent for record in records(swarm))
    assert not swarm.events(PeerLost)


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_rows_that_a_leader_changed_are_not_decided(ends: str, tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS}, split={"ends": ends})
    began = struck(swarm, forges_rows)
    assert "are not what it reported" in began.reason
    assert all(one.loss_sum > 0 for record in records(swarm) for one in record.committed)


def test_trainer_feeds_no_more_than_its_quota(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS, "reproducible": True})
    began = struck(swarm, bends_quota)
    assert "are its quota" in began.reason
    for record in records(swarm)[1:]:
        fed = Counter(one.microbatch.trainer for one in record.committed)
        assert max(fed.values()) - min(fed.values()) <= 1


def test_members_that_never_worked_have_no_vote_and_stop_nobody_when_they_vanish(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": 12}, stage_s={"forward": 0.3, "backward": 0.3})
    inside: list[PeerId] = []

    async def live() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=600.0))
            await eventually(lambda: bool(swarm.events(StepClosed)))
            inside.extend(await sybils_join(swarm, 8))

    run_world(live())
    assert len(inside) == 8
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    chain = records(swarm)
    joined = [record for record in chain if set(inside) & set(Roster(record.roster).peers)]
    assert joined
    for record in chain:
        assert not set(voters(record.members, record.hash())) & set(inside)
    assert set(inside) == {event.peer for event in swarm.events(PeerLost)} & set(inside)
    assert max(event.seconds for event in swarm.events(StepClosed) if event.step > 1) < 60.0


def test_records_that_one_voter_makes_up_are_accepted_by_nobody_in_any_term(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": 20}, stage_s={"forward": 0.3, "backward": 0.3})
    inventors: list[Inventor] = []

    async def live() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=3600.0))
            await eventually(lambda: len({event.step for event in swarm.events(StepClosed)}) >= 3)
            assert (membership := swarm.peers["host-0"].membership) is not None
            inventors.append(inventor := Inventor(membership._run))
            while len(inventor.made) < 200:
                step = inventor.step
                await inventor.strike()
                await inventor.wait(step + 1)

    run_world(live())
    (inventor,) = inventors
    kinds = {kind for kind, _ in inventor.verdicts}
    assert kinds == {"numbers", "evicts", "forks", "gives up", "goes back", "ends"}
    judged = {"Refused", "Violation", "Busy"}
    for about, said in inventor.verdicts.items():
        assert set(said) <= judged | {"WrongStep", "Superseded"}, about
        assert any(said[one] for one in judged), f"nobody has looked at {about}"
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    chain = records(swarm)
    assert [record.step for record in chain] == list(range(21))
    assert not {record.hash() for record in chain} & inventor.made
    assert not any(record.absent or record.void for record in chain)
    refused = swarm.events(RecordRefused)
    assert {event.peer for event in refused} == {inventor.me}
    assert len(refused) > 5
