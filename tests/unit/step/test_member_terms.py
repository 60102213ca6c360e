"""A member when leaders take over from each other, when a step is decided without it, and when it hears so late."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from swarm.consensus.acceptor import RecordEvidence, SignedPromise, promise_bytes
from swarm.consensus.changes import Changes
from swarm.consensus.records import NO_RECORD, CloseRecord, Decision, acceptance_bytes
from swarm.consensus.roster import Roster, owner
from swarm.errors import Busy, PeerError, Refused, RunEnded, Superseded, Violation, WrongStep
from swarm.ids import PeerId
from swarm.step.decisions import ATTEMPTS_PER_TERM, given_up
from swarm.step.messages import Decide, Over, Propose, Working
from tests.harness.expect import eventually
from tests.harness.rigs.consensus import signed_rows
from tests.harness.rigs.step import (
    COMMITTED,
    GENESIS,
    ROSTER,
    RUN,
    A,
    B,
    FakeAverage,
    MemberBench,
    T,
    acceptances,
    admission,
    apply,
    brought_to,
    decide,
    evidence,
    listed,
    prepare,
    reconcile,
    record,
    sign,
    stop,
)

WITHOUT_A = Roster([member for member in ROSTER.members if member.peer != A])
BY_B = tuple(one.model_copy(update={"route": (B,)}) for one in COMMITTED)
LEFT_OUT: dict[str, Any] = {"absent": (A,), "roster": WITHOUT_A.members, "committed": BY_B}
ABSENT = Changes(absent=(A,))


def decided(closed: CloseRecord, **how: Any) -> Decision:
    return Decision(closed, acceptances(closed, **how), term=how.get("term", 0))


async def whole(bench: MemberBench, closed: CloseRecord, term: int) -> None:
    """Everything that the leader of a term asks."""
    step = closed.step
    for body in (prepare(step, term), reconcile(step, term=term), apply(step, term=term)):
        await bench.ask(body)
    await bench.ask(Propose(record=closed, term=term))
    await bench.ask(decide(closed, term=term))


# --- terms -----------------------------------------------------------------------------------------------------------


async def test_member_promises_what_it_knows_and_the_same_when_it_is_asked_again() -> None:
    bench = MemberBench()
    for _ in range(2):
        promise = await bench.ask(prepare(term=1))
        assert (promise.vote, promise.free, bench.position.term) == (None, 0, 1)
    assert bench.position.leader == ROSTER.succession(1)[1]


async def test_member_is_at_work_for_the_leader_of_the_term_alone() -> None:
    bench = MemberBench()
    bench.part.microbatches, bench.slow_settling = frozenset(), asyncio.Event()
    other = next(peer for peer in ROSTER.peers if peer != owner(ROSTER, 1, 0))
    asking = [asyncio.create_task(bench.ask(reconcile(2), caller=other))]

    async def works(term: int) -> bool:
        await asyncio.sleep(0.01)
        return bool((await bench.ask(Working(step=1, term=term), caller=other)).working)

    assert not await works(0), "who asks of a step that is not open may ask for ever"
    asking.append(asyncio.create_task(bench.ask(reconcile())))
    assert await works(0)
    assert bench.settled
    await bench.ask(prepare(term=1))
    assert not asking[1].done()
    assert not await works(1), "the question is of a leader before"
    for task in asking:
        await stop(task)
    await bench.member.close()
    assert not bench.position.asked


@pytest.mark.parametrize("stage", ["", "reconcile", "apply", "propose"])
async def test_member_closes_in_a_later_term_what_was_begun_in_an_earlier_one(stage: str) -> None:
    bench = await brought_to(stage) if stage else MemberBench()
    closed = record(term=2)
    await whole(bench, closed, 2)
    assert bench.part.swapped == [closed.digests["stage-0"]]
    assert bench.history.head == closed


@pytest.mark.parametrize(
    "late",
    [
        prepare(term=1),
        reconcile(),
        reconcile(term=1),
        apply(),
        Propose(record=record()),
        Propose(record=record(), term=1),
    ],
)
async def test_member_refuses_the_questions_of_a_term_that_is_over(late: Any) -> None:
    bench = await brought_to("apply")
    await bench.ask(prepare(term=2))
    with pytest.raises(Superseded, match="term 2 has begun"):
        await bench.ask(late)
    assert (bench.position.term, len(bench.average.begun)) == (2, 1)


async def test_member_asked_to_follow_by_one_whose_term_it_is_not_refuses_and_does_not() -> None:
    bench = MemberBench()
    for caller in (ROSTER.succession(1)[0], ROSTER.succession(1)[2], PeerId("X")):
        with pytest.raises(Refused, match="leads step 1 in term 1"):
            await bench.ask(prepare(term=1), caller=caller)
    assert bench.position.term == 0


async def test_member_that_accepted_says_so_and_accepts_the_same_record_in_a_later_term() -> None:
    bench = await brought_to("propose")
    promise = await bench.ask(prepare(term=1))
    assert (promise.vote.term, promise.vote.record, promise.free) == (0, record(), 0)
    answer = await bench.ask(Propose(record=record(), term=1))
    assert answer.signature == sign(A, acceptance_bytes(record(), 1))
    with pytest.raises(Refused, match="no majority"):
        await bench.ask(decide(record(), term=0, signers=[A]))
    await bench.ask(decide(record(), term=1))
    assert (bench.part.swapped, bench.position.open_step) == ([record().digests["stage-0"]], 2)


async def test_member_that_accepts_a_record_again_keeps_the_requests_that_explained_it() -> None:
    bench = await brought_to("propose")
    await bench.ask(prepare(term=1))
    await bench.ask(Propose(record=record(), changes=ABSENT, term=1))
    promise = await bench.ask(prepare(term=2))
    assert (promise.vote.term, promise.vote.changes) == (1, Changes())


async def test_member_says_from_which_term_on_the_step_was_closed_anew() -> None:
    bench = await brought_to("propose")
    await bench.ask(prepare(term=1))
    await bench.ask(reconcile(term=1))
    promise = await bench.ask(prepare(term=2))
    assert (promise.vote.term, promise.free) == (0, 1)


async def test_member_accepts_no_record_of_a_term_to_come() -> None:
    bench = await brought_to("apply")
    with pytest.raises(Violation, match="later term"):
        await bench.ask(Propose(record=record(term=1), term=0))


# --- attempts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newer", [{"attempt": 2}, {"term": 1}], ids=["attempt", "term"])
async def test_member_gives_up_averaging_when_a_newer_attempt_begins(newer: dict[str, int]) -> None:
    bench = MemberBench()
    bench.average.gate = asyncio.Event()
    older = asyncio.create_task(bench.ask(reconcile()))
    await eventually(lambda: bench.average.begun)
    bench.average.gate = None
    assert (await bench.ask(reconcile(**newer))).failure == ""
    with pytest.raises(Superseded, match="newer attempt"):
        await older
    assert (len(bench.average.begun), bench.average.cancelled) == (2, 1)


async def test_member_whose_leader_hung_up_as_a_newer_attempt_began_makes_it_when_it_is_asked_again() -> None:
    bench, stopping, stopped = MemberBench(), asyncio.Event(), asyncio.Event()
    average = bench.average

    class Stubborn(FakeAverage):
        async def __call__(self, *asked: Any) -> Any:
            try:
                return await super().__call__(*asked)
            except asyncio.CancelledError:
                stopping.set()
                await stopped.wait()
                raise

    average.__class__ = Stubborn
    average.gate = asyncio.Event()
    first = asyncio.create_task(bench.ask(reconcile()))
    await eventually(lambda: average.begun)
    newer = asyncio.create_task(bench.ask(reconcile(attempt=2)))
    await stopping.wait()
    newer.cancel()
    await asyncio.gather(newer, return_exceptions=True)
    stopped.set()
    with pytest.raises(Superseded):
        await first
    average.gate = None
    assert (await bench.ask(reconcile(attempt=2))).digest
    assert [attempt for _, _, attempt in average.begun] == [1, 2]


async def test_member_that_hears_of_a_term_twice_says_so_though_the_first_who_asked_hung_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, gate = MemberBench(), asyncio.Event()
    waiting = asyncio.create_task(bench.position.wait_term(1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(bench.position.news, "tell", gate.wait)
        first = asyncio.create_task(bench.ask(prepare(term=1)))
        await eventually(lambda: bench.position.term == 1)
        await stop(first)
    assert not waiting.done()
    await bench.ask(prepare(term=1))
    await asyncio.wait_for(waiting, 120)


async def test_member_whose_part_is_not_concerned_is_not_confused_by_a_late_attempt_either() -> None:
    """The other part's attempt has another route: only its number has grown."""
    bench, elsewhere = MemberBench(T), tuple(one.model_copy(update={"route": (B,)}) for one in COMMITTED)
    first = reconcile(committed=elsewhere)
    second = reconcile(attempt=2).model_copy(update={"attempts": {"ends": 1, "stage-0": 2}})
    for body in (first, second):
        await bench.ask(body)
    with pytest.raises(Superseded):
        await bench.ask(first)
    for body in (apply(), Propose(record=record())):
        await bench.ask(body)
    assert (len(bench.average.begun), bench.part.prepared) == (1, 1)


