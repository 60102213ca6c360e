"""Leading a step whose trainers come back, put work aside, or say nothing."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from swarm.consensus.records import Quarantined
from swarm.consensus.roster import Member, Roster
from swarm.errors import Busy, Superseded
from swarm.events import AttemptFailed, WorkWithdrawn
from swarm.ids import PeerId
from swarm.step.leader.exclusion import STALLED_S
from swarm.step.messages import AGAIN, APPLY, RECONCILE, Lease, Quarantine, Reconcile, ResumeTrainer
from tests.harness.expect import eventually
from tests.harness.rigs.step import HOSTED, PAIRED, ROSTER, A, Stage, T, U, broken, by, stage


async def test_trainer_that_is_back_resumes_and_is_counted_on_again() -> None:
    here = await Stage(roster=PAIRED).set()
    await here.feed([by(U, 0)])
    running = asyncio.create_task(here.leading().run())
    here.liveness.lose(U, "stalled")
    await eventually(lambda: here.puppets[T].told(AGAIN))
    with pytest.raises(Superseded, match="resume"):
        await here.ask_lead(Lease(step=1, term=0, total=1), U)
    with pytest.raises(Busy, match="yet to count on it"):
        await here.ask_lead(ResumeTrainer(step=1, term=0, started=(), aside=()), U)
    here.liveness.find(U)
    await eventually(lambda: here.puppets[U].told(AGAIN))
    with pytest.raises(Superseded, match="resume"):
        await here.ask_lead(Lease(step=1, term=0, total=2), U)
    with pytest.raises(Busy, match="1 trainers have yet to say"):
        await here.ask_lead(Lease(step=1, term=0, total=2), T)
    started = (by(U, 0).microbatch,)
    assert (await here.ask_lead(ResumeTrainer(step=1, term=0, started=started, aside=()), U)).kept == 1
    await here.feed([by(U, 0), by(T, 0)])
    closed = await running
    assert (len(closed.committed), closed.absent) == (2, ())


async def test_others_hear_of_the_quota_of_what_was_put_aside() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(T, 0)])
    await here.ask_lead(Lease(step=1, term=0, total=1), U)
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(1.0)
    aside = Quarantined(microbatch=by(U, 0).microbatch, reason="not a number")
    await here.ask_lead(Quarantine(step=1, term=0, aside=aside), U)  # and U gets nothing else done
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.feed([by(T, 1)])
    assert (await running).absent == ()


async def test_trainer_that_puts_all_its_work_aside_is_left_out() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    await here.feed([by(T, 0)])
    await here.ask_lead(Lease(step=1, term=0, total=1), U)
    running = asyncio.create_task(here.leading().run())
    for position in range(3):
        await asyncio.sleep(STALLED_S / 4)
        aside = Quarantined(microbatch=by(U, position).microbatch, reason="not a number")
        await here.ask_lead(Quarantine(step=1, term=0, aside=aside), U)
        await here.ask_lead(Lease(step=1, term=0, total=position + 2), U)
    await eventually(lambda: here.events.of(WorkWithdrawn))
    await here.feed([by(T, 0), by(T, 1)])
    assert (await running).absent == (U,)


async def test_batch_of_which_everything_is_put_aside_is_said_to_wait_for_what_can_be_computed() -> None:
    here = await Stage(roster=HOSTED, hosted=True).set()
    running = asyncio.create_task(here.leading().run())
    for trainer in (T, U):
        await here.ask_lead(Lease(step=1, term=0, total=1), trainer)
        aside = Quarantined(microbatch=by(trainer, 0).microbatch, reason="the loss is nan")
        await here.ask_lead(Quarantine(step=1, term=0, aside=aside), trainer)
    await asyncio.sleep(2 * STALLED_S)
    said = "a microbatch that can be computed: 2 of this step were put aside, one of them as the loss is nan"
    assert here.waited == [said], "once, and nobody is left out for it"
    await here.feed([by(T, 1), by(U, 1)])
    assert (await running).absent == ()
    assert here.waited[:2] == [said, ""]


async def test_trainer_that_never_says_what_it_has_begun_is_left_out() -> None:
    leader = HOSTED.succession(1)[1]
    here = await Stage(roster=HOSTED, leader=leader, hosted=True).set()
    running = asyncio.create_task(here.leading(1).run())
    await eventually(lambda: here.puppets[T].told(AGAIN))
    await here.ask_lead(ResumeTrainer(step=1, term=1, started=(), aside=()), T)
    with pytest.raises(Busy, match="1 trainers have yet to say"):
        await here.ask_lead(Lease(step=1, term=1, total=1), T)
    await eventually(lambda: here.events.of(WorkWithdrawn), deadline_s=2 * STALLED_S)
    await here.feed([by(T, 0), by(T, 1)], term=1)
    assert (await running).absent == (U,)


def five(*more: str) -> Roster:
    hosts = [Member(peer=PeerId(peer), role="stage", name="n", part="stage-0", addresses=()) for peer in more]
    return Roster([*ROSTER.members, *hosts])


async def test_step_closes_without_a_member_that_alone_says_void_and_not_why() -> None:
    here = await stage(roster=five("C", "D"))
    here.puppets[PeerId("D")].instead[RECONCILE] = broken(None)  # the others hold the result, and say so
    closed = await here.leading().run()
    assert closed.absent == ("D",)


async def test_leader_waits_for_a_round_as_long_as_its_bytes_take_and_for_nothing_else() -> None:
    here = await stage()
    here.closing = dataclasses.replace(here.closing, averaging_s=lambda plainly: 60.0)

    async def late(body: Reconcile) -> None:
        await asyncio.sleep(50.0)

    here.puppets[A].instead[RECONCILE] = late
    closed = await here.leading().run()
    assert closed.absent == ()
    assert [body.within_s for body in here.puppets[A].told(RECONCILE)] == [60.0]

    here = await stage()
    here.closing = dataclasses.replace(here.closing, averaging_s=lambda plainly: 60.0)
    here.puppets[A].instead[APPLY] = late
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(2 * here.closing.timeout_s())
    assert here.events.of(AttemptFailed), "the update has no more than other questions"
    running.cancel()
