"""A replica that others of its stage prove wrong is out of the very step, and barred from the run for a while."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.invariants.check import check_run
from peers.commands.history import fault_lines, read
from peers.commands.history_source import HistorySource
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus import faults
from swarm.consensus.faults import HopFault, auditors
from swarm.consensus.records import Contribution
from swarm.consensus.roster import Member, Roster, owner
from swarm.errors import OutOfSync, PeerError
from swarm.events import PeerLost, ProvenWrong, StepGivenUp
from swarm.ids import JourneyKey, PeerId
from swarm.pipeline.trainer.trainer import Trainer
from swarm.schema import AFTER_CHARS
from swarm.security.signing import audit_bytes
from swarm.security.statements import AuditStatement
from swarm.sim.loop import PEER, run_world
from swarm.step.calls import first_leaf
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.messages import SignedReceipt
from tests.harness.bad_leaders import invents_fault, striking, victim_of
from tests.swarms.story import DONE

STEPS, STEP, STAGE = 8, 3, 1
BAR = 3
Words = Callable[[int], bool]
"""What each of those says that judge a hop, by number: whether it is wrong."""


def swarm_of(root: Path, **more: Any) -> SimSwarm:
    """Two stages of three replicas each; what is computed does not depend on who does it."""
    shape: dict[str, Any] = {"hosts": 6, "trainers": 2, "run": {"steps": STEPS, "reproducible": True}}
    return SimSwarm(root, **{**shape, **more})


def fault_of(swarm: SimSwarm, at: JourneyKey, one: Contribution, receipt: SignedReceipt, words: Words) -> HopFault:
    """Return what those that judge a hop say of it, with their own signatures."""
    identities = {peer.endpoint.peer: peer.around.identity for peer in swarm.peers.values()}
    membership = swarm.peers["bootstrap"].membership
    assert membership is not None
    judges = auditors(membership.roster, at, STAGE, one.route[STAGE])
    said = {}
    for number, judge in enumerate(judges):
        signed = audit_bytes(swarm.manifest.run_id, at, STAGE, one.route[STAGE], receipt.signature, words(number))
        said[judge] = AuditStatement(auditor=judge, wrong=words(number), signature=identities[judge].sign(signed))
    return HopFault(
        step=at.step,
        microbatch=at.microbatch,
        attempt=at.attempt,
        after=at.after,
        hop=STAGE,
        accused=one.route[STAGE],
        told=receipt.digest,
        tokens=0,
        receipt=receipt.signature,
        statements=tuple(said.values()),
    )


@pytest.fixture(autouse=True)
def short_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is barred for so many steps that it comes back within the run."""
    monkeypatch.setattr(faults, "FIRST_BAR", BAR)


@contextlib.contextmanager
def accuses(swarm: SimSwarm, words: Words = lambda number: True, *, leads: bool = False) -> Iterator[list[PeerId]]:
    """Have a trainer hand its leader a fault before it reports the first microbatch of a step, or (``leads``) the first
    one through the leader of a step; yields the accused."""
    honest, accused = RemoteLeader.complete, list[PeerId]()

    async def complete(leader: RemoteLeader, step: int, one: Contribution, receipts: tuple[SignedReceipt, ...]) -> None:
        meant = leader._at.leader == one.route[STAGE] and step > 1 if leads else step == STEP
        if meant and PEER.get() == "trainer-0" and not accused:
            accused.append(PeerId(one.route[STAGE]))
            after = leader._at.history.head_hash[:AFTER_CHARS]
            key = JourneyKey(step, one.microbatch, 0, after)
            await leader.accuse(fault_of(swarm, key, one, receipts[STAGE], words))
        await honest(leader, step, one, receipts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteLeader, "complete", complete)
        yield accused


def names_in(record: dict[str, Any]) -> set[str]:
    return {member["peer"] for member in record["roster"]}


