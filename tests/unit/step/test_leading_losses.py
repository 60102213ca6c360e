"""Leading a step while members die, stall, say no or hold something else."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from swarm.consensus.roster import Roster
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Superseded, Unreachable
from swarm.events import AttemptFailed, WorkExcluded, WorkWithdrawn
from swarm.ids import PeerId
from swarm.step.leader import tables
from swarm.step.leader.answers import MAX_VOID
from swarm.step.leader.exclusion import MAX_FAILURES
from swarm.step.messages import AGAIN, APPLY, DECIDE, PROPOSE, RECONCILE
from tests.harness.expect import eventually
from tests.harness.rigs.step import (
    COMMITTED,
    HOSTED,
    LEADER,
    OTHER,
    PAIRED,
    ROSTER,
    A,
    B,
    Stage,
    T,
    U,
    broken,
    by,
    listed,
    no,
    stage,
)

# --- a member is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [RECONCILE, APPLY])
@pytest.mark.parametrize("how", ["die", "stall"])
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
    assert second.attempts["ends"] == first.attempts["ends"]  # those not concerned keep its result
    assert here.puppets[OTHER].asked.count(question) == 1
    assert not here.puppets[OTHER].told(DECIDE)


@pytest.mark.parametrize("how", ["die", "stall"])
async def test_member_that_is_lost_while_it_votes_is_not_needed(how: str) -> None:
    here = await stage()
    here.puppets[OTHER].instead[PROPOSE] = getattr(here, how)(OTHER)
    closed = await here.leading().run()
    assert closed.absent == ()
    assert here.asked(DECIDE) >= {LEADER, T}
    assert here.events.of(AttemptFailed) == []


@pytest.mark.parametrize("turns", range(12))
async def test_trainer_found_gone_as_the_batch_is_full_is_counted_on_or_does_not_count(turns: int) -> None:
    here = await Stage(roster=PAIRED).set()
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


async def test_trainer_is_told_to_feed_until_it_hears_it() -> None:
    here = await Stage(roster=PAIRED).set()
    here.puppets[T].instead[AGAIN] = no(Unreachable("the stream broke"), times=3)
    here.liveness.lose(U)
    running = asyncio.create_task(here.leading().run())
    await eventually(lambda: len(here.puppets[T].told(AGAIN)) == 4)
    await here.feed([by(T, 0), by(T, 1)])
    assert (await running).absent == (U,)
    assert len(here.puppets[T].told(AGAIN)) == 4


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
    await eventually(lambda: not here.lead.book.full and here.puppets[T].told(AGAIN))
    await here.feed([by(T, 1)])
    closed = await running
    assert [one.microbatch for one in closed.committed] == [by(T, 0).microbatch, by(T, 1).microbatch]
    (excluded,) = here.events.of(WorkExcluded)
    assert (excluded.step, excluded.microbatches) == (1, (by(U, 0).microbatch,))
    assert excluded.reason.startswith(A)
    assert closed.absent == (U,)  # and A, which could not compute it either, is not


# --- a member is unfit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [RECONCILE, APPLY])
@pytest.mark.parametrize("error", [Refused("not with me"), DeadlineMissed("too slow"), PeerError("its disk is full")])
async def test_member_that_answers_pings_and_says_no_is_left_out(question: str, error: PeerError) -> None:
    here = await stage()
    here.puppets[OTHER].instead[question] = no(error)
    closed = await here.leading().run()
    assert closed.absent == (OTHER,)
    assert here.puppets[OTHER].asked.count(question) == 1
    assert OTHER in {peer for check in here.liveness.checked for peer in check}


@pytest.mark.parametrize("error", [Busy("catching up"), Unreachable("the stream broke")])
@pytest.mark.parametrize("question", [RECONCILE, APPLY])
async def test_member_that_fails_once_or_twice_takes_part(question: str, error: PeerError) -> None:
    for times in range(1, MAX_FAILURES + 1):
        here = await stage()
        here.puppets[OTHER].instead[question] = no(error, times=times)
        closed = await here.leading().run()
        assert closed.absent == ((OTHER,) if times == MAX_FAILURES else ())
        assert len(here.events.of(AttemptFailed)) == times
        assert len({tuple(body.attempts.items()) for body in here.puppets[T].told(RECONCILE)}) == 1 + bool(
            closed.absent
        )


async def test_member_that_does_not_hold_what_counts_is_left_out() -> None:
    here = await stage()
    here.puppets[OTHER].instead[RECONCILE] = broken(OTHER, missing=(COMMITTED[0].microbatch,))
    closed = await here.leading().run()
    assert (closed.absent, len(closed.committed)) == ((OTHER,), 2)


async def test_rounds_that_nobody_explains_go_plainly_are_told_and_end_with_the_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "ATTEMPTS_PER_TERM", 64)
    here = await stage()
    for peer in (A, B):
        here.puppets[peer].instead[RECONCILE] = broken(None)
    with pytest.raises(Superseded, match="attempts"):
        await here.leading().run()
    asked = here.puppets[A].told(RECONCILE)
    assert [body.plainly for body in asked[:4]] == [()] * MAX_VOID + [("stage-0",)]
    assert max(body.attempts["stage-0"] for body in asked) < 64
    assert any("a round of stage-0 that does not break" in waited for waited in here.waited)


async def test_liar_does_not_get_the_honest_members_of_its_part_left_out() -> None:
    more = [listed(peer, name="n") for peer in ("C", "D")]
    here = await stage(roster=Roster([*ROSTER.members, *more]))
    liar, honest = PeerId("D"), (A, B, PeerId("C"))
    for peer in honest:
        here.puppets[peer].instead[RECONCILE] = lambda body: broken(None)(body) if liar in body.live else None
    victims = itertools.cycle(honest)
    here.puppets[liar].instead[RECONCILE] = lambda body: broken(next(victims))(body)
    assert (await here.leading().run()).absent == (liar,)
