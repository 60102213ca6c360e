"""Leading a step in which others have led, or lead as well."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest

from swarm.consensus.acceptor import BranchHead
from swarm.consensus.records import acceptance_bytes
from swarm.consensus.roster import Roster
from swarm.errors import PeerError, Refused, Superseded, Unreachable, Violation, WrongStep
from swarm.ids import PeerId
from swarm.step.leader.punctuality import Lateness
from swarm.step.messages import AGAIN, APPLY, DECIDE, PREPARE, PROPOSE, RECONCILE, Accepted, Promise, ResumeTrainer
from tests.harness.expect import eventually
from tests.harness.rigs.step import (
    COMMITTED,
    LEADER,
    OTHER,
    ROSTER,
    SUCCESSOR,
    A,
    Stage,
    T,
    acceptances,
    listed,
    no,
    record,
    stage,
    stop,
    verify,
    voted,
)


async def successor() -> Stage:
    here = await Stage(leader=SUCCESSOR).set()
    here.liveness.lose(LEADER, "dead")
    return here


@pytest.mark.parametrize("superseded", [False, True])
async def test_who_answered_late_is_told_of_once_and_not_forgotten_with_a_record_that_comes_to_nothing(
    superseded: bool,
) -> None:
    here = await stage()
    here.lead.late_answers = {T: Lateness(9.0, 1.0)}
    if not superseded:
        record = await here.leading().close()
        assert record.slow[T].said_by == (here.leader,)
        assert here.lead.late_answers == {}
        return
    here.puppets[OTHER].instead[PROPOSE] = no(Superseded("another leads"))
    with pytest.raises(Superseded):
        await here.leading().close()
    assert here.puppets[OTHER].told(PROPOSE)[0].record.slow[T].said_by == (here.leader,)
    assert here.lead.late_answers == {T: Lateness(9.0, 1.0)}


@pytest.mark.parametrize("voter", [SUCCESSOR, T])
async def test_successor_proposes_what_a_member_accepted_and_computes_nothing_again(voter: PeerId) -> None:
    here = await successor()
    here.puppets[voter].instead[PREPARE] = lambda body: Promise(vote=voted(0, record()), free=0)
    closed = await here.leading(1).run()
    assert closed == record()
    assert not here.asked(RECONCILE)
    assert {body.term for puppet in here.puppets.values() for body in puppet.told(PROPOSE)} == {1}
    (decision,) = here.puppets[T].told(DECIDE)
    assert (decision.record, decision.term) == (record().hash(), 1)


async def test_earlier_record_that_too_many_refuse_ends_no_leader_and_is_left_where_it_cannot_be_decided() -> None:
    here, vote = await successor(), voted(0, record())
    here.puppets[T].instead[PREPARE] = lambda body: Promise(vote=vote, free=0)
    for voter in (SUCCESSOR, T):
        here.puppets[voter].instead[PROPOSE] = no(Refused("not of this lineage"))
    leading = here.leading(1)
    with pytest.raises(Superseded, match="is refused"):
        await leading.run()
    assert leading.book.refused == {record().hash()}
    told = {T: Promise(vote=vote, free=0), SUCCESSOR: Promise(vote=None, free=0)}
    may_ignore, electors = leading._asks.believes.may_ignore, leading.electors()
    assert not may_ignore(vote, told, electors, leading.book.refused), "of the leader before nobody knows"
    told[LEADER] = Promise(vote=None, free=0)
    assert may_ignore(vote, told, electors, leading.book.refused)
    assert not may_ignore(vote, told, electors, ())


BEYOND_NUMBERS = tuple(one.model_copy(update={"loss_sum": 1.7e308}) for one in COMMITTED)


@pytest.mark.parametrize(
    "lie",
    [
        Promise(vote=None, free=9),
        Promise(vote=voted(8, record(previous="f" * 64)), free=0),
        Promise(vote=voted(0, record(roster=ROSTER.members[1:])), free=0),
        Promise(vote=voted(0, record(tokens=7)), free=0),
        Promise(vote=voted(0, record(committed=BEYOND_NUMBERS)), free=0),
        Promise(vote=voted(0, record(lr=9.0)), free=0),
        Promise(vote=voted(0, record(digests={})), free=0),
        Promise(vote=voted(0, record(void=True, committed=(), tokens=0, loss_sum=0.0)), free=0),
        Promise(vote=voted(0, record(lineage=7)), free=0),
        Promise(vote=voted(0, record(cursors={f"x{number}": (0, 0) for number in range(9)})), free=0),
        Promise(vote=None, free=0, candidate=BranchHead(vote=voted(0, record(lineage=1)), samples=10**9)),
    ],
    ids=["free", "previous", "roster", "sums", "no sum", "rate", "digests", "void", "lineage", "cursors", "candidate"],
)
async def test_promise_that_would_hide_what_was_accepted_counts_for_nothing(lie: Promise) -> None:
    here = await successor()
    here.puppets[SUCCESSOR].instead[PREPARE] = lambda body: Promise(vote=voted(0, record()), free=0)
    lies = iter([lie])
    here.puppets[T].instead[PREPARE] = lambda body: next(lies, None)
    assert await here.leading(1).run() == record()
    assert len(here.puppets[T].told(PREPARE)) == 2
    assert not here.asked(RECONCILE)


async def test_what_many_accepted_is_verified_once_and_of_who_does_not_vote_never() -> None:
    idle = [listed(f"Z{n}", "bootstrap", None, name="z") for n in range(9)]
    many = Roster([*ROSTER.members, *idle])
    first, successor = many.succession(1)[:2]
    here = await Stage(roster=many, leader=successor).set()
    here.liveness.lose(first, "dead")
    verified: list[bytes] = []

    def verify_and_count(peer: PeerId, data: bytes, signature: bytes) -> bool:
        verified.append(data)
        return verify(peer, data, signature)

    here.closing = dataclasses.replace(here.closing, verify=verify_and_count)
    proposed = record(here.genesis, roster=many.members)
    for peer, puppet in here.puppets.items():
        told = proposed if peer in ROSTER else record(here.genesis, lr=9.0)
        puppet.instead[PREPARE] = lambda body, told=told: Promise(vote=voted(0, told, many), free=0)
    closed = await here.leading(1).run()
    assert closed == proposed
    assert {peer for peer in here.asked(PREPARE) if peer not in ROSTER} >= {"Z0", "Z1"} - {first, successor}
    kinds = Counter(data.split(b"|")[0] for data in verified)
    assert kinds[b"promise"] == len(set(ROSTER.peers) - {first})
    assert (kinds[b"rows"], kinds[b"result"]) == (1, 3), "one trainer, and more than half of both parts"


async def test_candidate_that_those_who_were_there_signed_is_proposed_where_nothing_was_accepted() -> None:
    here = await successor()
    alone = record(lineage=1)
    signed = acceptances(alone, 0, [A, T])
    offered = BranchHead(vote=voted(0, alone), samples=2, term=0, acceptances=signed)
    here.puppets[T].instead[PREPARE] = lambda body: Promise(vote=None, free=0, candidate=offered)
    assert await here.leading(1).run() == alone


async def test_acceptance_that_is_forged_does_not_count() -> None:
    """With it the leader would hold a decision that nobody believes, itself included, and the step stand still."""
    here = await stage()
    forged = iter([Accepted(signature=bytes(64))])
    here.puppets[OTHER].instead[PROPOSE] = lambda body: next(forged, None)
    here.puppets[T].instead[PROPOSE] = no(Unreachable("cut off"), times=3)
    closed = await here.leading().run()
    (decision,) = here.puppets[T].told(DECIDE)
    signed = acceptance_bytes(closed, 0)
    assert len(decision.acceptances) >= 2
    assert all(verify(PeerId(peer), signed, by) for peer, by in decision.acceptances.items())


async def test_trainer_that_missed_the_first_question_of_a_term_hears_of_it_all_the_same() -> None:
    many = Roster([*ROSTER.members, listed("Z", "bootstrap", None)])
    leader = many.succession(1)[1]
    here = await Stage(roster=many, leader=leader).set()
    here.puppets[T].instead[PREPARE] = no(Unreachable("the stream broke"), times=2)
    running = asyncio.create_task(here.leading(1).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    assert len(here.puppets[T].told(PREPARE)) == 3
    await stop(running)


@pytest.mark.parametrize("question", [PREPARE, RECONCILE, APPLY, PROPOSE])
@pytest.mark.parametrize("error", [Superseded("term 5 has begun"), WrongStep("step 1 is closed")])
async def test_leader_gives_up_when_another_leads_or_has_closed(question: str, error: PeerError) -> None:
    here = await (stage() if question != PREPARE else successor())
    here.puppets[T].instead[question] = no(error)
    leading = here.leading(0 if question != PREPARE else 1)
    with pytest.raises(type(error), match=error.reason):
        await leading.run()
    assert leading.decided is None
    assert not here.asked(DECIDE)


@pytest.mark.parametrize("error", [Refused("F cannot leave"), Violation("forged")])
async def test_leader_that_may_not_grant_what_it_was_asked_gives_up_its_term_alone(
    error: PeerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await stage()
    monkeypatch.setattr(here.lead.book.requests, "settle", lambda *asked: no(error)(None))
    with pytest.raises(Superseded, match=f"cannot be granted: {error.reason}"):
        await here.leading().run()
    assert not here.asked(PROPOSE)


async def test_leader_whom_so_many_do_not_follow_asks_on_in_its_term_and_says_what_it_waits_for() -> None:
    """They answer for another step: their lineage was given up, and they have yet to come back to this one."""
    here = await Stage(leader=SUCCESSOR).set()
    for peer in (LEADER, T):
        here.puppets[peer].instead[PREPARE] = no(Refused(f"{LEADER} leads step 1"))
    running = asyncio.create_task(here.leading(1).run())
    await asyncio.sleep(60.0)
    assert set(here.waited) == {"a majority: 1 of 3 voters answer, 2 are needed, however long that takes"}
    assert {body.term for body in here.puppets[T].told(PREPARE)} == {1}
    for peer in (LEADER, T):
        del here.puppets[peer].instead[PREPARE]
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.ask_lead(ResumeTrainer(step=1, term=1, started=(), aside=()), T)
    await here.feed(term=1)
    assert (await running).absent == ()


async def test_leader_that_waits_for_the_batch_gives_up_when_another_leads() -> None:
    here = await successor()
    here.puppets[T].instead[AGAIN] = no(Superseded("term 5 has begun"))
    with pytest.raises(Superseded):
        await here.leading(1).run()
