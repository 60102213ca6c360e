"""Wait until enough replicas of each stage are ready for the close, as its leader, and find who is late.

Where each close waits for all nothing is asked, and nobody is late. The rules are those of :mod:`swarm.step.lateness`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence

from swarm.errors import PeerError, Superseded, WrongStep
from swarm.events import ClosedWithout
from swarm.ids import ENDS, PartName, PeerId
from swarm.step.calls import LiveCalls
from swarm.step.context import CloseContext
from swarm.step.lateness import LateVerdict, grace_s, handicaps, judge, lacking, spread_ms
from swarm.step.leader.book import StepBook
from swarm.step.messages import ARRIVE, Arrive, Arrived
from swarm.waiting import ended, first_done


class Arrivals:
    """Those of one term of a step. ``late`` are whom its newest attempt leaves out, with the reason; ``forfeits`` those
    in it that do not hold what they are owed; ``spread_ms`` is what the record says of arrivals, 0 where nobody was
    asked."""

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
        except (Superseded, WrongStep):
            raise
        except PeerError:
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