async def test_member_of_an_attempt_with_fewer_averages_with_those_that_are_there() -> None:
    bench = MemberBench()
    all_mine = tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED)
    await bench.ask(reconcile(committed=all_mine, live=(A, T)))
    assert bench.average.weights == {A: 21}
    assert bench.settled == [{one.microbatch: (A,) for one in COMMITTED}]


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (reconcile(live=(B, T)), Refused, "without this member"),
        (reconcile(live=(A, T)), Refused, "assigned to a replica that is not there"),
        (reconcile(live=(A, B)), Refused, "its trainer is not there with its ends"),
        (reconcile(live=(*ROSTER.peers, PeerId("X"))), Violation, "does not take part"),
        *(
            (reconcile().model_copy(update={"attempts": numbers}), Violation, "rounds that there are not")
            for numbers in ({}, {"ends": 1}, {"ends": 1, "stage-0": 1, "stage-7": 1})
        ),
    ],
)
async def test_member_makes_no_attempt_that_no_honest_leader_asks_for(
    body: Any, error: type[PeerError], words: str
) -> None:
    bench = MemberBench()
    with pytest.raises(error, match=words):
        await bench.ask(body)
    assert bench.average.begun == []
    await bench.ask(reconcile())


@pytest.mark.parametrize(("me", "changed"), [(A, {"route": (A,)}), (T, {"tokens": 5})])
async def test_member_signs_no_result_of_an_attempt_for_other_inputs_under_its_number(me: PeerId, changed: Any) -> None:
    bench, other = MemberBench(me), tuple(one.model_copy(update=changed) for one in COMMITTED)
    assert (await bench.ask(reconcile())).signed
    with pytest.raises(Violation, match="is of something else than before"):
        await bench.ask(reconcile(committed=other))
    assert len(bench.average.begun) == 1
    assert (await bench.ask(reconcile(committed=other, attempt=2))).signed
    assert len(bench.average.begun) == 2


