"""What a peer makes of its watch: it catches up when others are ahead, and ends when it has nobody to begin with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.consensus.records import Decision
from swarm.errors import Ending, Refused, RunEnded, WrongStep
from swarm.events import PeerBack, PeerLost
from swarm.health.heartbeat import BEAT, LOST, Heartbeat, HeartbeatReply, Lost
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId
from swarm.membership.watching import Watching
from swarm.network.protocols import AnyMethod
from swarm.sim.network import SimNetwork
from swarm.step.messages import Propose
from swarm.step.observe_messages import NEXT, STANDING, Decided, NextRequest, RunStanding, StandingRequest
from tests.harness.expect import eventually
from tests.harness.rigs.membership import (
    ROSTER,
    RUN,
    A,
    B,
    EventList,
    LoopClock,
    MemberBench,
    T,
    acceptances,
    apply,
    decide,
    reconcile,
    record,
)
from tests.harness.rigs.step import RULES


class Other:
    """A member that stands somewhere, and knows a decision or not."""

    def __init__(self) -> None:
        self.step, self.incarnation = 1, 1
        self.asked: list[int] = []
        self.answer: Any = Refused("I do not say")

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [BEAT.handled(self._beat), NEXT.handled(self._next), STANDING.handled(self._standing)]

    async def _beat(self, caller: PeerId, body: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply(step=self.step, member=True, incarnation=self.incarnation)

    async def _standing(self, caller: PeerId, body: StandingRequest) -> RunStanding:
        return RunStanding(founder=T, closed=self.step - 1, waiting_for="")

    async def _next(self, caller: PeerId, body: NextRequest) -> Decided:
        self.asked.append(body.step)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Decided.of(self.answer)


class Home:
    """A member with a watch over two others."""

    def __init__(self, *, founded: bool = True) -> None:
        self.bench, self.events, self.others = MemberBench(A, founded=founded), EventList(), {B: Other(), T: Other()}
        self.network, self.endpoints = SimNetwork(LoopClock()), dict[PeerId, Any]()

    async def open(self) -> Home:
        for peer in ROSTER.peers:
            endpoint = self.endpoints[peer] = self.network.endpoint(peer)
            await endpoint.enter(RUN)
            if peer == A:
                self.watch = HealthWatch(endpoint, LoopClock())
                endpoint.mount(self.watch)
                run = SimpleNamespace(
                    around=SimpleNamespace(watch=self.watch, endpoint=endpoint, events=self.events, clock=LoopClock()),
                    rules=RULES,
                    returns=(),
                    position=self.bench.position,
                    name_of=lambda peer: f"the peer {peer}",
                )
                contact = SimpleNamespace(
                    lost=lambda peer, reason, error, left: RunEnded(f"{reason}", Ending.UNREACHABLE) if left else None
                )
                self.watching = Watching(cast(Any, run), self.bench.member, cast(Any, contact))
                self.watch.report_to(self.watching)
            else:
                endpoint.mount(self.others[peer])
        self.watch.follow(ROSTER.peers)
        self.running = asyncio.create_task(self.watching.run())
        return self

    async def computed(self) -> None:
        for body in (reconcile(), apply(), Propose(record=record())):
            await self.bench.ask(body)

    async def stop(self) -> None:
        self.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.running


async def test_member_that_does_not_hold_what_was_decided_is_cut_off() -> None:
    home = await Home().open()
    home.others[B].step, home.others[B].answer = 2, Decision(record(), acceptances(record()))
    await eventually(lambda: home.bench.position.cut_off)
    assert "without what this peer holds" in home.bench.position.cut_off
    await home.stop()


async def test_member_that_is_steps_behind_is_cut_off() -> None:
    home = await Home().open()
    home.others[B].step, home.others[B].answer = 3, WrongStep("the decision of step 1 is not kept here")
    await asyncio.sleep(10)
    assert home.others[B].asked
    assert home.bench.position.cut_off == ""  # who joined after it does not know it either
    home.others[B].step = home.others[T].step = 99
    home.others[T].answer = home.others[B].answer
    await eventually(lambda: home.bench.position.cut_off)
    assert home.bench.position.cut_off.startswith("2 of 3 voters, ")
    await home.stop()


async def test_member_is_not_cut_off_by_one_that_says_it_is_far_ahead() -> None:
    home = await Home().open()
    await home.computed()
    home.others[B].step, home.others[B].answer = 1000, WrongStep("the decision of step 1 is not kept here")
    await asyncio.sleep(30)
    assert len(home.others[B].asked) > 2
    assert (home.bench.position.cut_off, home.bench.position.is_member) == ("", True)
    home.others[T].step, home.others[T].answer = 2, Decision(record(), acceptances(record()))
    await eventually(lambda: home.bench.position.open_step == 2)
    await home.stop()


@pytest.mark.parametrize(
    "answer", [Refused("no"), Decision(record(), {}), Decision(record(previous="f" * 64), acceptances(record()))]
)
async def test_member_believes_nobody_that_proves_nothing_and_asks_again(answer: Any) -> None:
    home = await Home().open()
    await home.computed()
    home.others[B].step, home.others[B].answer = 2, answer
    await asyncio.sleep(5)
    assert (home.bench.position.open_step, home.bench.position.cut_off) == (1, "")
    assert len(home.others[B].asked) > 2
    home.others[B].answer = Decision(record(), acceptances(record()))
    await eventually(lambda: home.bench.position.open_step == 2)
    await home.stop()


async def test_member_that_has_caught_up_meanwhile_asks_for_nothing_that_is_not_decided() -> None:
    home = await Home().open()
    await home.computed()
    for other in home.others.values():
        other.step, other.answer = 2, Decision(record(), acceptances(record()))
    home.bench.device.gate = asyncio.Event()
    await eventually(lambda: home.others[B].asked or home.others[T].asked)
    await asyncio.sleep(3)
    home.bench.device.gate.set()
    await eventually(lambda: home.bench.position.open_step == 2)
    await asyncio.sleep(30)
    assert {*home.others[B].asked, *home.others[T].asked} == {1}
    await home.stop()


async def test_peer_whose_contact_says_that_it_leaves_before_it_took_part_ends_and_waits_for_a_silent_one() -> None:
    home = await Home(founded=False).open()
    home.network.hold(T)
    await eventually(lambda: T in home.watch.gone, deadline_s=90)
    await asyncio.sleep(600)
    assert not home.running.done(), "it was away for ten minutes"
    home.network.release(T)
    await eventually(lambda: T not in home.watch.gone)
    await home.endpoints[PeerId(T)].call(A, LOST, Lost(peer=T, reason="Ctrl-C", incarnation=1), timeout_s=5)
    with pytest.raises(ExceptionGroup) as ended:
        await home.running
    (error,) = ended.value.exceptions
    assert isinstance(error, RunEnded)
    assert (error.reason, error.ending) == ("Ctrl-C", Ending.UNREACHABLE)


async def test_member_that_loses_and_finds_another_says_so_and_goes_on() -> None:
    home = await Home().open()
    home.network.hold(B)
    await eventually(lambda: home.watch.gone, deadline_s=90)
    home.network.release(B)
    await eventually(lambda: not home.watch.gone)
    (lost,) = home.events.of(PeerLost)
    assert (lost.peer, lost.name) == (B, f"the peer {B}")
    assert home.events.of(PeerBack) == [PeerBack(peer=PeerId(B), name=f"the peer {B}")]
    await home.computed()
    await home.bench.ask(decide(record()))
    await home.stop()
