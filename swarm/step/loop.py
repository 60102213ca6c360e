"""The page to read first: what a peer does, step after step.

    open the step      everybody works with the parameters of the last close record
    feed it            trainers lease quota and send microbatches on their journeys       (pipeline.trainer.trainer)
    close it           the leader averages, decides and has everybody swap                (step.leader.close)

Stage replicas compute all the while (``pipeline.stage.server``); a member answers its leader (``step.member.service``).
When the leader is gone the next in the step's succession leads; a peer without which the run went on is let in again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from swarm.consensus.acceptor import MAX_LEAP
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster, due_term, own_term
from swarm.errors import OutOfSync, PeerError, Superseded, WrongStep
from swarm.events import LineageGivenUp
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.schema import Count, Empty, Message
from swarm.step.calls import LiveCalls, StepCalls
from swarm.step.context import CloseContext
from swarm.step.leader.close import StepClose
from swarm.step.leader.provisional import Isolation, Reconnection, SpeculativeClose
from swarm.step.member.leader_watch import LeaderWatch
from swarm.step.member.member_service import MemberService
from swarm.step.messages import WORKING, Working
from swarm.waiting import ExponentialBackoff, ended, first_done

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often the next in the succession looks at what the leader does."""
PATIENT_TERMS = 8
"""So often leaders take over from each other before one of them leaps."""

Feed = Callable[[int], Coroutine[Any, Any, None]]
"""A trainer's work for one step, until cancelled."""


class StepLoop:
    """Runs the steps of one peer until the last one is closed, or a record lets it leave as it asked.

    ``rejoin`` is awaited when the run went on without this peer; it returns when a record names it again. ``watch``
    tells when the leader, though it is there, does not close its step.
    """

    def __init__(
        self,
        member: MemberService,
        closing: CloseContext,
        exit_barrier: ExitBarrier,
        feed: Feed | None,
        rejoin: Callable[[], Awaitable[None]],
        watch: LeaderWatch | None = None,
    ) -> None:
        self._member, self._feed, self._watch = member, feed, watch
        self._at = at = member.position
        self._exit_barrier, self._rejoin = exit_barrier, rejoin
        self._led = (-1, -1)
        self._leading: StepClose | None = None
        closing = dataclasses.replace(
            closing,
            confirmed=lambda: None if at.forking.fork is None else at.forking.fork.confirmation,
            alone_at=lambda: self._isolation.ends_at(),
        )
        self._closing = closing
        self._isolation, self._reconnection = Isolation(at, closing), Reconnection(member, closing)

    async def run(self) -> None:
        """Take part from the step in which this peer is in the roster. Raises what ends it earlier, of a step in an
        ExceptionGroup."""
        works = (self._steps(), self._isolation.run(), self._reconnection.run())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await ended(tasks)
            await self._member.close()

    async def _steps(self) -> None:
        at = self._at
        await at.wait_begun()
        while not self._done():
            if at.cut_off:
                self._say_given_up()
                await self._rejoin()
                continue
            roster, self._leading = at.roster, None
            leading = await self._step(at.open_step)
            if at.back is not None:
                await self._go_back(leading, roster)
            elif leading is not None and leading.decided is not None:
                await self._release(leading, leading.decided)
            elif self._done():
                await self._exit_barrier.wait(roster.peers)

    def _say_given_up(self) -> None:
        fork, reason = self._at.forking.given_up, self._at.cut_off
        if fork is not None:
            self._closing.events.emit(LineageGivenUp(step=fork.step, microbatches=fork.closed, reason=reason))

    def _done(self) -> bool:
        return self._at.over or self._at.departed or self._at.back is not None

    async def _go_back(self, leading: StepClose | None, roster: Roster) -> None:
        """As the leader of a step in whose place the run goes back: first all of its members are told."""
        if leading is not None and leading.decided is not None:
            await self._tell_rest(leading, roster.peers)

    async def _step(self, step: int) -> StepClose | None:
        """Take part in one step until it is closed here, or closed without us; how we led it, if we did."""
        async with asyncio.TaskGroup() as group:
            feeding = None if self._feed is None else group.create_task(self._feed(step))
            lead = group.create_task(self._lead(step))
            await self._at.wait_open(step + 1)
            if feeding is not None:
                feeding.cancel()
            if self._leading is None or not self._leading.decided:
                lead.cancel()
        return self._leading

    async def _lead(self, step: int) -> None:
        """Lead the step whenever it is our turn, until it is decided or goes on without us. No term twice, also when
        we were cut off and come back to the same step: two records in one term could both be decided."""
        at, liveness, patience = self._at, self._closing.liveness, ExponentialBackoff(0.1)
        me, roster, book = self._closing.calls.me, at.roster, self._closing.lead.book
        if book.step != step:
            return  # it is being closed here: the next one's book is open
        superseded = 0
        while at.open_step == step and not at.cut_off:
            overdue = await self._overdue(step)
            term = due_term(roster, step, me, at.term, {**liveness.gone, **overdue, **self._still_late(step)})
            if term is None:
                await self._wait_turn(step, at.term)
                continue
            if (step, term) <= self._led:
                await self._closing.clock.sleep(patience.pause_s())
                term = own_term(roster, step, me, max(self._led[1], at.term) + _leap(superseded))
            self._led = (step, term)
            kind = SpeculativeClose if self._isolation.over() else StepClose
            leading = kind(self._closing, book, term, min(overdue.values(), default=""))
            self._leading = leading
            try:
                await first_done(leading.close(), self._isolation.turned())
                if leading.decided is not None:
                    return await self._announce(leading)
                book.end_term()
            except (Superseded, WrongStep, OutOfSync) as error:
                if isinstance(error, OutOfSync) and not leading.provisional:
                    raise
                superseded += isinstance(error, Superseded)
                logger.info("step %d, term %d was given up: %s", step, term, error)
                book.end_term()
                self._closing.waiting("")  # for nothing any more, as its leader
                await self._closing.clock.sleep(patience.pause_s())

    async def _overdue(self, step: int) -> Mapping[PeerId, str]:
        """Return who of those that lead before us is late, and why. Where the leader may wait for an answer, those who
        may owe it are asked: an honest one is not judged by how long another takes."""
        if self._watch is None:
            return {}
        if (found := self._watch.overdue()) or not (others := self._watch.to_ask()):
            return found
        body = Working(step=step, term=self._at.term)
        calls = LiveCalls(self._closing.calls, self._closing.liveness)
        asking = (calls.gather([peer], WORKING, body, timeout_s=LOOK_S) for peer in others)  # each: one may refuse
        said = dict(zip(others, await asyncio.gather(*asking), strict=True))
        working = [peer for peer, one in said.items() if one.failed or one.given[peer].working]
        return self._watch.overdue(answered=self._watch.has_answers(working))

    def _still_late(self, step: int) -> Mapping[PeerId, str]:
        """Return who was late for the close before the step, and may not have opened it yet, and who held up several
        before it: others lead it."""
        head = self._at.head
        late = {} if head is None or head.step != step - 1 else head.late
        why = dict.fromkeys(map(PeerId, late), "it was late for the close before")
        return {**self._at.roster.dismissed, **why}

    async def _announce(self, leading: StepClose) -> None:
        """To those there by then, until we have closed the step as well: had nobody been told, nobody else would
        lead it as long as we are there."""
        at, patience = self._at, ExponentialBackoff(0.1)
        await leading.announce()
        while at.open_step == leading.book.step and not at.cut_off:
            await self._closing.clock.sleep(patience.pause_s())
            await leading.announce()

    async def _tell_rest(self, leading: StepClose, members: Collection[PeerId]) -> None:
        """Those who are there and were not told yet. Takes at most RELEASE_S."""
        liveness, patience = self._closing.liveness, ExponentialBackoff(0.1)
        rest = set(members) - {self._closing.calls.me}
        try:
            async with asyncio.timeout(RELEASE_S):
                while not rest <= leading.told | liveness.gone.keys():
                    await leading.announce()
                    await self._closing.clock.sleep(patience.pause_s())
        except TimeoutError:
            return

    async def _wait_turn(self, step: int, term: int) -> None:
        """Until somebody is gone or back, or another term begins; for LOOK_S where we are to judge the leader."""
        waits = [self._closing.liveness.changed(), self._at.wait_term(step, term)]
        if self._watch is not None and self._watch.judges:
            waits.append(self._closing.clock.sleep(LOOK_S))
        await first_done(*waits)

    async def _release(self, leading: StepClose, record: CloseRecord) -> None:
        """As the leader of a step: let those go who leave with it: all, with the last one, once told."""
        last = self._closing.rules.over(record)
        if last:
            await self._tell_rest(leading, record.members.peers)
        leaving = [peer for peer in leading.told if last or peer not in record.members]
        await self._exit_barrier.release(self._closing.calls, leaving, record.step)