# --- decided without it ----------------------------------------------------------------------------------------------


async def test_member_without_the_result_votes_on_an_old_record_and_is_cut_off_when_it_is_decided() -> None:
    bench = MemberBench()
    await bench.ask(prepare(term=1))
    await bench.ask(Propose(record=record(), term=1))
    waiting = asyncio.create_task(bench.position.wait_open(2))
    await bench.ask(decide(record(), term=1))
    await waiting
    assert "without what this peer holds" in bench.position.cut_off
    assert (bench.part.swapped, bench.history.head, bench.position.open_step) == ([], GENESIS, 1)
    assert not bench.position.is_member
    for body in (prepare(term=4), reconcile(term=4), Propose(record=record(), term=4)):
        with pytest.raises(Busy, match="catching up"):
            await bench.ask(body)


async def test_member_without_the_result_does_not_vote_on_a_record_of_this_term() -> None:
    bench = MemberBench()
    await bench.ask(prepare(term=1))
    with pytest.raises(Refused, match="nothing was averaged"):
        await bench.ask(Propose(record=record(term=1), term=1))


async def test_member_with_another_result_votes_on_an_old_record_that_others_signed_and_is_cut_off() -> None:
    bench = await brought_to("reconcile")
    await bench.ask(apply(ends=4.0))
    await bench.ask(Propose(record=record(), term=1))
    await bench.ask(decide(record(), term=1))
    assert bench.position.cut_off
    assert bench.part.swapped == []


