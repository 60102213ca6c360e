"""The step loop: opens, feeds, leads when it is its turn, is let in again, and ends in order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.acceptor import MAX_LEAP
from swarm.consensus.records import CloseRecord, Decision
from swarm.errors import Busy, DeadlineMissed, Ending, PeerError, Refused, RunEnded, Superseded, Unreachable, WrongStep
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.optim.clipping import clip_factor
from swarm.step.calls import StepCalls
from swarm.step.loop import ExitBarrier, ExitRelease, StepLoop
from swarm.step.messages import AGAIN, DECIDE, PREPARE, PROPOSE, RECONCILE, Propose, ResumeTrainer
from tests.harness.expect import eventually
from tests.harness.rigs.step import (
    GENESIS,
    LEADER,
    ROSTER,
    RULES,
    SUCCESSOR,
    A,
    MemberBench,
    Stage,
    T,
    acceptances,
    apply,
    asked,
    decide,
    no,
    prepare,
    reconcile,
    record,
    weights_digest,
)


class Script:
    """A feed that says when it was called and can be held up or fail."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gate: asyncio.Event | None = None
        self.cancelled = 0

    async def __call__(self, step: int) -> None:
        """See :data:`~swarm.step.loop.Feed`."""
        self.steps.append(step)
        if self.gate is None:
            return
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def close(bench: MemberBench, before: CloseRecord | None = None) -> CloseRecord:
    """Have the bench's member close one step, as if its leader asked."""
    closed = record(before) if before is not None else record()
    for body in (reconcile(closed.step), apply(closed.step), Propose(record=closed), decide(closed)):
        await bench.ask(body)
    return closed


class Home:
    """The loop of one peer. Its own member is real, the others are puppets."""

    def __init__(self, me: PeerId = A, **settings: Any) -> None:
        self.me, self.stage = me, Stage(leader=me)
        self.bench = MemberBench(me, **({"decided": self._decided, "liveness": self.stage.liveness} | settings))
        self.rejoined: list[str] = []
        self.newest: CloseRecord | None = None
        self.exit_barrier = ExitBarrier()

    async def set(self) -> Home:
        """The peer's member takes its puppet's place on the network."""
        await self.stage.set()
        endpoint = self.stage.network.endpoint(f"{self.me}2")
        await endpoint.enter(RULES.run)
        self.stage.closing = replace(self.stage.closing, calls=_Both(self))
        self.stage.lead._term_of = lambda: self.bench.position.term
        self.stage.lead._wait_open = self.bench.position.wait_open
        return self

    def loop(self, feed: Any = None) -> StepLoop:
        return StepLoop(self.bench.member, self.stage.closing, self.exit_barrier, feed, self._rejoin)

    async def _decided(self, decision: Decision) -> None:
        closed = decision.record
        self.stage.lead.open_step(closed.step + 1, closed.members, closed.hash(), closed.cursors)

    async def _rejoin(self) -> None:
        self.rejoined.append(self.bench.position.cut_off)
        assert self.newest is not None
        await self.bench.member.observe(Decision(self.newest, acceptances(self.newest)))

    async def release(self, leader: PeerId) -> None:
        await asked(self.exit_barrier, ExitRelease(step=RULES.steps), leader)


class _Both(StepCalls):
    """Calls to ourselves are answered by our member, others by the puppets."""

    def __init__(self, home: Home) -> None:
        super().__init__(home.stage.endpoints[home.me])
        self._home = home

    async def ask(self, peer: PeerId, rpc: Rpc[Any, Any], body: Any, *, timeout_s: float) -> Any:
        if peer != self.me or not rpc.name.startswith("step/1/"):
            return await super().ask(peer, rpc, body, timeout_s=timeout_s)
        self._home.stage.puppets[self.me].bodies.append((rpc, body))
        try:
            return await self._home.bench.ask(body, caller=self.me)
        except PeerError as error:
            raise type(error)(error.reason, peer=peer) from error


def fit(home: Home) -> None:
    """Puppets answer as members with the same parts would."""
    clip = clip_factor((2 * home.bench.average.squared_norm) ** 0.5, RULES.clip_norm)
    for puppet in home.stage.puppets.values():
        part = str(ROSTER[puppet.peer].part)
        puppet.gradient = hashlib.sha256(f"{part}|1".encode()).hexdigest()
        puppet.weights = weights_digest(part, 1, 0.5, clip)
        puppet.sq_norm = home.bench.average.squared_norm


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# --- taking part -----------------------------------------------------------------------------------------------------


async def test_loop_ends_when_its_run_is_ended_before_the_last_step() -> None:
    home, feed = await Home().set(), Script()
    running = asyncio.create_task(home.loop(feed).run())
    await eventually(lambda: feed.steps)
    for body in (reconcile(), apply()):
        await home.bench.ask(body)
    ended = record(ended=True)
    await home.bench.member.learn(Decision(ended, acceptances(ended)))
    await home.release(ROSTER.succession(1)[0])
    await running
    assert feed.steps == [1]