def _leap(superseded: int) -> int:
    """Return how many terms to leave out after so many that were given up for a later one: somebody may know one that
    is far beyond ours, of a leader of which nothing else was heard."""
    return 0 if superseded < PATIENT_TERMS else min(1 << superseded, MAX_LEAP // 2)


RELEASE_S = 5.0
"""How long a member that is done waits to be let go. It is only a courtesy: everything is decided and written."""


MAX_HEARD = 4096


class ExitRelease(Message):
    """Everybody has closed the step with which the receiver leaves."""

    step: Count


EXIT_RELEASE = Rpc("parting/1/farewell", ExitRelease, Empty)


class ExitBarrier:
    """The ``parting/1`` service of every member: nobody leaves while another has not swapped yet, for it would look
    like one that died. The leader of a step knows who has swapped, and releases those that leave when all have."""

    def __init__(self) -> None:
        self._said: set[PeerId] = set()
        self._heard = asyncio.Condition()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [EXIT_RELEASE.handled(self._on_release)]

    async def wait(self, members: Collection[PeerId]) -> None:
        """Return when the leader of our last step, one of its members, lets us go. Takes at most RELEASE_S."""
        try:
            async with asyncio.timeout(RELEASE_S), self._heard:
                await self._heard.wait_for(lambda: not self._said.isdisjoint(members))
        except TimeoutError:
            return

    async def release(self, calls: StepCalls, leaving: Iterable[PeerId], step: int) -> None:
        """As the leader that has seen everybody swap: let these go. Never raises a PeerError; at most RELEASE_S."""
        others = sorted(peer for peer in leaving if peer != calls.me)
        await asyncio.gather(*(_say(calls, peer, ExitRelease(step=step)) for peer in others))

    async def _on_release(self, caller: PeerId, body: ExitRelease) -> Empty:
        if len(self._said) < MAX_HEARD:
            self._said.add(caller)
        async with self._heard:
            self._heard.notify_all()
        return Empty()


async def _say(calls: StepCalls, peer: PeerId, release: ExitRelease) -> None:
    try:
        await calls.ask(peer, EXIT_RELEASE, release, timeout_s=RELEASE_S)
    except PeerError:
        return  # it has left already, and may
