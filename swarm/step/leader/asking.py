"""Ask members as the leader of one term: whether they are ready, all of an attempt, or the voters until they are a
majority."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from swarm.errors import OutOfSync, PeerError, WrongStep
from swarm.events import ClosedWithout
from swarm.ids import ENDS, PartName, PeerId
from swarm.network.protocols import ReplyT, RequestT, Rpc
from swarm.step.blocked import awaited_majority
from swarm.step.calls import Answers, LiveCalls
from swarm.step.context import CloseContext
from swarm.step.lateness import LateVerdict, grace_s, handicaps, judge, lacking, spread_ms
from swarm.step.leader.answers import AnswerRules
from swarm.step.leader.book import StepBook
from swarm.step.leader.punctuality import Lateness, enough_s, late
from swarm.step.leader.tables import VoterTable
from swarm.step.messages import ARRIVE, DECIDE, Arrive, Arrived, Decide, Prepare
from swarm.waiting import ExponentialBackoff, ended, first_done


class Arrivals:
    """Wait, in one term of a step, until enough replicas of each stage are ready for the close, by the rules of
    :mod:`swarm.step.lateness`. Where each close waits for all nothing is asked, and nobody is late.

    ``late`` are whom its newest attempt leaves out, with the reason; ``forfeits`` those in it that do not hold what
    they are owed; ``spread_ms`` is what the record says of arrivals, 0 where nobody was asked.
    """

    def __init__(self, context: CloseContext, book: StepBook, term: int) -> None:
        self._context, self._book, self._term = context, book, term
        self._calls = LiveCalls(context.calls, context.liveness)
        self._began = context.clock.monotonic()
        self.late: Mapping[PeerId, str] = {}
        self.forfeits: Sequence[PeerId] = ()
        self.spread_ms = 0
        self._said: dict[PeerId, Arrived] = {}

    async def wait(self, out: Collection[PeerId]) -> None:
        """Return when the step can be closed without those who are late by then; of those that are ``out`` nobody is
        asked. Who is cut off is not late, but left out as ever: what it learnt may be lost. Raises Superseded and
        WrongStep. Cancelled, it leaves no question behind."""
        head = self._context.history.head
        self.late, self.forfeits, self._said = {}, (), {}
        rules, roster = self._context.rules.lateness, self._book.roster
        excusable = rules.excusable(roster, head)
        if not excusable and not head.late:
            return
        asked_at = self._context.clock.monotonic()
        opened_at = self._context.opened_at()  # in whatever term: it is the step's share that is waited
        grace = grace_s(rules, head, asked_at - (opened_at if math.isfinite(opened_at) else self._began))
        behind = self._behind()
        asking = {peer: asyncio.create_task(self._arrived(peer)) for peer in roster.hosts if peer not in out}
        try:
            while True:
                now, verdict = self._context.clock.monotonic(), LateVerdict(None)
                lacks = lacking(head, {peer: said.since for peer, said in self._said.items()})
                there = [peer for peer in asking if peer not in self._context.liveness.gone and not self._cut_off(peer)]
                at = {peer: asking[peer].result() for peer in there if asking[peer].done()}
                ready = {peer: moment + behind.get(peer, 0.0) for peer, moment in at.items()}
                needed = {*lacks, *self._needed(out)}  # somebody may have asked to leave meanwhile
                may = {peer: times for peer, times in excusable.items() if peer not in needed}
                verdict = judge(rules, self._groups(there), may, ready, now=now, grace=grace)
                if verdict.late is not None:
                    break
                await self._news([asking[peer] for peer in there if peer not in at], verdict.until - now)
        finally:
            await ended(asking.values())
        self.forfeits = lacks
        self.late, self.spread_ms = verdict.late, spread_ms(head, verdict.spread_s)
        if self.late:
            waited_s = self._context.clock.monotonic() - asked_at
            self._context.events.emit(
                ClosedWithout(step=self._book.step, late=dict(self.late), waited_s=waited_s, grace_s=grace)
            )

    def _needed(self, out: Collection[PeerId]) -> set[PeerId]:
        """Return whom nothing excuses: us, and those that are to leave or to move with the step, who would lose what
        they have learnt."""
        moving = self._book.movers(self._context.history.head, out)
        return {self._context.calls.me, *self._book.requests.leaving(), *moving}

    def _cut_off(self, peer: PeerId) -> bool:
        return peer in self._said and bool(self._said[peer].cut_off)

    async def _arrived(self, peer: PeerId) -> float:
        """Return when it was ready, infinity where it fails to say so. Raises Superseded and WrongStep."""
        body, timeout_s = Arrive(step=self._book.step, term=self._term), self._context.timeout_s()
        try:
            self._said[peer] = await self._calls.ask(peer, ARRIVE, body, timeout_s=timeout_s)
        except PeerError as error:
            if self._book.ends_term(error, self._calls.me):
                raise
            return math.inf
        return self._context.clock.monotonic()

    async def _news(self, asking: Sequence[asyncio.Task[float]], within_s: float) -> None:
        """Return when one more has answered, somebody is gone or back, or so much time is over."""

        async def answered() -> None:
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)

        waits = [answered(), self._context.liveness.changed()]
        if math.isfinite(within_s):
            waits.append(self._context.clock.sleep(max(0.0, within_s)))
        await first_done(*waits)

    def _groups(self, there: Sequence[PeerId]) -> dict[PartName, list[PeerId]]:
        groups: dict[PartName, list[PeerId]] = {}
        for peer in there:
            groups.setdefault(PartName(self._book.roster[peer].part or ""), []).append(peer)
        return groups

    def _behind(self) -> dict[PeerId, float]:
        """By how much longer each replica's contribution takes over its link than others' do."""
        head, rules, roster = self._context.history.head, self._context.rules, self._book.roster
        behind: dict[PeerId, float] = {}
        share = rules.lateness.encoded
        for part in roster.parts:
            if part != ENDS:
                behind |= handicaps(head, roster.replicas(part), rules.part_bytes.get(part, 0) * share)
        return behind


SPARE = 2.0
"""So many times as long as makes a member late it is waited for where the others have answered all that is needed: who
misses a result is cut off, and gets it anew from another."""
RETURNED_S = 2.0
"""How long a member that is gone may take to say that it has kept its vote, and how often it is asked."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TermCalls:
    """The questions of one term. Members that are ``excused`` need not know the step any more. ``took`` is how long the
    last question to all took each, and ``kept_waiting`` are those for whom we had to wait. Those ``lagging`` were
    waited for SPARE times as long as is usual, and are not any more in this term."""

    def __init__(self, context: CloseContext, book: StepBook, term: int) -> None:
        self._context, self._book = context, book
        self.believes = AnswerRules(context, book.step, term, book.roster)
        self.excused: Collection[PeerId] = ()
        self.arrivals = Arrivals(context, book, term)
        self.took: dict[PeerId, float] = {}
        self.kept_waiting: dict[PeerId, Lateness] = {}
        self.lagging: dict[PeerId, str] = {}
        self._calls = LiveCalls(context.calls, context.liveness)

    async def all(
        self,
        peers: Sequence[PeerId],
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        enough: Callable[[Collection[PeerId]], bool] = lambda answered: False,
    ) -> Answers[ReplyT]:
        """Return the answers of these, up to the first that fails. Where ``enough`` have answered, those that are
        behind all others are waited for SPARE times as long as is usual, and hear later questions without being waited
        for. Raises Superseded and WrongStep."""
        timeout_s = getattr(body, "within_s", None) or self._context.timeout_s()
        asking = {peer: asyncio.create_task(self._calls.ask(peer, rpc, body, timeout_s=timeout_s)) for peer in peers}
        awaited = {peer: task for peer, task in asking.items() if peer not in self.lagging}
        try:
            said, self.took = await self._said(awaited, enough, SPARE)
        except PeerError:
            failed = {peer: error for peer, task in awaited.items() if (error := _failure(task)) is not None}
            for error in failed.values():
                if self._book.ends_term(error, self._calls.me):
                    raise error from None
            return Answers({}, failed)
        finally:
            await ended(asking.values())
        self.lagging |= {peer: "it answers much later than others" for peer in awaited if peer not in said}
        return Answers(said, {})

    async def majority(
        self,
        electors: Sequence[PeerId],
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        check: Callable[[], None] = lambda: None,
    ) -> Mapping[PeerId, ReplyT]:
        """Return the answers of all members that are there, among them a majority of the electors: until it is one, who
        has not answered is asked again, by the rules of :class:`VoterTable`. Once it is, nobody is waited for much
        longer than they took.

        Raises OutOfSync when so many say no that it cannot be one; but where nobody has voted yet it asks on: those who
        answer for another step, or see another lead, may be back. Raises Superseded and WrongStep, and what ``check``
        does whenever it is to be asked again.
        """
        unawaited = {
            peer: asyncio.create_task(self._answer(peer, rpc, body, counts=peer in electors))
            for peer in sorted(self._unawaited)
        }
        try:
            return await self._majority(electors, rpc, body, check, unawaited)
        finally:
            await ended(unawaited.values())

    async def _majority(
        self,
        electors: Sequence[PeerId],
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        check: Callable[[], None],
        unawaited: Mapping[PeerId, asyncio.Task[ReplyT | PeerError]],
    ) -> Mapping[PeerId, ReplyT]:
        """Those that are ``unawaited`` hear the question, too; what they have answered meanwhile counts."""
        context, pauses = self._context, ExponentialBackoff(0.1)
        table: VoterTable[ReplyT] = VoterTable(tuple(electors))
        while True:
            absent = {**context.liveness.gone, **self._unawaited}
            asked = table.asked_next(self._book.roster.peers, absent)
            asking = {
                peer: asyncio.create_task(self._answer(peer, rpc, body, counts=peer in electors)) for peer in asked
            }
            said, took = await self._said(asking, partial(_is_majority, table))
            context.lead.late_answers |= late(took)
            came = {peer: answer.result() for peer, answer in unawaited.items() if answer.done()}
            table = table.told({**came, **said})
            decision, reason = table.decision
            if decision == "majority":
                context.waiting("")
                return table.given
            if decision == "refused" and not isinstance(body, Prepare):
                raise OutOfSync(f"step {self._book.step} cannot be decided: {reason}")
            check()
            context.waiting(awaited_majority(table.count, len(electors), table.needed, context.alone_at()))
            await context.clock.sleep(pauses.pause_s())

    @property
    def _unawaited(self) -> dict[PeerId, str]:
        """Return those that hear what is asked, and are not waited for."""
        return {**self.arrivals.late, **self._book.roster.dismissed, **self.lagging}

    async def _said(
        self,
        asking: Mapping[PeerId, asyncio.Task[T]],
        enough: Callable[[Mapping[PeerId, T]], bool],
        spare: float = 1.0,
    ) -> tuple[dict[PeerId, T], dict[PeerId, float]]:
        """Return what these say, and how long each took: all of them, but where ``enough`` have answered nobody much
        later than others, ``spare`` times as late as is late. Those are asked no longer. Raises what the first raises
        that fails. Once enough have, nothing is computed for an answer: the later ones took longer, so what is usual
        can only grow, and is found anew when the time is over that it gave."""
        clock, came = self._context.clock, asyncio.Event()
        took, said, fresh = dict[PeerId, float](), dict[PeerId, T](), list[PeerId]()
        began, seconds, most_s, are_enough = clock.monotonic(), 0.0, None, False

        def answered(peer: PeerId, _: asyncio.Task[T]) -> None:
            took[peer] = clock.monotonic() - began
            fresh.append(peer)
            came.set()

        for peer, task in asking.items():
            task.add_done_callback(partial(answered, peer))
        try:
            while len(said) < len(asking):
                if most_s is None:
                    await came.wait()
                    seconds = clock.monotonic() - began
                else:
                    await first_done(came.wait(), clock.sleep(most_s - seconds))
                    seconds = clock.monotonic() - began
                    if not came.is_set():
                        seconds = max(seconds, most_s)  # that time is over, whatever a clock's last digit says
                came.clear()
                said |= {peer: asking[peer].result() for peer in fresh}
                fresh.clear()
                are_enough = are_enough or enough(said)
                if are_enough and (most_s is None or seconds >= most_s):
                    most_s = enough_s(list(took.values()), spare)
                    if most_s is not None and seconds >= most_s:
                        break
        finally:
            await ended(asking.values())
        seconds_of = {peer: took[peer] if peer in said else seconds for peer in asking}
        return {peer: said[peer] for peer in asking if peer in said}, seconds_of

    async def _answer(
        self, peer: PeerId, rpc: Rpc[RequestT, ReplyT], body: RequestT, *, counts: bool
    ) -> ReplyT | PeerError:
        """Return one member's answer, or why it gives none; whether it ``counts``: of a voter. Raises Superseded and
        WrongStep."""
        timeout_s = self._context.timeout_s()
        try:
            if peer in self._context.liveness.gone:
                short_s = min(timeout_s, RETURNED_S)
                answer = await self._context.calls.ask(peer, rpc, body, timeout_s=short_s)
            else:
                answer = await self._calls.ask(peer, rpc, body, timeout_s=timeout_s)
            self.believes.check(peer, body, answer, counts=counts)
            return answer
        except PeerError as error:
            excused = isinstance(error, WrongStep) and peer in self.excused
            if not excused and self._book.ends_term(error, self._calls.me):
                raise
            logger.info("step %d, %s: %s", self._book.step, rpc.name, error)
            return error

    async def tell(self, decide: Decide, told: set[PeerId]) -> None:
        """Tell everybody who is there what was decided; ourselves last, so that anyone who sees it knows all were told.
        Those that have heard it are ``told``; each of the others finds out by itself, as one that is late for the close
        does where the word does not reach it meanwhile. So do we, when our own close takes longer than an answer may:
        it goes on, and those who wait for the next step hear of its end."""
        me, gone, timeout_s = self._context.calls.me, self._context.liveness.gone, self._context.timeout_s()

        async def one(peer: PeerId) -> None:
            try:
                await self._calls.ask(peer, DECIDE, decide, timeout_s=timeout_s)
            except PeerError as error:
                logger.warning("step %d is decided, but was not told: %s", decide.step, error)
            else:
                told.add(peer)

        there = [peer for peer in self._book.roster.peers if peer != me and peer not in gone]
        unawaited = [asyncio.create_task(one(peer)) for peer in there if peer in self._unawaited]
        asking = {peer: asyncio.create_task(one(peer)) for peer in there if peer not in self._unawaited}
        try:
            _, took = await self._said(asking, lambda said: True)
            self._context.lead.late_answers |= late(took)
            await self._context.calls.ask(me, DECIDE, decide, timeout_s=timeout_s)
        except PeerError as error:
            logger.warning("step %d is decided, and not closed here yet: %s", decide.step, error)
        finally:
            await ended(unawaited)


def _failure(task: asyncio.Task[Any]) -> PeerError | None:
    """Return why a call failed that has ended."""
    error = None if task.cancelled() else task.exception()
    return error if isinstance(error, PeerError) else None


def _is_majority(table: VoterTable[ReplyT], said: Mapping[PeerId, ReplyT | PeerError]) -> bool:
    return table.told(said).decision[0] == "majority"