UNPROVEN = {
    "nothing": RecordEvidence(rows=signed_rows(record())),
    "half of a part": evidence(record(), signers=[A, T]),
    "another part only": evidence(record(), signers=[A, B]),
    "another digest": evidence(record(digests=record().digests | {"stage-0": "f" * 64})),
    "other norms": evidence(record(norms={"ends": 0.25, "stage-0": 0.26})),
    "other members": evidence(record(absent=(B,)), signers=ROSTER.peers),
    "another term": evidence(record(term=2)),
    "no majority": evidence(record(lineage=1)),
    "no rows": evidence(record()).model_copy(update={"rows": {}}),
}


@pytest.mark.parametrize("term", [0, 1])
@pytest.mark.parametrize("told", UNPROVEN.values(), ids=UNPROVEN)
async def test_member_accepts_no_record_that_others_have_not_signed_that_they_computed(
    told: RecordEvidence, term: int
) -> None:
    """In its own term neither, and whatever the member has computed itself."""
    bench = await brought_to("apply")
    with pytest.raises(Busy, match="have not signed that they computed|are not what it reported"):
        await bench.ask(Propose(record=record(), evidence=told, term=term))
    assert (bench.position.open.ballot.vote, bench.position.open.conduct.vetoed_in) == (None, term)
    await bench.ask(Propose(record=record(), term=term))


async def test_member_keeps_no_signatures_of_who_does_not_take_part() -> None:
    bench, told = await brought_to("apply"), evidence(record())
    more = told.model_copy(update={"results": told.results | {"X": bytes(64)}})
    with pytest.raises(Violation, match="do not take part"):
        await bench.ask(Propose(record=record(), evidence=more))


WITHOUT_B: dict[str, Any] = {
    "absent": (B,),
    "roster": Roster([member for member in ROSTER.members if member.peer != B]).members,
    "committed": tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED),
}


def promised(
    term: int, accepted: CloseRecord, by: Collection[PeerId], free: int = 0, accepted_in: int = 0
) -> dict[str, SignedPromise]:
    """The promises of B and T to follow a term; those of ``by`` accepted the record in an earlier one."""
    vote = (accepted_in, accepted.hash())
    said: dict[PeerId, tuple[int, str] | None] = {peer: vote if peer in by else None for peer in (B, T)}
    step = (RUN, 1, GENESIS.hash())
    return {
        peer: SignedPromise(accepted=one, free=free, signature=sign(peer, promise_bytes(step, term, one, free)))
        for peer, one in said.items()
    }


@pytest.mark.parametrize("kind", ["ordinary", "void"])
async def test_member_that_hears_who_is_called_lost_accepts_it_only_where_it_may_be_decided(kind: str) -> None:
    """Who leads term 1 cannot show that by its own word, nor by promises of another term, nor forged ones, nor by
    leaving out the promise of the member itself, which has accepted nothing."""
    bench, closed, changes = MemberBench(), record(**WITHOUT_B), Changes(absent=(B,))
    if kind == "void":
        new = listed("N", "trainer", "ends")
        changes = Changes(joins=(admission(new, step=1, previous=GENESIS.hash()),), absent=(T,))
        following = Roster([*(member for member in ROSTER.members if member.peer != T), new])
        closed = given_up(GENESIS, GENESIS.hash(), 0, following, Changes(absent=(T,)), 8)
    leader = owner(ROSTER, 1, 1)
    (other,) = {B, T} - {leader} if leader in (B, T) else {T}
    both = (B, T)
    shown, forged = promised(1, closed, both), promised(1, closed, both)
    forged[other] = forged[other].model_copy(update={"signature": bytes(64)})
    none_of_these = [{}, *(promised(1, closed, [one]) for one in both), promised(2, closed, both)]
    none_of_these += [promised(1, closed, both, 1), promised(1, closed, both, accepted_in=1)]
    for untrue in [*none_of_these, forged]:
        with pytest.raises(Busy, match="is there, as far as is known here"):
            await bench.ask(Propose(record=closed, changes=changes, term=1, promises=untrue))
    await bench.ask(Propose(record=closed, changes=changes, term=1, promises=shown))