async def test_loop_of_the_leader_lets_nobody_go_from_the_last_step_before_all_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, released = await Home(LEADER).set(), []

    async def release(calls: StepCalls, leaving: Iterable[PeerId], step: int) -> None:
        released.append(sorted(leaving))

    monkeypatch.setattr(home.exit_barrier, "release", release)
    home.stage.closing = replace(home.stage.closing, rules=replace(RULES, steps=1))
    fit(home)
    deaf = home.stage.puppets[T]
    deaf.instead[DECIDE] = no(DeadlineMissed("late"))
    await home.stage.feed()
    running = asyncio.create_task(home.loop(Script()).run())
    await eventually(lambda: len(deaf.told(DECIDE)) > 2)
    assert released == []
    del deaf.instead[DECIDE]
    await eventually(lambda: released)
    assert T in released[0]
    await stop(running)


async def test_loop_stops_its_feed_when_the_step_is_closed() -> None:
    home, feed = await Home().set(), Script()
    feed.gate = asyncio.Event()
    running = asyncio.create_task(home.loop(feed).run())
    await eventually(lambda: feed.steps)
    await close(home.bench)
    await eventually(lambda: feed.steps == [1, 2])
    assert feed.cancelled == 1
    await stop(running)


async def test_loop_whose_feed_fails_ends_with_its_error() -> None:
    async def feed(step: int) -> None:
        raise Refused("no replica left")

    home = await Home().set()
    with pytest.raises(ExceptionGroup) as caught:
        await home.loop(feed).run()
    assert caught.group_contains(Refused, match="no replica left")


# --- leading ---------------------------------------------------------------------------------------------------------


async def test_loop_that_is_to_lead_in_another_way_tells_first_what_it_has_decided() -> None:
    """One that waits for a record that its living leader keeps to itself waits for ever."""
    home = await Home(LEADER).set()
    fit(home)
    loop, turned, gate = home.loop(), asyncio.Event(), asyncio.Event()
    loop._isolation.turned = turned.wait  # type: ignore[assignment, method-assign]

    async def slow(body: Any) -> None:
        turned.set()
        await gate.wait()

    home.stage.puppets[T].instead[DECIDE] = slow
    running = asyncio.create_task(loop.run())
    await home.stage.feed()
    await turned.wait()
    await asyncio.sleep(1.0)
    gate.set()
    await eventually(lambda: home.bench.position.open_step == 2)
    assert home.stage.asked(DECIDE) == set(ROSTER.peers)
    await stop(running)


async def test_loop_that_could_tell_nobody_what_it_has_decided_tells_it_again() -> None:
    home = await Home(LEADER).set()
    fit(home)
    ask, others = home.bench.ask, [peer for peer in ROSTER.peers if peer != LEADER]

    async def full(body: Any, **how: Any) -> Any:
        if isinstance(body, Propose):
            raise Busy("its vote cannot be kept: No space left on device")
        return await ask(body, **how)

    home.bench.ask = full  # type: ignore[method-assign]
    for peer in others:
        home.stage.puppets[peer].instead[DECIDE] = no(Unreachable("cut off"), times=3)
    running = asyncio.create_task(home.loop().run())
    await home.stage.feed()
    await eventually(lambda: all(len(home.stage.puppets[peer].told(DECIDE)) > 3 for peer in others))
    assert home.bench.position.open_step == 1, "it holds no vote for the record, and learns of it from the others"
    (said, *_) = home.stage.puppets[T].told(DECIDE)
    closed = home.stage.puppets[T].told(PROPOSE)[-1].record
    await home.bench.member.learn(Decision(closed, said.acceptances))
    assert home.bench.position.open_step == 2
    await stop(running)


async def test_loop_that_is_third_in_line_leads_when_both_before_it_are_gone_and_yields_to_a_later_term() -> None:
    third = ROSTER.succession(1)[2]
    home = await Home(third).set()
    running = asyncio.create_task(home.loop().run())
    for peer in (LEADER, SUCCESSOR):
        home.stage.liveness.lose(peer, "cut off")
    await eventually(lambda: home.stage.waited)
    assert home.bench.position.term == 2
    assert home.bench.position.leader == third
    for peer in (LEADER, SUCCESSOR):
        home.stage.liveness.find(peer)
    await eventually(lambda: LEADER in home.stage.asked(PREPARE))
    await home.bench.ask(prepare(term=3))
    home.stage.puppets[LEADER].instead[AGAIN] = no(Superseded("term 3 has begun"))
    assert home.bench.position.leader == LEADER
    await stop(running)


