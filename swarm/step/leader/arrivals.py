"""Wait until enough replicas of each stage are ready for the close, as its leader, and find who is late.

Where each close waits for all nothing is asked, and nobody is late. The rules are those of :mod:`swarm.step.lateness`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence

from swarm.errors import PeerError, Superseded, WrongStep
from swarm.events import ClosedWithout
from swarm.ids import PartName, PeerId, stage_of
from swarm.step.calls import LiveCalls
from swarm.step.context import CloseContext
from swarm.step.lateness import LateVerdict, grace_s, handicaps, judge, spread_ms
from swarm.step.leader.book import StepBook
from swarm.step.messages import ARRIVE, Arrive
from swarm.waiting import first_done


class Arrivals:
    """Those of one term of a step. ``late`` are whom its newest attempt leaves out, with the reason; ``spread_ms`` is
    what the record says of arrivals, 0 where nobody was asked."""

    def __init__(self, context: CloseContext, book: StepBook, term: int) -> None:
        self._context, self._book, self._term = context, book, term
        self._calls = LiveCalls(context.calls, context.liveness)
        self._began = context.clock.monotonic()
        self.late: Mapping[PeerId, str] = {}
        self.spread_ms = 0

    async def wait(self, out: Collection[str]) -> None:
        """Return when the step can be closed without whoever is late by then; of those that are ``out`` nobody is
        asked. Raises Superseded and WrongStep. Cancelled, it leaves no question behind."""
        self.late, head = {}, self._context.history.head
        rules, roster = self._context.rules.lateness, self._book.roster
        excusable = rules.excusable(roster, head)
        if not excusable:
            return
        asked_at = self._context.clock.monotonic()
        grace = grace_s(rules, head, asked_at - self._began)
        hosts = [peer for part in roster.parts if stage_of(part) is not None for peer in roster.replicas(part)]
        behind = self._behind()
        asking = {peer: asyncio.create_task(self._arrived(peer)) for peer in hosts if peer not in out}
        try:
            while True:
                now, verdict = self._context.clock.monotonic(), LateVerdict(None)
                there = [peer for peer in asking if peer not in self._context.liveness.gone]
                at = {peer: asking[peer].result() for peer in there if asking[peer].done()}
                ready = {peer: moment + behind.get(peer, 0.0) for peer, moment in at.items()}
                verdict = judge(rules, self._groups(there), excusable, ready, now=now, grace=grace)
                if verdict.late is not None:
                    break
                await self._news([asking[peer] for peer in there if peer not in at], verdict.until - now)
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
        self.late, self.spread_ms = verdict.late, spread_ms(head, verdict.spread_s)
        if self.late:
            waited_s = self._context.clock.monotonic() - asked_at
            self._context.events.emit(
                ClosedWithout(step=self._book.step, late=dict(self.late), waited_s=waited_s, grace_s=grace)
            )

    async def _arrived(self, peer: PeerId) -> float:
        """Return when it was ready, infinity where it fails to say so. Raises Superseded and WrongStep."""
        body, timeout_s = Arrive(step=self._book.step, term=self._term), self._context.timeout_s()
        try:
            await self._calls.ask(peer, ARRIVE, body, timeout_s=timeout_s)
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
        for part in roster.parts:
            if stage_of(part) is not None:
                behind |= handicaps(head, roster.replicas(part), rules.part_bytes.get(part, 0))
        return behind