@pytest.mark.parametrize("stage", ["", "apply"])
async def test_member_that_is_left_out_votes_all_the_same_and_is_cut_off(stage: str) -> None:
    bench = await brought_to(stage) if stage else MemberBench()
    closed = record(**LEFT_OUT)
    await bench.ask(Propose(record=closed, changes=ABSENT))
    await bench.ask(decide(closed))
    assert bench.position.cut_off
    assert not bench.position.departed
    assert not bench.position.is_member
    # With the result it knows the newest state, and is out of the roster all the same.
    assert len(bench.part.swapped) == (1 if stage else 0)


async def test_member_refuses_a_record_of_an_earlier_term_from_a_leader_that_closes_the_step_anew() -> None:
    bench = MemberBench(A)
    for body in (prepare(term=1), reconcile(term=1), apply(term=1)):
        await bench.ask(body)
    with pytest.raises(Violation, match="closes the step anew"):
        await bench.ask(Propose(record=record(), term=1))
    await bench.ask(Propose(record=record(term=1), term=1))


async def test_member_accepts_nobody_lost_whom_the_record_does_not_name() -> None:
    bench = await brought_to("apply")
    for changes, fields in ((ABSENT, {}), (Changes(), {"absent": (A,)}), (ABSENT, {"absent": (A,)})):
        with pytest.raises(Refused):
            await bench.ask(Propose(record=record(**fields), changes=changes))


# --- hearing of it late ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["apply", "propose"])
async def test_member_that_learns_what_was_decided_swaps_when_it_holds_it(stage: str) -> None:
    bench = await brought_to(stage)
    for _ in range(2):
        await bench.member.learn(decided(record(), signers=[B, T]))
    assert (bench.part.swapped, bench.position.open_step) == ([record().digests["stage-0"]], 2)


async def test_member_that_learns_that_it_may_leave_has_left_and_one_that_was_lost_is_cut_off() -> None:
    """It voted for neither record, and so knows none of the requests."""
    granted, lost = record(roster=WITHOUT_A.members), record(roster=WITHOUT_A.members, absent=(A,))
    bench = await brought_to("apply")
    await bench.member.learn(decided(granted, signers=[B, T]))
    assert (bench.position.departed, bench.position.cut_off, len(bench.part.swapped)) == (True, "", 1)
    bench = await brought_to("apply")
    await bench.member.learn(decided(lost, signers=[B, T]))
    assert (bench.position.departed, bench.position.cut_off) == (False, "step 1 was closed without this peer")


@pytest.mark.parametrize("how", ["told", "learns", "founded"])
async def test_member_keeps_of_a_decision_the_signatures_of_those_who_take_part(how: str) -> None:
    """Of a founding record these are all whom it names."""
    kept: list[Decision] = []

    async def keep(closed: Decision) -> None:
        kept.append(closed)

    if how == "founded":
        bench, closed, signed = MemberBench(founded=False, decided=keep), GENESIS, acceptances(GENESIS)
        await bench.ask(Propose(record=GENESIS))
    else:
        bench, closed = await brought_to("propose", decided=keep), record()
        signed = acceptances(closed, signers=[B, T])
    junk = {"Ev1": bytes(64), "Ev2": sign(PeerId("Ev2"), acceptance_bytes(closed))}
    junk |= {} if how == "founded" else {A: bytes(64)}
    if how == "learns":
        await bench.member.learn(Decision(closed, signed | junk))
    else:
        await bench.ask(Decide(step=closed.step, record=closed.hash(), acceptances=signed | junk))
    assert [one.acceptances for one in kept] == [signed]


@pytest.mark.parametrize("stage", ["", "reconcile"])
async def test_member_that_learns_what_it_does_not_hold_is_cut_off(stage: str) -> None:
    bench = await brought_to(stage) if stage else MemberBench()
    await bench.member.learn(decided(record(term=3), term=3, signers=[B, T]))
    assert "without what this peer holds" in bench.position.cut_off
    assert (bench.part.swapped, bench.position.open_step) == ([], 1)