async def test_loop_that_duels_leads_in_a_term_of_its_own_each_time() -> None:
    home = await Home(LEADER).set()
    fit(home)
    home.stage.puppets[T].instead[RECONCILE] = no(Superseded("term 1 has begun"), times=1)
    running = asyncio.create_task(home.loop().run())
    await home.stage.feed()
    await eventually(lambda: home.bench.position.term == 3)
    await eventually(lambda: home.stage.puppets[T].told(AGAIN))
    await home.stage.ask_lead(ResumeTrainer(step=1, term=3, started=(), aside=()), T)
    await home.stage.feed(term=3)
    await eventually(lambda: home.bench.position.open_step == 2)
    assert home.bench.history.head.term == 3
    assert {body.term for body in home.stage.puppets[T].told(PREPARE)} == {3}
    await stop(running)


async def test_loop_that_gives_a_term_up_ends_it_in_the_book_of_its_step_alone() -> None:
    """A step may be closed here, and the book of the next one open, when its leader hears that it is closed."""
    home = await Home(LEADER).set()
    fit(home)
    lead = home.stage.lead
    mine, later = lead.book, next(step for step in range(2, 99) if ROSTER.succession(step)[0] == LEADER)

    def closed(body: Any) -> None:
        lead.open_step(later, ROSTER, "cd" * 32)
        raise WrongStep("step 1 is closed")

    home.stage.puppets[T].instead[RECONCILE] = closed
    running = asyncio.create_task(home.loop().run())
    await home.stage.feed()
    await eventually(lambda: home.stage.puppets[T].told(PREPARE))  # in another term, of the same step
    assert mine.led is None or mine.led.number > 0
    assert lead.book.step == later
    assert lead.book.led is not None
    assert lead.book.led.number == 0
    await stop(running)


async def test_loop_reaches_a_term_far_beyond_its_own_that_one_member_knows() -> None:
    home = await Home(LEADER).set()
    far = 3 * MAX_LEAP // 2

    def ahead(body: Any) -> None:
        if body.term < far:
            raise Superseded(f"term {far} has begun, this is of term {body.term}")

    for question in (PREPARE, RECONCILE):
        home.stage.puppets[T].instead[question] = ahead
    running = asyncio.create_task(home.loop().run())
    await home.stage.feed()
    await eventually(lambda: home.stage.puppets[T].told(AGAIN), deadline_s=120.0)
    terms = [body.term for body in home.stage.puppets[T].told(PREPARE)]
    assert (terms[:3], terms == sorted(terms)) == ([3, 6, 9], True)
    assert far <= home.bench.position.term < far + MAX_LEAP
    await stop(running)


# --- without us ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "decided", "left out"])
async def test_loop_of_a_peer_without_which_the_run_went_on_is_let_in_again(how: str) -> None:
    home, feed = await Home().set(), Script()
    home.newest = record(record(record()))
    feed.gate = asyncio.Event()
    running = asyncio.create_task(home.loop(feed).run())
    await eventually(lambda: feed.steps)
    if how == "cut":
        await home.bench.member.cut("B is steps ahead")
    elif how == "decided":
        await home.bench.member.learn(Decision(record(), acceptances(record())))
    else:
        for body in (reconcile(), apply()):
            await home.bench.ask(body)
        without = record(roster=tuple(member for member in ROSTER.members if member.peer != A), absent=(A,))
        home.newest = record(without)
        await home.bench.member.learn(Decision(without, acceptances(without)))
    await eventually(lambda: home.rejoined)
    assert feed.cancelled == 1
    if how == "left out":
        await eventually(lambda: feed.steps == [1, 3])
    else:
        assert home.bench.position.over
        await home.release(ROSTER.succession(3)[0])
        await running
        return
    await stop(running)


async def test_loop_that_comes_back_to_the_step_that_it_led_leads_it_in_a_term_of_its_own() -> None:
    home = await Home(LEADER).set()
    home.newest = GENESIS
    running = asyncio.create_task(home.loop().run())
    await asyncio.sleep(1.0)
    assert not home.stage.puppets[T].told(PREPARE)  # it leads from the start, in term 0
    await home.bench.member.cut("B is steps ahead")
    await eventually(lambda: home.stage.puppets[T].told(PREPARE))
    assert (home.rejoined, home.bench.position.open_step) == (["B is steps ahead"], 1)
    assert {body.term for body in home.stage.puppets[T].told(PREPARE)} == {3}
    await stop(running)


async def test_loop_that_cannot_come_back_ends_with_the_reason() -> None:
    home = await Home().set()

    async def nobody() -> None:
        raise RunEnded("there is nobody else", Ending.UNREACHABLE)

    running = asyncio.create_task(
        StepLoop(home.bench.member, home.stage.closing, home.exit_barrier, None, nobody).run()
    )
    await home.bench.member.cut("B is steps ahead")
    with pytest.raises(RunEnded, match="nobody else"):
        await running
