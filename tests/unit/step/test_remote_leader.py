"""The leader as a trainer sees it, while leaders die, are busy, come back, and know nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from swarm.consensus.ledger import Ledger
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Superseded, Unreachable, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Rpc
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.schema import Empty
from swarm.step.calls import LiveCalls, StepCalls
from swarm.step.member.remote_leader import RemoteLeader, TrainerBook
from swarm.step.messages import (
    ASIDE,
    COMPLETE,
    FAULT,
    LEASE,
    RESUME,
    Feed,
    Leased,
    Propose,
    SignedReceipt,
    TrainerResumed,
)
from swarm.step.rules import StepRules
from tests.harness.expect import eventually
from tests.harness.rigs.common import issued, set_aside
from tests.harness.rigs.step import (
    COMMITTED,
    FAULTY,
    LEADER,
    ROSTER,
    SUCCESSOR,
    LoopClock,
    MemberBench,
    Stage,
    T,
    apply,
    asked,
    decide,
    microbatch,
    no,
    prepare,
    reconcile,
    record,
    silence,
    stop,
    verify,
)

RECEIPTS = (SignedReceipt(digest=bytes(32), signature=bytes(64)),)
THIRD = ROSTER.succession(1)[2]


class Begun:
    """A trainer's work under way, as a trainer keeps account of it."""

    def __init__(self, count: int = 0) -> None:
        self.taken = IssuedTable()
        self.kept: list[int] = []
        self.avoided: list[PeerId] = []
        for position in range(count):
            self.taken.add(issued(1, microbatch(position)))

    def started(self, step: int) -> Sequence[MicrobatchId]:
        """See :class:`~swarm.step.member.remote_leader.Begun`."""
        return self.taken.started(step)

    def keep(self, step: int, count: int) -> None:
        """See :class:`~swarm.step.member.remote_leader.Begun`."""
        self.kept.append(count)
        self.taken.keep(step, count)

    def avoid(self, replica: PeerId) -> None:
        """See :class:`~swarm.step.member.remote_leader.Begun`."""
        self.avoided.append(replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leasing(StepRules):
    """Rules by which so many microbatches are the first lease."""

    first: int

    def first_lease(self, trainers: Sequence[PeerId]) -> int:
        """See :class:`~swarm.step.rules.StepRules`."""
        return self.first


class TrainerPeer:
    """A trainer's peer: its member, and the leaders it may turn to."""

    def __init__(self, begun: int = 0, first: int = 0) -> None:
        self.stage, self.bench, self.begun = Stage(), MemberBench(T), Begun(begun)
        rules = self.bench.position.rules
        same = {field.name: getattr(rules, field.name) for field in fields(rules)}
        self.bench.position.rules = Leasing(**same, first=first)

    async def set(self) -> TrainerPeer:
        await self.stage.set()
        calls = LiveCalls(StepCalls(self.stage.endpoints[T]), self.stage.liveness)
        self.leader = RemoteLeader(calls, self.bench.position, LoopClock(), lambda: 5.0, verify)
        self.leader.begun = self.begun
        return self

    async def follow(self, term: int) -> None:
        await self.bench.ask(prepare(term=term))

    async def close(self) -> None:
        for body in (reconcile(), apply(), Propose(record=record()), decide(record())):
            await self.bench.ask(body)

    async def again(self, step: int = 1) -> None:
        await asked(self.leader, Feed(step=step, term=0), LEADER)

    def told(self, peer: PeerId, method: Rpc[Any, Any]) -> list[Any]:
        return self.stage.puppets[peer].told(method)

    def instead(self, peer: PeerId, method: Rpc[Any, Any], answer: Any) -> None:
        self.stage.puppets[peer].instead[method] = answer


async def trainer(begun: int = 0, first: int = 0) -> TrainerPeer:
    return await TrainerPeer(begun, first).set()


# --- leasing ---------------------------------------------------------------------------------------------------------


async def test_trainer_leases_what_is_added() -> None:
    here = await trainer()
    assert await here.leader.lease(1, 4) == 4
    here.instead(LEADER, LEASE, lambda body: Leased(total=5, reason=""))
    assert await here.leader.lease(1, 4) == 1
    assert await here.leader.lease(1, 4) == 0
    assert [body.total for body in here.told(LEADER, LEASE)] == [4, 8, 9]


async def test_first_lease_is_had_without_asking_and_counts_in_what_is_asked_for() -> None:
    here = await trainer(first=5)
    assert [await here.leader.lease(1, 3), await here.leader.lease(1, 3)] == [3, 2]
    assert not here.told(LEADER, LEASE)
    assert await here.leader.lease(1, 3) == 3
    assert [body.total for body in here.told(LEADER, LEASE)] == [8]


async def test_trainer_that_wants_nothing_gives_back_what_is_left_of_its_first_lease() -> None:
    here = await trainer(begun=3, first=5)
    assert await here.leader.lease(1, 3) == 3
    assert await here.leader.lease(1, 0) == 0
    assert [len(body.started) for body in here.told(LEADER, RESUME)] == [3]
    assert await here.leader.lease(1, 4) == 4
    assert [body.total for body in here.told(LEADER, LEASE)] == [3, 7]


async def test_first_lease_is_the_first_leaders_alone() -> None:
    here = await trainer(first=5)
    await here.follow(1)
    assert await here.leader.lease(1, 3) == 3
    assert [body.started for body in here.told(SUCCESSOR, RESUME)] == [()]
    assert [body.total for body in here.told(SUCCESSOR, LEASE)] == [3]


@pytest.mark.parametrize("total", [3, 9])
async def test_leader_that_takes_a_lease_back_or_gives_more_than_was_asked_hears_what_was_begun(total: int) -> None:
    here = await trainer(begun=4)
    await here.leader.lease(1, 4)
    here.instead(LEADER, LEASE, lambda body: Leased(total=total, reason="") if body.total == 8 else None)
    here.instead(LEADER, RESUME, lambda body: TrainerResumed(kept=3))
    assert await here.leader.lease(1, 4) == 4
    assert [len(body.started) for body in here.told(LEADER, RESUME)] == [4]
    assert [body.total for body in here.told(LEADER, LEASE)] == [4, 8, 7]


@pytest.mark.parametrize("error", [Refused("no"), Violation("too much"), PeerError("failed: KeyError")])
async def test_leader_that_says_no_to_a_lease_hears_what_was_begun_and_is_asked_again(error: PeerError) -> None:
    here = await trainer(begun=2)
    await here.leader.lease(1, 2)
    here.instead(LEADER, LEASE, no(error, times=2))
    here.instead(LEADER, RESUME, no(error, times=1))
    assert await here.leader.lease(1, 1) == 1
    assert len(here.told(LEADER, RESUME)) == 3
    assert asyncio.get_running_loop().time() > 0, "it was asked again without a pause"


@pytest.mark.parametrize("how", ["closed", "cut off"])
@pytest.mark.parametrize("error", [Refused("no"), Busy("always")])
async def test_leader_that_always_says_no_is_asked_until_the_step_is_over_here(error: PeerError, how: str) -> None:
    here = await trainer()
    here.instead(LEADER, LEASE, no(error))
    leasing = asyncio.create_task(here.leader.lease(1, 1))
    await eventually(lambda: len(here.told(LEADER, LEASE)) > 3)
    await (here.close() if how == "closed" else here.bench.member.cut("A is steps ahead"))
    with pytest.raises(WrongStep, match="step 1 is closed" if how == "closed" else None):
        await leasing


async def test_leader_that_fails_over_a_finished_journey_is_told_again() -> None:
    here = await trainer(begun=1)
    here.instead(LEADER, COMPLETE, no(PeerError("failed: KeyError"), times=2))
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert here.told(LEADER, COMPLETE)[-1].contribution == COMMITTED[0]


@pytest.mark.parametrize(
    "error", [Busy("3 trainers"), Unreachable("no route"), DeadlineMissed("late"), WrongStep("behind")]
)
async def test_leader_that_does_not_answer_is_asked_again_and_leases_nothing_twice(error: PeerError) -> None:
    here = await trainer()
    here.instead(LEADER, LEASE, no(error, times=5))
    assert await here.leader.lease(1, 4) == 4
    assert [body.total for body in here.told(LEADER, LEASE)] == [4] * 6


async def test_closed_step_has_nothing_to_lease() -> None:
    here = await trainer()
    here.instead(LEADER, LEASE, no(WrongStep("step 1 is closed")))
    leasing = asyncio.create_task(here.leader.lease(1, 4))
    await eventually(lambda: len(here.told(LEADER, LEASE)) > 3)
    assert not leasing.done()  # the leader has closed it, and we may be the last to hear
    await here.close()
    with pytest.raises(WrongStep, match="step 1 is closed"):
        await leasing
    with pytest.raises(WrongStep, match="step 2 is open"):
        await here.leader.lease(1, 4)


async def test_trainer_without_quota_asks_again_when_one_of_its_own_was_put_aside() -> None:
    """Nobody else may: the batch would lack one for ever."""
    here = await trainer(begun=2)
    await here.leader.lease(1, 2)
    here.instead(LEADER, LEASE, lambda body: Leased(total=2, reason="the step is fully leased"))
    assert await here.leader.lease(1, 1) == 0
    waiting = asyncio.create_task(here.leader.wait_quota(1))
    await asyncio.sleep(600.0)
    assert not waiting.done()
    here.instead(LEADER, ASIDE, no(Unreachable("no route"), times=1))
    await here.leader.put_aside(1, microbatch(0), "it is poison")
    await asyncio.wait_for(waiting, 1.0)


# --- completing ------------------------------------------------------------------------------------------------------


async def test_finished_journey_is_told_to_the_leader_and_the_next_in_its_succession() -> None:
    here = await trainer()
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert here.stage.asked(COMPLETE) == {LEADER, SUCCESSOR}
    (body,) = here.told(SUCCESSOR, COMPLETE)
    assert (body.term, body.contribution) == (0, COMMITTED[0])


@pytest.mark.parametrize("error", [WrongStep("closed"), Refused("no"), Unreachable("gone"), Superseded("term 3")])
async def test_witness_that_does_not_listen_is_not_needed(error: PeerError) -> None:
    here = await trainer()
    here.instead(SUCCESSOR, COMPLETE, no(error))
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert (len(here.told(LEADER, COMPLETE)), len(here.told(SUCCESSOR, COMPLETE))) == (1, 1)


async def test_witness_that_stalls_is_not_waited_for_when_it_is_gone() -> None:
    here = await trainer()
    here.instead(SUCCESSOR, COMPLETE, here.stage.stall(SUCCESSOR))
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert asyncio.get_running_loop().time() < 1.0


@pytest.mark.parametrize("error", [Refused("no"), Violation("forged")])
async def test_leader_that_does_not_count_a_microbatch_is_an_error_that_names_it(error: PeerError) -> None:
    here = await trainer()
    here.instead(LEADER, COMPLETE, no(error))
    with pytest.raises(type(error), match=f"^{LEADER}: "):
        await here.leader.complete(1, COMMITTED[0], RECEIPTS)


async def test_microbatch_put_aside_is_told_with_its_reason_as_far_as_there_is_room() -> None:
    here = await trainer()
    here.instead(LEADER, ASIDE, no(Unreachable("cut"), times=2))
    await here.leader.put_aside(1, microbatch(4), "x" * 300)
    assert [body.aside.microbatch for body in here.told(LEADER, ASIDE)] == [microbatch(4)] * 3
    assert here.told(LEADER, ASIDE)[0].aside.reason == "x" * 200


# --- another leads ---------------------------------------------------------------------------------------------------


async def test_what_was_put_aside_behind_what_a_new_leader_counts_is_forgotten_with_it() -> None:
    here = await trainer(begun=3)
    assert await here.leader.lease(1, 3) == 3
    set_aside(here.begun.taken, 1, microbatch(2))
    await here.leader.put_aside(1, microbatch(2), "poison")
    here.instead(SUCCESSOR, RESUME, lambda body: TrainerResumed(kept=1))
    await here.follow(1)
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    await here.follow(2)
    here.instead(THIRD, RESUME, lambda body: TrainerResumed(kept=1))
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    (resumed,) = here.told(THIRD, RESUME)
    assert (resumed.started, resumed.aside) == ((microbatch(0),), ())


async def test_proof_that_the_leader_took_is_told_to_the_next_one_too() -> None:
    here = await trainer(begun=2)
    await here.leader.lease(1, 2)
    await here.leader.accuse(FAULTY)
    assert here.told(LEADER, FAULT) == [FAULTY]
    here.instead(LEADER, FAULT, no(Refused("it decides nothing")))
    with pytest.raises(Refused, match="it decides nothing"):
        await here.leader.accuse(FAULTY.model_copy(update={"hop": 1}))
    here.instead(SUCCESSOR, FAULT, no(Refused("another leader is not so sure")))
    await here.follow(1)
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert here.told(SUCCESSOR, FAULT) == [FAULTY]


async def test_what_was_put_aside_is_told_to_the_next_leader_with_what_was_begun() -> None:
    here = await trainer(begun=3)
    set_aside(here.begun.taken, 1, microbatch(1))
    await here.leader.put_aside(1, microbatch(1), "no number")
    await here.follow(1)
    await here.leader.lease(1, 1)
    (resumed,) = here.told(SUCCESSOR, RESUME)
    assert resumed.started == tuple(microbatch(position) for position in range(3))
    assert [(one.microbatch, one.reason) for one in resumed.aside] == [(microbatch(1), "no number")]
    book = Ledger(1, 2, {T: 2})
    assert book.resume(1, T, resumed.started, resumed.aside) == 3
    assert book.aside() == resumed.aside


async def test_what_the_next_leader_has_no_room_for_is_not_reported_and_no_longer_put_aside() -> None:
    here = await trainer(begun=3)
    for body in (COMMITTED[1], COMMITTED[0]):
        await here.leader.complete(1, body, RECEIPTS)
    set_aside(here.begun.taken, 1, microbatch(2))
    here.instead(LEADER, ASIDE, no(Busy("later")))
    putting = asyncio.create_task(here.leader.put_aside(1, microbatch(2), "no number"))
    await eventually(lambda: here.told(LEADER, ASIDE))
    here.instead(SUCCESSOR, RESUME, lambda body: TrainerResumed(kept=1))
    await here.follow(1)
    with pytest.raises(Refused, match="no room"):
        await putting
    assert here.told(SUCCESSOR, ASIDE) == []
    assert [body.contribution for body in here.told(SUCCESSOR, COMPLETE) if body.term == 1] == [COMMITTED[0]]
    here.begun.taken.add(issued(1, microbatch(1)))
    here.begun.taken.add(issued(1, microbatch(2)))  # both are taken again, and may come home this time
    await here.follow(2)
    await here.leader.lease(1, 1)
    (resumed,) = here.told(THIRD, RESUME)
    assert (len(resumed.started), resumed.aside) == (3, ())


async def test_leader_that_took_us_for_gone_is_told_again_what_was_begun() -> None:
    here = await trainer(begun=1)
    await here.leader.lease(1, 1)
    here.instead(LEADER, COMPLETE, no(Superseded("what this trainer has begun is not known here"), times=1))
    here.instead(LEADER, RESUME, no(Busy("it has yet to count on it again"), times=3))
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    assert len(here.told(LEADER, RESUME)) == 4
    assert here.begun.kept == [1]
    assert here.told(LEADER, COMPLETE)[-1].contribution == COMMITTED[0]


async def test_two_reports_at_once_tell_a_new_leader_once_what_was_begun() -> None:
    here = await trainer(begun=2)
    await here.leader.lease(1, 2)
    await here.follow(1)
    await asyncio.gather(*(here.leader.complete(1, one, RECEIPTS) for one in COMMITTED))
    assert len(here.told(SUCCESSOR, RESUME)) == 1
    counted = {body.contribution.microbatch for body in here.told(SUCCESSOR, COMPLETE) if body.term == 1}
    assert counted == {microbatch(0), microbatch(1)}


async def test_leader_that_is_gone_before_it_heard_all_is_followed_by_one_that_does() -> None:
    here = await trainer(begun=1)
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    here.instead(SUCCESSOR, COMPLETE, here.stage.stall(SUCCESSOR))
    await here.follow(1)
    leasing = asyncio.create_task(here.leader.lease(1, 1))
    await eventually(lambda: SUCCESSOR in here.stage.liveness.gone)
    await here.follow(2)
    assert await leasing == 1
    assert [body.term for body in here.told(THIRD, RESUME)] == [2]
    assert [body.contribution for body in here.told(THIRD, COMPLETE) if body.term == 2] == [COMMITTED[0]]


async def test_lease_that_arrives_after_another_leader_heard_all_is_not_believed() -> None:
    here = await trainer(begun=1)
    answer = asyncio.Event()

    async def late(body: Any) -> Leased:
        await answer.wait()
        return Leased(total=9, reason="")

    here.instead(LEADER, LEASE, late)
    leasing = asyncio.create_task(here.leader.lease(1, 9))
    await eventually(lambda: here.told(LEADER, LEASE))
    await here.follow(1)
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    answer.set()
    here.instead(SUCCESSOR, LEASE, lambda body: Leased(total=2, reason=""))
    assert await leasing == 1
    assert {body.total for body in here.told(SUCCESSOR, LEASE)} == {10}


async def test_trainer_without_work_under_way_follows_the_next_leader_without_a_word() -> None:
    here = await trainer()
    here.leader.begun = None
    await here.follow(1)
    assert await here.leader.lease(1, 1) == 1
    assert here.told(SUCCESSOR, RESUME) == []


# --- waiting for quota -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["again", "term", "closed", "cut"])
async def test_trainer_waits_for_quota_until_there_is_some_or_another_leads(what: str) -> None:
    here = await trainer()
    here.instead(LEADER, LEASE, lambda body: Leased(total=0, reason="the step is fully leased"))
    assert await here.leader.lease(1, 1) == 0
    waiting = asyncio.create_task(here.leader.wait_quota(1))
    await here.again(step=7)
    await asyncio.sleep(100)
    assert not waiting.done()
    if what == "again":
        await here.again()
        await waiting
    elif what == "term":
        await here.follow(1)
        await waiting
    elif what == "cut":
        await here.bench.member.cut("A is steps ahead")
        await waiting
        with pytest.raises(WrongStep):
            await here.leader.lease(1, 1)
    else:
        await here.close()
        with pytest.raises(WrongStep):
            await waiting


async def test_trainer_told_of_quota_while_it_asked_does_not_wait() -> None:
    here = await trainer()

    async def meanwhile(body: Any) -> Leased:
        await here.again()
        return Leased(total=0, reason="")

    here.instead(LEADER, LEASE, meanwhile)
    assert await here.leader.lease(1, 1) == 0
    await here.leader.wait_quota(1)


async def test_trainer_forgets_with_the_step_what_it_told_its_leader() -> None:
    here = await trainer(begun=1)
    await here.leader.lease(1, 4)
    await here.leader.complete(1, COMMITTED[0], RECEIPTS)
    await here.close()
    leader = ROSTER.succession(2)[0]
    assert await here.leader.lease(2, 1) == 1
    assert here.told(leader, LEASE)[-1].total == 1
    await here.bench.ask(prepare(2, 1))
    await here.leader.lease(2, 1)
    (resumed,) = here.told(ROSTER.succession(2)[1], RESUME)
    assert (resumed.step, resumed.started) == (2, ())


async def test_trainer_that_is_cancelled_while_it_asks_leaves_nothing_behind() -> None:
    here = await trainer(begun=1)
    here.instead(LEADER, COMPLETE, silence)
    completing = asyncio.create_task(here.leader.complete(1, COMMITTED[0], RECEIPTS))
    await eventually(lambda: here.told(LEADER, COMPLETE))
    await stop(completing)
    assert await asked(here.leader, Feed(step=1, term=0), LEADER) == Empty()


async def test_trainer_avoids_nobody_of_whom_nothing_is_proven() -> None:
    here = await trainer()
    await here.leader.lease(1, 1)
    with pytest.raises(PeerError):
        await asked(here.leader, Feed(step=1, term=0, faults=(FAULTY,)), LEADER)
    await asked(here.leader, Feed(step=2, term=0, faults=(FAULTY,)), LEADER)
    assert here.begun.avoided == []


async def test_trainer_hears_of_quota_and_looks_at_proofs_only_from_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    here, looked = await trainer(), list[Any]()
    monkeypatch.setattr(RemoteLeader, "_avoid", lambda self, fault: looked.append(fault))
    here.instead(LEADER, LEASE, lambda body: Leased(total=0, reason=""))
    await here.leader.lease(1, 1)
    proven = Feed(step=1, term=0, faults=(FAULTY,))
    for caller, body in ((SUCCESSOR, proven), (SUCCESSOR, proven.model_copy(update={"term": 1}))):
        with pytest.raises(Refused, match=f"{LEADER} leads step 1 in term 0"):
            await asked(here.leader, body, caller)
    assert looked == []
    assert not here.leader._book.again.is_set()
    await asked(here.leader, proven, LEADER)
    assert looked == [FAULTY]
    await here.follow(1)
    with pytest.raises(Superseded):
        await asked(here.leader, proven, LEADER)
    await asked(here.leader, proven.model_copy(update={"term": 1}), SUCCESSOR)
    assert looked == [FAULTY, FAULTY]


async def test_trainer_that_rewinds_asks_for_what_it_wants_and_not_for_what_it_had() -> None:
    here = await TrainerPeer().set()
    leader = here.leader
    leader._book = TrainerBook(13, leased=4)  # of the lineage that is given up; step 1 is open now
    leader.rewound()
    here.instead(LEADER, LEASE, lambda body: Leased(total=min(4, body.total), reason=""))
    got = await leader.lease(1, 4)
    assert (got, [body.total for body in here.told(LEADER, LEASE)]) == (4, [4])