@pytest.mark.parametrize(
    "untrue",
    [
        decided(record(), signers=[B]),
        Decision(record(), acceptances(record(), term=1)),
        Decision(record(grad_norm=9.0), acceptances(record())),
        decided(record(previous="f" * 64)),
        decided(record(run="cd" * 32)),
    ],
    ids=["minority", "another term", "another record", "another chain", "another run"],
)
async def test_member_learns_nothing_that_was_not_decided(untrue: Decision) -> None:
    bench = await brought_to("propose")
    with pytest.raises(Refused):
        await bench.member.learn(untrue)
    assert (bench.part.swapped, bench.position.open_step, bench.position.cut_off) == ([], 1, "")
    await bench.ask(decide(record()))


def self_made(**changes: Any) -> Decision:
    """A record that commits nothing, and is accepted by all whom it names: a stranger."""
    evil = listed("Ev1", "bootstrap", None, name="x")
    forged = record(committed=(), tokens=0, loss_sum=0.0, cursors={}, roster=(evil,), **changes)
    return Decision(forged, acceptances(forged, signers=[PeerId("Ev1")]))


async def test_member_lets_nobody_found_the_run_again_in_its_middle() -> None:
    bench = await brought_to("propose")
    with pytest.raises(Refused, match="does not begin in its middle"):
        await bench.member.learn(self_made())
    assert (bench.history.head, bench.position.open_step, bench.position.cut_off) == (GENESIS, 1, "")


async def test_member_that_waits_for_the_first_record_learns_none_that_it_has_not_accepted() -> None:
    bench = MemberBench(founded=False)
    for forged in (self_made(step=0, previous=NO_RECORD), Decision(GENESIS, acceptances(GENESIS, signers=[B, T]))):
        with pytest.raises(Refused):
            await bench.member.learn(forged)
    assert (bench.position.head, bench.position.open_step) == (None, 0)


async def test_member_asked_about_a_step_that_closes_meanwhile_answers_for_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, gate = await brought_to("propose"), asyncio.Event()
    news = bench.position.news
    tell = news.tell

    async def slow() -> None:
        await gate.wait()
        await tell()

    monkeypatch.setattr(news, "tell", slow)
    late = [asyncio.create_task(bench.ask(body)) for body in (prepare(term=1), reconcile(term=2), apply(term=3))]
    await eventually(lambda: bench.position.term == 3)
    monkeypatch.setattr(news, "tell", tell)
    await bench.ask(decide(record()))
    gate.set()
    promise, *others = await asyncio.gather(*late, return_exceptions=True)
    assert promise.vote.record == record()
    assert all(isinstance(error, WrongStep) for error in others)
    assert (bench.position.open_step, bench.position.term, len(bench.average.begun)) == (2, 0, 1)


async def test_member_that_learns_of_another_step_than_the_open_one_does_nothing() -> None:
    bench = await brought_to("propose")
    await bench.ask(decide(record()))
    await bench.member.learn(decided(record()))
    await bench.member.learn(decided(record(record(record()))))
    assert (bench.position.open_step, bench.position.cut_off) == (2, "")


async def test_member_that_averages_when_it_is_cut_off_stops_and_says_why() -> None:
    bench = MemberBench()
    bench.average.gate = asyncio.Event()
    asking = asyncio.create_task(bench.ask(reconcile()))
    await eventually(lambda: bench.average.begun)
    await bench.member.cut("B is steps ahead")
    with pytest.raises(Superseded):
        await asking
    assert (bench.position.cut_off, bench.average.cancelled) == ("B is steps ahead", 1)
    await bench.position.wait_open(2)
    await bench.position.wait_term(1, 0)
    await bench.member.learn(decided(record()))
    assert bench.position.open_step == 1


async def test_member_that_is_cut_off_swaps_to_nothing_while_it_gets_the_newer_state() -> None:
    bench = await brought_to("propose")
    await bench.member.cut("B is steps ahead")
    with pytest.raises(Busy, match="B is steps ahead"):
        await bench.ask(decide(record()))
    assert (bench.part.swapped, bench.history.head) == ([], GENESIS)


