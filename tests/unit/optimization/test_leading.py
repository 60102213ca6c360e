"""Leading a step whose members disagree, refuse, die and stall, and in which others lead as well."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest

from swarm.errors import (
    Busy,
    DeadlineMissed,
    OutOfSync,
    PeerError,
    Refused,
    RunEnded,
    Superseded,
    Unreachable,
    Violation,
    WrongStep,
)
from swarm.events import AttemptFailed, Committed, DigestMismatch, TermBegan, WorkExcluded, WorkWithdrawn
from swarm.ids import MicrobatchId, PeerId
from swarm.optimization.acceptor import Candidate, Vote
from swarm.optimization.attempts import ATTEMPTS_PER_TERM, MOST_TIES, TIED_S
from swarm.optimization.blame import MOST_VOID
from swarm.optimization.filling import ALONE_S, LOST_PART_S
from swarm.optimization.fitness import MOST_FAILURES
from swarm.optimization.messages import Accepted, Averaged, Lease, Promise, PutAside, Reconcile, Resume
from swarm.optimization.records import Aside, Contribution, acceptance_bytes, voters
from swarm.optimization.rescuing import AGAIN_S, SILENT_PART_S
from swarm.optimization.roster import Member, Roster
from swarm.optimization.standstill import STALLED_S
from swarm.pipeline.verdicts import Health
from tests.harness.expect import eventually
from tests.unit.optimization.puppets import (
    AGAIN,
    APPLY,
    DECIDE,
    LEADER,
    PREPARE,
    PROPOSE,
    QUESTIONS,
    RECONCILE,
    SUCCESSOR,
    Puppet,
    Stage,
    broken,
    no,
    silence,
    virtual,
)
from tests.unit.optimization.world import COMMITTED, CURSOR, ROSTER, A, B, T, acceptances, record, verify

OTHER = next(peer for peer in (A, B) if peer != LEADER)
U = PeerId("U")
HOSTED = Roster(
    [
        Member(peer=peer, role=role, name="n", part=part, addresses=())  # type: ignore[arg-type]
        for peer, role, part in [
            (A, "stage", "stage-0"),
            (B, "stage", "stage-0"),
            (T, "trainer", None),
            (U, "trainer", None),
        ]
    ]
)


THREE = Roster([*ROSTER.members, Member(peer="C", role="stage", name="c", part="stage-0", addresses=())])
"""A part with a replica more: two of them can be right."""


async def stage(**settings: Any) -> Stage:
    made = await Stage(**settings).set()
    await made.feed()
    return made


def by(trainer: PeerId, position: int, host: PeerId = A) -> Contribution:
    microbatch = MicrobatchId(trainer, "00" * 8, 0, position)
    return Contribution(microbatch=microbatch, tokens=10, loss_sum=1.5, route=(host,))


# --- all well --------------------------------------------------------------------------------------------------------


@virtual
async def test_step_that_all_agree_on_is_decided_by_all_the_leader_last() -> None:
    here = await stage()
    order: list[PeerId] = []
    for peer, puppet in here.puppets.items():
        puppet.instead[DECIDE] = lambda body, peer=peer: order.append(peer)
    leading = here.leading()
    closed = await leading.run()
    assert closed.grad_norm == pytest.approx(6**0.5)
    assert (closed.tokens, closed.loss_sum, closed.cursors) == (21, 3.0, {T: CURSOR})
    assert closed.digests == {"ends": "d" * 64, "stage-0": "c" * 64}
    assert (closed.term, closed.absent, closed.members.peers) == (0, (), ROSTER.peers)
    assert all(puppet.asked == list(QUESTIONS) for puppet in here.puppets.values())
    assert order[-1] == LEADER
    assert (leading.decided, leading.told) == (closed, set(ROSTER.peers) - {LEADER})
    assert [type(event) for event in here.events.events] == [Committed]
    for decision in here.puppets[OTHER].told(DECIDE):
        signed = acceptance_bytes(closed)
        assert all(verify(peer, signed, decision.acceptances[peer]) for peer in ROSTER.peers)


@virtual
async def test_step_of_more_members_than_voters_is_told_to_all_and_decided_by_the_voters() -> None:
    many = Roster(
        [
            *ROSTER.members,
            *(Member(peer=f"Z{n}", role="bootstrap", name="z", part=None, addresses=()) for n in range(11)),
        ]
    )
    here = await stage(roster=many)
    deciding = voters(many, here.genesis.hash())
    for peer in set(many.peers) - set(deciding) - {here.leader}:
        here.puppets[peer].instead[PROPOSE] = no(Refused("it has no vote, and does not count"))
    closed = await here.leading().run()
    assert here.asked(PROPOSE) == here.asked(DECIDE) == set(many.peers)
    (decision,) = here.puppets[T].told(DECIDE)
    assert len(deciding) == 11
    assert set(decision.acceptances) >= set(deciding)
    assert closed.members.peers == many.peers


@virtual
async def test_leader_whose_own_close_is_slow_has_decided_all_the_same() -> None:
    here = await stage()
    closed = asyncio.Event()

    async def slow(body: Any) -> None:
        await asyncio.sleep(10)  # its swap, its disk and its snapshot take longer than an answer may
        closed.set()

    here.puppets[here.leader].instead[DECIDE] = slow
    leading = here.leading()
    assert await leading.run() == leading.decided
    assert here.asked(DECIDE) == set(ROSTER.peers)
    assert not closed.is_set()


# --- disagreement ----------------------------------------------------------------------------------------------------


TIES = pytest.mark.parametrize(
    ("what", "words"), [("gradient", "the averaged gradient"), ("weights", "the updated weights")]
)


def lie(puppet: Puppet, what: str, *, times: int) -> None:
    """So often it tells of other numbers than it should, each time of the same."""
    usual, left = getattr(puppet, what), iter(range(times))

    def answer(body: Any) -> None:
        setattr(puppet, what, usual if next(left, None) is None else "e" * 64)

    puppet.instead[RECONCILE if what == "gradient" else APPLY] = answer


@TIES
@virtual
async def test_part_whose_replicas_differ_one_to_one_is_averaged_anew_until_they_agree(what: str, words: str) -> None:
    here = await stage()
    lie(here.puppets[B], what, times=1)
    closed = await here.leading().run()
    assert (closed.absent, closed.digests) == ((), {"ends": "d" * 64, "stage-0": "c" * 64})
    (mismatch,), (failed,) = here.events.of(DigestMismatch), here.events.of(AttemptFailed)
    assert (mismatch.part, set(mismatch.digests), mismatch.digests[B]) == ("stage-0", {A, B}, "e" * 64)
    assert f"disagree about {words}" in failed.reason
    first, second = here.puppets[A].told(RECONCILE)
    assert second.attempts["stage-0"] > first.attempts["stage-0"]  # else it would repeat what it had answered
    assert second.attempts["ends"] == first.attempts["ends"]
    assert any(said.startswith("a and b to agree on stage-0") for said in here.waited)
    assert here.waited[-1] == ""


@TIES
@pytest.mark.parametrize("back", [True, False])
@virtual
async def test_tie_that_repeats_is_tried_now_and_then_and_ends_when_who_is_there_changes(
    back: bool, what: str, words: str
) -> None:
    voter = Member(peer="Z", role="bootstrap", name="z", part=None, addresses=())
    here, third = await stage(roster=Roster([*THREE.members, voter])), PeerId("C")
    here.liveness.lose(third, "cut off")
    liar = next(peer for peer in (A, B) if peer != here.leader)
    lie(here.puppets[liar], what, times=1_000)
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * TIED_S)
    assert MOST_TIES < len(here.events.of(DigestMismatch)) <= MOST_TIES + 10
    assert not here.asked(PROPOSE)
    assert words in here.events.of(AttemptFailed)[-1].reason
    before = asyncio.get_running_loop().time()
    if back:
        here.liveness.find(third)
    else:
        here.liveness.lose(liar, "its machine was ended")
    closed = await running
    assert asyncio.get_running_loop().time() - before < TIED_S / 2
    assert set(closed.absent) == ({liar} if back else {liar, third})
    assert closed.digests["stage-0"] == "c" * 64


@pytest.mark.parametrize(("what", "method"), [("gradient", RECONCILE), ("weights", APPLY)])
@pytest.mark.parametrize("value", ["e" * 64, ""])
@virtual
async def test_replica_that_differs_from_the_others_is_reported_and_left_out(
    what: str, method: str, value: str
) -> None:
    here = await stage(roster=THREE)
    setattr(here.puppets[B], what, value)
    leading = here.leading()
    closed = await leading.run()
    (mismatch,) = here.events.of(DigestMismatch)
    assert (mismatch.part, mismatch.digests[B]) == ("stage-0", value)
    (failed,) = here.events.of(AttemptFailed)
    assert "disagree" in failed.reason
    assert (closed.absent, closed.digests) == ((B,), {"ends": "d" * 64, "stage-0": "c" * 64})
    assert B not in closed.members
    assert len(here.puppets[B].told(method)) == 1
    assert all(B not in body.live for body in here.puppets[A].told(RECONCILE)[1:])


@virtual
async def test_leader_that_differs_from_the_others_leaves_itself_out_and_lives() -> None:
    leads = THREE.succession(1)[0]
    here = await stage(roster=THREE)
    here.puppets[leads].weights = "e" * 64
    closed = await here.leading().run()
    assert here.events.of(DigestMismatch)
    assert closed.absent == (leads,)


@pytest.mark.parametrize("claim", [1e308, math.inf])
@virtual
async def test_member_that_claims_a_norm_that_no_gradient_has_is_left_out(claim: float) -> None:
    """Of two parts it would make the norm of the model no number, and no leader could close the step."""
    here = await stage()
    here.puppets[OTHER].instead[RECONCILE] = lambda body: Averaged.model_construct(
        digest="a" * 64, sq_norm=claim, cursor=None, failure="", missing=(), heard={}
    )
    closed = await here.leading().run()
    assert (closed.absent, closed.grad_norm) == ((OTHER,), pytest.approx(6**0.5))


# --- a member is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [RECONCILE, APPLY])
@pytest.mark.parametrize("how", ["die", "stall"])
@virtual
async def test_member_that_is_lost_before_the_record_costs_an_attempt_and_is_left_out(question: str, how: str) -> None:
    here = await stage()
    here.puppets[OTHER].instead[question] = getattr(here, how)(OTHER)
    closed = await here.leading().run()
    assert (closed.absent, closed.members.peers) == ((OTHER,), tuple(p for p in ROSTER.peers if p != OTHER))
    assert [one.route for one in closed.committed] == [(LEADER,), (LEADER,)]
    assert [one.microbatch for one in closed.committed] == [one.microbatch for one in COMMITTED]
    assert len(here.events.of(AttemptFailed)) == 1
    first, second = here.puppets[T].told(RECONCILE)
    assert set(second.live) == {LEADER, T}
    assert second.attempts["stage-0"] > first.attempts["stage-0"]
    assert second.attempts["ends"] == first.attempts["ends"]  # whoever was not concerned keeps its result
    assert here.puppets[OTHER].asked.count(question) == 1
    assert not here.puppets[OTHER].told(DECIDE)


@pytest.mark.parametrize("how", ["die", "stall"])
@virtual
async def test_member_that_is_lost_while_it_votes_is_not_needed(how: str) -> None:
    here = await stage()
    here.puppets[OTHER].instead[PROPOSE] = getattr(here, how)(OTHER)
    closed = await here.leading().run()
    assert closed.absent == ()
    assert here.asked(DECIDE) >= {LEADER, T}
    assert here.events.of(AttemptFailed) == []


@pytest.mark.parametrize("how", ["die", "stall", "no"])
@virtual
async def test_member_that_cannot_be_told_does_not_hold_up_the_others(how: str) -> None:
    here = await stage()
    answer = no(PeerError("the disk is full")) if how == "no" else getattr(here, how)(OTHER)
    here.puppets[OTHER].instead[DECIDE] = answer
    leading = here.leading()
    closed = await leading.run()
    assert (closed.absent, leading.told) == ((), {T})
    assert here.asked(DECIDE) == set(ROSTER.peers)


@virtual
async def test_trainer_that_is_lost_takes_its_work_with_it_and_the_others_are_told_to_feed() -> None:
    trainers = [Member(peer=peer, role="trainer", name="t", part="ends", addresses=()) for peer in (T, U)]
    here = await Stage(roster=Roster([*ROSTER.members[:2], *trainers])).set()
    await here.feed([by(T, 0), by(U, 0)])
    here.puppets[U].instead[APPLY] = here.die(U)
    running = asyncio.create_task(here.leading().run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    assert here.events.of(WorkWithdrawn) == [WorkWithdrawn(step=1, trainers=(U,))]
    assert not running.done()
    await here.feed([by(T, 1)])
    closed = await running
    assert [one.microbatch for one in closed.committed] == [by(T, 0).microbatch, by(T, 1).microbatch]
    assert closed.absent == (U,)


@pytest.mark.parametrize("turns", range(12))
@virtual
async def test_trainer_found_gone_as_the_batch_is_full_is_counted_on_or_does_not_count(turns: int) -> None:
    trainers = [Member(peer=peer, role="trainer", name="t", part="ends", addresses=()) for peer in (T, U)]
    here = await Stage(roster=Roster([*ROSTER.members[:2], *trainers])).set()
    running = asyncio.create_task(here.leading().run())
    await here.feed([by(T, 0), by(U, 0)])
    for _ in range(turns):
        await asyncio.sleep(0)
    here.liveness.lose(U)
    await eventually(lambda: running.done() or here.events.of(WorkWithdrawn))
    if here.events.of(WorkWithdrawn):
        await here.feed([by(T, 1)])
    await running
    asked = here.puppets[T].told(RECONCILE)
    assert asked
    for body in asked:
        assert {one.microbatch.trainer for one in body.committed} <= set(body.live)


@virtual
async def test_trainer_is_told_to_feed_until_it_hears_it() -> None:
    trainers = [Member(peer=peer, role="trainer", name="t", part="ends", addresses=()) for peer in (T, U)]
    here = await Stage(roster=Roster([*ROSTER.members[:2], *trainers])).set()
    here.puppets[T].instead[AGAIN] = no(Unreachable("the stream broke"), times=3)
    here.liveness.lose(U)
    running = asyncio.create_task(here.leading().run())
    await eventually(lambda: len(here.puppets[T].told(AGAIN)) == 4)
    await here.feed([by(T, 0), by(T, 1)])
    assert (await running).absent == (U,)
    assert len(here.puppets[T].told(AGAIN)) == 4


@virtual
async def test_work_lost_for_good_is_left_out_and_others_are_told_to_fill_the_batch() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(T, 0), by(U, 0)])
    here.liveness.lose(U, "dead")
    lost = broken(A, missing=(by(U, 0).microbatch,))

    def answer(body: Any) -> Any:
        if here.puppets[A].asked.count(RECONCILE) > 1:
            return None
        here.puppets[T].bodies.clear()
        return lost(body)

    here.puppets[A].instead[RECONCILE] = answer
    running = asyncio.create_task(here.leading().run())
    await eventually(lambda: here.puppets[A].told(RECONCILE))
    await eventually(lambda: not here.desk.full and here.puppets[T].told(AGAIN))
    await here.feed([by(T, 1)])
    closed = await running
    assert [one.microbatch for one in closed.committed] == [by(T, 0).microbatch, by(T, 1).microbatch]
    (excluded,) = here.events.of(WorkExcluded)
    assert (excluded.step, excluded.microbatches) == (1, (by(U, 0).microbatch,))
    assert excluded.reason.startswith(A)
    assert closed.absent == (U,)  # and A, which could not compute it either, is not


@virtual
async def test_work_of_a_trainer_that_is_left_out_can_be_lost_for_good_too() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(U, 0)])
    await here.ask_desk(Lease(step=1, term=0, total=2), U)  # and nothing comes of it
    here.puppets[A].instead[RECONCILE] = broken(A, missing=(by(U, 0).microbatch,))
    running = asyncio.create_task(here.leading().run())
    await eventually(lambda: here.events.of(WorkWithdrawn), deadline_s=2 * STALLED_S)
    await here.feed([by(T, 0)])
    await eventually(lambda: here.events.of(WorkExcluded))
    here.puppets[A].instead.clear()
    await here.feed([by(T, 1)])
    closed = await running
    assert [one.microbatch for one in closed.committed] == [by(T, 0).microbatch, by(T, 1).microbatch]
    assert closed.absent == (U,)  # and A, which could not compute it either, is not


# --- a member is unfit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [RECONCILE, APPLY])
@pytest.mark.parametrize("error", [Refused("not with me"), DeadlineMissed("too slow"), PeerError("its disk is full")])
@virtual
async def test_member_that_answers_pings_and_says_no_is_left_out(question: str, error: PeerError) -> None:
    here = await stage()
    here.puppets[OTHER].instead[question] = no(error)
    closed = await here.leading().run()
    assert closed.absent == (OTHER,)
    assert here.puppets[OTHER].asked.count(question) == 1
    assert OTHER in {peer for check in here.liveness.checked for peer in check}


@virtual
async def test_member_that_never_answers_a_question_and_all_pings_is_left_out() -> None:
    here = await stage()
    here.puppets[OTHER].instead[APPLY] = silence
    assert (await here.leading().run()).absent == (OTHER,)


@pytest.mark.parametrize("error", [Busy("catching up"), Unreachable("the stream broke")])
@pytest.mark.parametrize("question", [RECONCILE, APPLY])
@virtual
async def test_member_that_fails_once_or_twice_takes_part(question: str, error: PeerError) -> None:
    for times in range(1, MOST_FAILURES + 1):
        here = await stage()
        here.puppets[OTHER].instead[question] = no(error, times=times)
        closed = await here.leading().run()
        assert closed.absent == ((OTHER,) if times == MOST_FAILURES else ())
        assert len(here.events.of(AttemptFailed)) == times
        assert len({tuple(body.attempts.items()) for body in here.puppets[T].told(RECONCILE)}) == 1 + bool(
            closed.absent
        )


@virtual
async def test_member_that_does_not_hold_what_counts_is_left_out() -> None:
    here = await stage()
    here.puppets[OTHER].instead[RECONCILE] = broken(OTHER, missing=(COMMITTED[0].microbatch,))
    closed = await here.leading().run()
    assert (closed.absent, len(closed.committed)) == ((OTHER,), 2)


@virtual
async def test_member_that_lacked_something_while_another_died_takes_part() -> None:
    here = await stage()
    lacks, left = broken(OTHER, missing=(COMMITTED[0].microbatch,)), iter(range(MOST_FAILURES - 1))
    here.puppets[OTHER].instead[RECONCILE] = lambda body: None if next(left, None) is None else lacks(body)
    closed = await here.leading().run()
    assert (closed.absent, len(here.events.of(AttemptFailed))) == ((), MOST_FAILURES - 1)


@virtual
async def test_member_with_which_rounds_break_again_and_again_is_left_out() -> None:
    here = await stage()
    here.puppets[LEADER].instead[RECONCILE] = lambda body: broken(OTHER)(body) if OTHER in body.live else None
    closed = await here.leading().run()
    assert closed.absent == (OTHER,)
    numbers = [body.attempts["stage-0"] for body in here.puppets[LEADER].told(RECONCILE)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4
    assert len({body.attempts["ends"] for body in here.puppets[T].told(RECONCILE)}) == 1


@virtual
async def test_round_that_broke_on_nobody_is_repeated_with_all() -> None:
    here = await stage()
    void, left = broken(None), iter(range(2))
    here.puppets[OTHER].instead[RECONCILE] = lambda body: None if next(left, None) is None else void(body)
    closed = await here.leading().run()
    assert (closed.absent, len(here.events.of(AttemptFailed))) == ((), 2)


@virtual
async def test_rounds_that_nobody_explains_go_plainly_are_told_and_end_with_the_term() -> None:
    here = await stage()
    for peer in (A, B):
        here.puppets[peer].instead[RECONCILE] = broken(None)
    with pytest.raises(Superseded, match="attempts"):
        await here.leading().run()
    asked = here.puppets[A].told(RECONCILE)
    assert [body.plainly for body in asked[:4]] == [()] * MOST_VOID + [("stage-0",)]
    assert max(body.attempts["stage-0"] for body in asked) < ATTEMPTS_PER_TERM
    assert any("a round of stage-0 that does not break" in waited for waited in here.waited)


@virtual
async def test_liar_does_not_get_the_honest_members_of_its_part_left_out() -> None:
    more = [Member(peer=peer, role="stage", name="n", part="stage-0", addresses=()) for peer in ("C", "D")]
    here = await stage(roster=Roster([*ROSTER.members, *more]))
    liar, honest = PeerId("D"), (A, B, PeerId("C"))
    for peer in honest:
        here.puppets[peer].instead[RECONCILE] = lambda body: broken(None)(body) if liar in body.live else None
    victims = itertools.cycle(honest)
    here.puppets[liar].instead[RECONCILE] = lambda body: broken(next(victims))(body)
    assert (await here.leading().run()).absent == (liar,)


# --- no majority, or a part is lost -----------------------------------------------------------------------------------


@virtual
async def test_leader_without_a_majority_waits_says_so_and_goes_on_when_it_is_back() -> None:
    here = await stage()
    for peer in (OTHER, T):
        here.puppets[peer].instead[PROPOSE] = no(Unreachable("cut off"), times=20)
    closed = await here.leading().run()
    assert "a majority: 1 of 3 voters answer, 2 are needed, however long that takes" in here.waited
    assert here.waited[-1] == ""
    assert closed.absent == ()
    assert here.puppets[LEADER].asked.count(PROPOSE) == 1


def cut_off(here: Stage, peer: PeerId) -> None:
    """It cannot be asked for its vote either."""
    here.puppets[peer].instead[PREPARE] = no(Unreachable("cut off"))


def heal(here: Stage, peer: PeerId) -> None:
    """It answers again, and is seen to."""
    del here.puppets[peer].instead[PREPARE]
    here.liveness.find(peer)


@pytest.mark.parametrize("fed", [True, False])
@virtual
async def test_leader_in_a_minority_judges_nobody_and_goes_on_when_the_others_are_back(fed: bool) -> None:
    here = await (stage() if fed else Stage().set())
    for peer in (OTHER, T):
        cut_off(here, peer)
        here.liveness.lose(peer, "cut off")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert set(here.waited) == {"a majority: 1 of 3 voters answer, 2 are needed, however long that takes"}
    assert here.events.events == []
    for peer in (OTHER, T):
        heal(here, peer)
    if not fed:
        await here.feed()
    assert (await running).absent == ()


@virtual
async def test_leader_whom_so_many_refuse_that_it_cannot_be_decided_says_why() -> None:
    here = await stage()
    for peer in (OTHER, T):
        here.puppets[peer].instead[PROPOSE] = no(Refused("another digest"))
    with pytest.raises(OutOfSync, match=f"step 1 cannot be decided: {min(OTHER, T)}: another digest"):
        await here.leading().run()
    assert not here.asked(DECIDE)


@pytest.mark.parametrize("fed", [True, False])
@virtual
async def test_part_that_stays_lost_ends_the_run_and_says_how_to_go_on(fed: bool) -> None:
    here = await (stage() if fed else Stage().set())
    here.liveness.lose(T, "it does not answer")
    with pytest.raises(RunEnded, match=r"last replica of ends is lost: t \(it does not answer\)") as ended:
        await here.leading().run()
    assert "swarm new --resume" in ended.value.remedy
    assert asyncio.get_running_loop().time() == pytest.approx(LOST_PART_S, abs=0.1)
    assert not here.asked(RECONCILE)


@virtual
async def test_part_that_fell_silent_is_waited_for_longer() -> None:
    here = await stage()
    verdict = Health()
    said = [verdict.missed(T, "deadline, no answer in 1.5 s", now) for now in (0.0, 1.0, 2.0)][-1]
    assert said is not None
    here.liveness.lose(T, said)
    with pytest.raises(RunEnded, match="last replica of ends is lost"):
        await here.leading().run()
    took = asyncio.get_running_loop().time()
    assert took == pytest.approx(LOST_PART_S + SILENT_PART_S, abs=2 * AGAIN_S)


@virtual
async def test_leader_that_lost_a_part_and_finds_itself_in_a_minority_does_not_end_the_run() -> None:
    """It had not noticed yet that the others are gone as well: nobody had asked them."""
    here = await stage()
    here.liveness.found = {OTHER}
    for peer in (OTHER, T):
        cut_off(here, peer)
    here.liveness.lose(T, "cut off")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert set(here.waited) == {"a majority: 1 of 3 voters answer, 2 are needed, however long that takes"}
    here.liveness.found = set()
    for peer in (OTHER, T):
        heal(here, peer)
    assert (await running).absent == ()


@virtual
async def test_part_that_comes_back_in_time_is_waited_for() -> None:
    here = await stage()
    here.liveness.lose(T, "stalled")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(LOST_PART_S / 2)
    assert here.waited == ["a replica of ends: t (stalled); nobody keeps a copy, and the run ends if none comes back"]
    here.liveness.find(T)
    assert (await running).absent == ()


@virtual
async def test_last_replica_of_a_part_that_is_late_is_asked_again_until_it_answers() -> None:
    here = await stage()
    here.liveness.lose(OTHER, "cut off")
    late = DeadlineMissed("no answer in 20 s", peer=LEADER)
    here.puppets[LEADER].instead[RECONCILE] = no(late, times=2 * MOST_FAILURES + 1)
    closed = await here.leading().run()
    assert (closed.absent, len(closed.committed)) == ((OTHER,), 2)
    assert len(here.events.of(AttemptFailed)) == 2 * MOST_FAILURES + 1


@pytest.mark.parametrize("times", [MOST_FAILURES, 3 * MOST_FAILURES])
@virtual
async def test_part_whose_replicas_are_all_late_is_asked_again_until_one_answers(times: int) -> None:
    here = await stage()
    for peer in (A, B):
        here.puppets[peer].instead[RECONCILE] = no(DeadlineMissed("no answer in 20 s", peer=peer), times=times)
    closed = await here.leading().run()
    assert len(closed.committed) == 2
    assert not any("ends" in said for said in here.waited)
    assert any("an answer, for which is asked again, of " in said for said in here.waited)


@pytest.mark.parametrize("error", [DeadlineMissed("no answer in 20 s", peer=T), PeerError("its disk is full")])
@virtual
async def test_only_trainer_is_asked_again_with_hosted_ends(error: PeerError) -> None:
    here = await stage(roster=Roster(member for member in HOSTED.members if member.peer != U))
    here.puppets[T].instead[RECONCILE] = no(error, times=MOST_FAILURES + 1)
    closed = await here.leading().run()
    assert (closed.absent, len(closed.committed)) == ((), 2)


@pytest.mark.parametrize("back", [True, False])
@virtual
async def test_replica_that_differs_decides_nothing_alone_before_others_had_time_to_come_back(back: bool) -> None:
    other_trainer = Member(peer=U, role="trainer", name="u", part="ends", addresses=())
    here = await stage(roster=Roster([*THREE.members, other_trainer]))  # so that a majority is there without two
    here.puppets[B].weights = "e" * 64

    def cut(body: Reconcile) -> None:
        if B not in body.live:
            for peer in (A, PeerId("C")):
                here.liveness.lose(peer, "cut off")
            raise Unreachable("cut off", peer=A)

    here.puppets[A].instead[RECONCILE] = cut
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert here.events.of(DigestMismatch)
    assert not here.asked(PROPOSE)
    assert "another replica beside b of stage-0, which holds other numbers than most did" in here.waited
    del here.puppets[A].instead[RECONCILE]
    if back:
        here.liveness.find(A)
    closed = await running
    assert (B in closed.absent, closed.digests["stage-0"]) == (back, "c" * 64 if back else "e" * 64)
    assert back or asyncio.get_running_loop().time() == pytest.approx(ALONE_S, abs=2 * LOST_PART_S)


@virtual
async def test_replica_that_differs_is_trusted_in_time_beside_one_that_only_answers_pings() -> None:
    """That the other is asked again and again does not make the part held."""
    other_trainer = Member(peer=U, role="trainer", name="u", part="ends", addresses=())
    here = await stage(roster=Roster([*THREE.members, other_trainer]))
    here.puppets[B].weights = "e" * 64

    def cut(body: Reconcile) -> None:
        if B not in body.live:
            here.liveness.lose(PeerId("C"), "cut off")
        if PeerId("C") not in body.live or B not in body.live:
            raise DeadlineMissed("no answer in 20 s", peer=A)

    here.puppets[A].instead[RECONCILE] = cut
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(2 * ALONE_S)
    assert running.done()
    assert running.result().digests["stage-0"] == "e" * 64


@virtual
async def test_part_whose_replicas_all_say_no_ends_the_run_at_once() -> None:
    here = await stage()
    here.puppets[T].instead[RECONCILE] = no(Refused("not with me"))
    with pytest.raises(RunEnded, match=r"last replica of ends is lost: t \(T: not with me\)"):
        await here.leading().run()


# --- later terms -----------------------------------------------------------------------------------------------------


async def successor() -> Stage:
    here = await Stage(leader=SUCCESSOR).set()
    here.liveness.lose(LEADER, "dead")
    return here


@virtual
async def test_successor_closes_the_step_anew_when_nobody_accepted_anything() -> None:
    here = await successor()
    running = asyncio.create_task(here.leading(1).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    assert (await here.ask_desk(Resume(step=1, term=1, started=(), aside=()), T)).kept == 0
    await here.feed(term=1)
    closed = await running
    assert (closed.term, closed.absent) == (1, (LEADER,))
    assert here.events.of(TermBegan) == [TermBegan(step=1, term=1, leader=SUCCESSOR, reason=f"{LEADER}: dead")]
    assert here.asked(PREPARE) == {SUCCESSOR, T}
    (asked,) = here.puppets[T].told(RECONCILE)
    assert (asked.term, min(asked.attempts.values()) > 1024) == (1, True)
    (decision,) = here.puppets[T].told(DECIDE)
    assert decision.term == 1


@pytest.mark.parametrize("voter", [SUCCESSOR, T])
@virtual
async def test_successor_proposes_what_a_member_accepted_and_computes_nothing_again(voter: PeerId) -> None:
    here = await successor()
    here.puppets[voter].instead[PREPARE] = lambda body: Promise(vote=Vote(term=0, record=record()), free=0)
    closed = await here.leading(1).run()
    assert closed == record()
    assert not here.asked(RECONCILE)
    assert {body.term for puppet in here.puppets.values() for body in puppet.told(PROPOSE)} == {1}
    (decision,) = here.puppets[T].told(DECIDE)
    assert (decision.record, decision.term) == (record().hash(), 1)


@virtual
async def test_successor_is_free_when_a_later_leader_was() -> None:
    here = await successor()
    here.puppets[SUCCESSOR].instead[PREPARE] = lambda body: Promise(vote=Vote(term=0, record=record()), free=0)
    here.puppets[T].instead[PREPARE] = lambda body: Promise(vote=None, free=2)
    running = asyncio.create_task(here.leading(4).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.ask_desk(Resume(step=1, term=4, started=(), aside=()), T)
    await here.feed(term=4)
    assert (await running).term == 4


BEYOND_NUMBERS = tuple(one.model_copy(update={"loss_sum": 1.7e308}) for one in COMMITTED)


@pytest.mark.parametrize(
    "lie",
    [
        Promise(vote=None, free=9),
        Promise(vote=Vote(term=8, record=record(previous="f" * 64)), free=0),
        Promise(vote=Vote(term=0, record=record(roster=ROSTER.members[1:])), free=0),
        Promise(vote=Vote(term=0, record=record(tokens=7)), free=0),
        Promise(vote=Vote(term=0, record=record(committed=BEYOND_NUMBERS)), free=0),
        Promise(vote=Vote(term=0, record=record(lr=9.0)), free=0),
        Promise(vote=Vote(term=0, record=record(digests={})), free=0),
        Promise(vote=Vote(term=0, record=record(void=True, committed=(), tokens=0, loss_sum=0.0)), free=0),
        Promise(vote=None, free=0, candidate=Candidate(vote=Vote(term=0, record=record(lineage=1)), samples=10**9)),
    ],
    ids=["free", "previous", "roster", "sums", "no sum", "rate", "digests", "void", "candidate"],
)
@virtual
async def test_promise_that_would_hide_what_was_accepted_counts_for_nothing(lie: Promise) -> None:
    here = await successor()
    here.puppets[SUCCESSOR].instead[PREPARE] = lambda body: Promise(vote=Vote(term=0, record=record()), free=0)
    lies = iter([lie])
    here.puppets[T].instead[PREPARE] = lambda body: next(lies, None)
    assert await here.leading(1).run() == record()
    assert len(here.puppets[T].told(PREPARE)) == 2
    assert not here.asked(RECONCILE)


@virtual
async def test_candidate_that_those_who_were_there_signed_is_proposed_where_nothing_was_accepted() -> None:
    here = await successor()
    alone = record(lineage=1)
    signed = acceptances(alone, 0, [A, T])
    offered = Candidate(vote=Vote(term=0, record=alone), samples=2, term=0, acceptances=signed)
    here.puppets[T].instead[PREPARE] = lambda body: Promise(vote=None, free=0, candidate=offered)
    assert await here.leading(1).run() == alone


@virtual
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


@virtual
async def test_trainer_that_missed_the_first_question_of_a_term_hears_of_it_all_the_same() -> None:
    many = Roster([*ROSTER.members, Member(peer="Z", role="bootstrap", name="z", part=None, addresses=())])
    leader = many.succession(1)[1]
    here = await Stage(roster=many, leader=leader).set()
    here.puppets[T].instead[PREPARE] = no(Unreachable("the stream broke"), times=2)
    running = asyncio.create_task(here.leading(1).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    assert len(here.puppets[T].told(PREPARE)) == 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("question", [PREPARE, RECONCILE, APPLY, PROPOSE])
@pytest.mark.parametrize("error", [Superseded("term 5 has begun"), WrongStep("step 1 is closed")])
@virtual
async def test_leader_gives_up_when_another_leads_or_has_closed(question: str, error: PeerError) -> None:
    here = await (stage() if question != PREPARE else successor())
    here.puppets[T].instead[question] = no(error)
    leading = here.leading(0 if question != PREPARE else 1)
    with pytest.raises(type(error), match=error.reason):
        await leading.run()
    assert leading.decided is None
    assert not here.asked(DECIDE)


@pytest.mark.parametrize("error", [Refused("F cannot leave"), Violation("forged")])
@virtual
async def test_leader_that_may_not_grant_what_it_was_asked_gives_up_its_term_alone(
    error: PeerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await stage()
    monkeypatch.setattr(here.desk, "settle", lambda missing, lost: no(error)(None))
    with pytest.raises(Superseded, match=f"cannot be granted: {error.reason}"):
        await here.leading().run()
    assert not here.asked(PROPOSE)


@virtual
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
    await here.ask_desk(Resume(step=1, term=1, started=(), aside=()), T)
    await here.feed(term=1)
    assert (await running).absent == ()


@virtual
async def test_leader_that_waits_for_the_batch_gives_up_when_another_leads() -> None:
    here = await successor()
    here.puppets[T].instead[AGAIN] = no(Superseded("term 5 has begun"))
    with pytest.raises(Superseded):
        await here.leading(1).run()


# --- trainers that come back -----------------------------------------------------------------------------------------


@virtual
async def test_trainer_that_is_back_resumes_and_is_counted_on_again() -> None:
    trainers = [Member(peer=peer, role="trainer", name="t", part="ends", addresses=()) for peer in (T, U)]
    here = await Stage(roster=Roster([*ROSTER.members[:2], *trainers])).set()
    await here.feed([by(U, 0)])
    running = asyncio.create_task(here.leading().run())
    here.liveness.lose(U, "stalled")
    await eventually(lambda: here.puppets[T].told(AGAIN))
    with pytest.raises(Superseded, match="resume"):
        await here.ask_desk(Lease(step=1, term=0, total=1), U)
    with pytest.raises(Busy, match="yet to count on it"):
        await here.ask_desk(Resume(step=1, term=0, started=(), aside=()), U)
    here.liveness.find(U)
    await eventually(lambda: here.puppets[U].told(AGAIN))
    with pytest.raises(Superseded, match="resume"):
        await here.ask_desk(Lease(step=1, term=0, total=2), U)
    with pytest.raises(Busy, match="1 trainers have yet to say"):
        await here.ask_desk(Lease(step=1, term=0, total=2), T)
    started = (by(U, 0).microbatch,)
    assert (await here.ask_desk(Resume(step=1, term=0, started=started, aside=()), U)).kept == 1
    await here.feed([by(U, 0), by(T, 0)])
    closed = await running
    assert (len(closed.committed), closed.absent) == (2, ())


@virtual
async def test_others_hear_of_the_quota_of_what_was_put_aside() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(T, 0)])
    await here.ask_desk(Lease(step=1, term=0, total=1), U)
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(1.0)
    aside = Aside(microbatch=by(U, 0).microbatch, reason="not a number")
    await here.ask_desk(PutAside(step=1, term=0, aside=aside), U)  # and U gets nothing else done
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.feed([by(T, 1)])
    assert (await running).absent == ()


@virtual
async def test_trainer_that_puts_all_its_work_aside_is_left_out() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(T, 0)])
    await here.ask_desk(Lease(step=1, term=0, total=1), U)
    running = asyncio.create_task(here.leading().run())
    for position in range(3):
        await asyncio.sleep(STALLED_S / 4)
        aside = Aside(microbatch=by(U, position).microbatch, reason="not a number")
        await here.ask_desk(PutAside(step=1, term=0, aside=aside), U)
        await here.ask_desk(Lease(step=1, term=0, total=position + 2), U)
    await eventually(lambda: here.events.of(WorkWithdrawn))
    await here.feed([by(T, 0), by(T, 1)])
    assert (await running).absent == (U,)


@virtual
async def test_batch_of_which_everything_is_put_aside_is_said_to_wait_for_what_can_be_computed() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    running = asyncio.create_task(here.leading().run())
    for trainer in (T, U):
        await here.ask_desk(Lease(step=1, term=0, total=1), trainer)
        aside = Aside(microbatch=by(trainer, 0).microbatch, reason="the loss is nan")
        await here.ask_desk(PutAside(step=1, term=0, aside=aside), trainer)
    await asyncio.sleep(2 * STALLED_S)
    said = "a microbatch that can be computed: 2 of this step were put aside, one of them as the loss is nan"
    assert here.waited == [said], "once, and nobody is left out for it"
    await here.feed([by(T, 1), by(U, 1)])
    assert (await running).absent == ()
    assert here.waited[:2] == [said, ""]


@virtual
async def test_trainer_that_never_says_what_it_has_begun_is_left_out() -> None:
    leader = HOSTED.succession(1)[1]
    here = await Stage(roster=HOSTED, leader=leader, hosted=True).set()
    running = asyncio.create_task(here.leading(1).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.ask_desk(Resume(step=1, term=1, started=(), aside=()), T)
    with pytest.raises(Busy, match="1 trainers have yet to say"):
        await here.ask_desk(Lease(step=1, term=1, total=1), T)
    await eventually(lambda: here.events.of(WorkWithdrawn), deadline_s=2 * STALLED_S)
    await here.feed([by(T, 0), by(T, 1)], term=1)
    assert (await running).absent == (U,)


def five(*more: str) -> Roster:
    hosts = [Member(peer=PeerId(peer), role="stage", name="n", part="stage-0", addresses=()) for peer in more]
    return Roster([*ROSTER.members, *hosts])


@virtual
async def test_step_closes_without_a_member_that_alone_says_void_and_not_why() -> None:
    here = await stage(roster=five("C", "D"))
    here.puppets[PeerId("D")].instead[RECONCILE] = broken(None)  # the others hold the result, and say so
    closed = await here.leading().run()
    assert closed.absent == ("D",)


@virtual
async def test_leader_says_how_long_it_waits() -> None:
    here = await stage()
    await here.leading().run()
    told = here.puppets[A].told(RECONCILE)
    assert told
    assert all(body.within_s == here.closing.timeout_s() for body in told)