def test_replica_that_is_proven_wrong_is_out_of_the_very_step_and_may_join_again_later(tmp_path: Path) -> None:
    quiet = swarm_of(tmp_path / "quiet")
    run_world(quiet.run())
    swarm, honest, avoided = swarm_of(tmp_path / "struck"), Trainer.avoid, list[tuple[str, PeerId]]()

    def avoid(trainer: Trainer, replica: PeerId) -> None:
        avoided.append((PEER.get(), replica))
        honest(trainer, replica)

    with accuses(swarm) as accused, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "avoid", avoid)
        run_world(swarm.run())
    (liar,) = accused
    assert {*avoided} == {("trainer-0", liar), ("trainer-1", liar)}
    records = {record["step"]: record for record in swarm.history()}
    assert [record["digests"] for record in records.values()] == [record["digests"] for record in quiet.history()]
    check_run([swarm.root]).assert_sound()  # each microbatch once, and none lost
    assert records[STEP]["absent"] == [liar]
    assert records[STEP]["faults"][0]["accused"] == liar
    assert liar not in {peer for one in records[STEP]["committed"] for peer in one["route"]}
    (told,) = swarm.events(ProvenWrong)
    until = STEP + 1 + BAR
    assert (told.step, told.peer, told.accused, told.until, len(told.by)) == (STEP, liar, liar, until, 2)
    assert [step for step, record in records.items() if liar not in names_in(record)] == list(range(STEP, until))
    assert not swarm.events(StepGivenUp)
    assert not swarm.events(PeerLost)
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    kept = read(HistorySource(swarm.root / "bootstrap" / "history.jsonl"), last=None, verify=True)
    assert kept.broken == ""
    (line,) = fault_lines(kept.rows)
    name = next(name for name, peer in swarm.peers.items() if peer.endpoint.peer == liar)
    assert line.endswith(f"all signatures verified; {name} barred until step {until}")


def test_judge_that_calls_right_what_most_find_wrong_is_told_of(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=8, may_fail=True, run={"steps": STEP + 1, "reproducible": True})
    with accuses(swarm, lambda number: number > 0) as accused:
        run_world(swarm.run())
    liar, other = swarm.events(ProvenWrong)
    assert [liar.peer] == accused == [liar.accused] == [other.accused]
    assert liar.by == other.by
    assert other.peer not in {liar.peer, *liar.by}
    assert (len(other.by), liar.until, other.until) == (2, STEP + 1 + BAR, 0)
    (record,) = [record for record in swarm.history() if record.get("faults")]
    assert record["absent"] == accused, "it is barred the second time"


@pytest.mark.parametrize("lone", [0, 1])
def test_of_three_the_judge_that_alone_calls_a_hop_wrong_is_told_of(lone: int, tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, run={"steps": STEP + 1, "reproducible": True})
    with accuses(swarm, lambda number: number == lone) as accused:
        run_world(swarm.run())
    (told,) = swarm.events(ProvenWrong)
    assert accused == [told.accused] == [*told.by][:1]
    assert (told.peer in told.by, len(told.by), told.until) == (False, 2, 0)
    (record,) = [record for record in swarm.history() if record.get("faults")]
    assert (record["absent"], list(record["barred"])) == ([], [told.peer])
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}


def test_word_against_word_decides_nothing_and_the_trainer_goes_on(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=4, run={"steps": STEP + 1, "reproducible": True})
    with accuses(swarm) as accused, pytest.MonkeyPatch.context() as patch:
        refused = list[PeerError]()
        honest = RemoteLeader.accuse

        async def accuse(leader: RemoteLeader, fault: HopFault) -> None:
            try:
                await honest(leader, fault)
            except PeerError as error:
                refused.append(error)

        patch.setattr(RemoteLeader, "accuse", accuse)
        run_world(swarm.run())
    assert len(accused) == len(refused) == 1
    assert not any(record["absent"] or record.get("faults") for record in swarm.history())
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}


def test_fault_that_a_leader_invents_is_refused_by_all(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, may_fail=True, run={"steps": STEP + 2})
    with striking(invents_fault(victim_of(swarm, STEP, "stage")), step=STEP) as struck:
        run_world(swarm.run())
    assert struck
    bad = {name for name, peer in swarm.peers.items() if peer.outcome != DONE}
    assert len(bad) == 1
    (leader,) = (swarm.peers[name] for name in bad)
    assert isinstance(leader.outcome, BaseExceptionGroup)
    error = first_leaf(leader.outcome)
    assert isinstance(error, OutOfSync)
    assert "is forged" in str(error)
    assert not any(record.get("faults") for record in swarm.history("host-0" if bad != {"host-0"} else "host-2"))
    assert not swarm.events(ProvenWrong)


def test_leader_that_is_proven_wrong_closes_its_step_without_itself(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, may_fail=True)
    with accuses(swarm, leads=True) as accused:
        run_world(swarm.run())
    (told,) = swarm.events(ProvenWrong)
    (record,) = [record for record in swarm.history() if record.get("faults")]
    (before,) = [one["roster"] for one in swarm.history() if one["step"] == told.step - 1]
    assert [told.peer] == record["absent"] == accused
    assert owner(Roster([Member.model_validate_json(json.dumps(one)) for one in before]), told.step, 0) == told.peer
    assert {peer.outcome for peer in swarm.peers.values() if peer.endpoint.peer != told.peer} == {DONE}