async def test_member_that_is_told_and_observes_at_once_does_one_after_the_other() -> None:
    begun: list[int] = []
    gate = asyncio.Event()

    async def slow(decision: Decision) -> None:
        begun.append(decision.record.step)
        await gate.wait()
        begun.append(-decision.record.step)

    bench = await brought_to("propose", decided=slow)
    two = record(record())
    telling = asyncio.create_task(bench.ask(decide(record())))
    await eventually(lambda: begun)
    observing = asyncio.create_task(bench.member.observe(decided(two)))
    for _ in range(8):
        await asyncio.sleep(0)
    assert (begun, bench.history.head) == ([1], record())
    gate.set()
    await asyncio.gather(telling, observing)
    assert begun == [1, -1, 2, -2]
    assert (bench.position.open_step, bench.history.head) == (3, two)


async def test_member_that_was_cut_off_takes_part_again_from_the_state_that_it_got() -> None:
    bench = MemberBench()
    await bench.member.cut("B is steps ahead")
    later = record(record(record()))
    await bench.member.observe(decided(later))
    assert (bench.position.cut_off, bench.position.open_step, bench.history.head) == ("", 4, later)
    assert bench.position.is_member
    with pytest.raises(WrongStep, match="step 1 is closed"):
        await bench.ask(reconcile())


async def test_member_that_gets_the_state_it_had_forgets_no_vote() -> None:
    bench = await brought_to("propose")
    await bench.ask(prepare(term=1))
    await bench.member.cut("B is steps ahead")
    await bench.member.observe(decided(GENESIS))
    assert (bench.position.open_step, bench.position.term) == (1, 1)
    promise = await bench.ask(prepare(term=2))
    assert promise.vote.record == record()


async def test_over_is_believed_only_when_the_same_is_seen_here() -> None:
    bench = MemberBench()
    over = Over(step=1, term=0, part="ends")
    with pytest.raises(Refused, match="as far as is known here"):
        await bench.ask(over)
    bench.gone[T] = "it does not answer"
    await bench.ask(over)
    with pytest.raises(RunEnded, match=r"last replica of ends is lost: t \(it does not answer\)"):
        await bench.position.wait_open(2)


async def test_over_is_not_believed_by_one_that_sees_no_majority() -> None:
    bench = MemberBench()
    bench.gone |= {B: "it does not answer", T: "it does not answer"}
    with pytest.raises(Refused, match="a minority does not end a run"):
        await bench.ask(Over(step=1, term=0, part="ends"))
    bench.ended.add(B)  # its machine refuses: it was told before
    await bench.ask(Over(step=1, term=0, part="ends"))
    with pytest.raises(RunEnded, match="last replica of ends is lost"):
        await bench.position.wait_open(2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"committed": COMMITTED}, "a replica that it says was lost"),
        ({"committed": BY_B[:1]}, "1 microbatches"),
        ({"digests": {"stage-0": "00" * 32}}, "not those of the run's parts"),
        ({"lr": 0.25}, "whose rate is 0.5"),
    ],
)
async def test_member_that_votes_without_a_result_refuses_what_no_step_can_give(
    fields: dict[str, Any], words: str
) -> None:
    bench = MemberBench(A)
    sums = {"tokens": 10, "loss_sum": 1.5} if len(fields.get("committed", BY_B)) == 1 else {}
    closed = record(**LEFT_OUT | fields | sums)
    with pytest.raises((Refused, Violation), match=words):
        await bench.ask(Propose(record=closed, changes=ABSENT))
    await bench.ask(Propose(record=record(**LEFT_OUT), changes=ABSENT))


async def test_attempts_beyond_a_leaders_own_term_are_refused() -> None:
    bench = MemberBench()
    huge = reconcile(term=0).model_copy(update={"attempts": {"ends": 1 << 52, "stage-0": 1 << 52}})
    with pytest.raises(Violation, match="attempts at rounds"):
        await bench.ask(huge)
    for term in range(1, 4):
        await bench.ask(prepare(term=term))
        numbers = {part: term * ATTEMPTS_PER_TERM + 1 for part in ("ends", "stage-0")}
        await bench.ask(reconcile(term=term).model_copy(update={"attempts": numbers}))
