"""Tell how a fetch goes on: bytes, rate and the time that is left, also where next to nothing comes.

A peer with ``--max-upload`` sends a large part for hours, and nothing that it sends says so: what is seen is the pace.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from peers.console.lasting import span
from peers.console.words import command_name
from swarm.clock import Clock
from swarm.disk import size_text
from swarm.ids import PartName
from swarm.waiting import ended

TENTHS = 10
"""Lines about a part's progress, where it comes quickly."""
EVERY_S = 15.0
"""Where it comes slowly, a line in so many seconds."""
SILENT_S = 5.0
"""A line in so many seconds where an answer is waited for."""
LONG_S = 120.0
"""Who has to wait for so long is told, once, what can be done meanwhile."""


@dataclass(slots=True)
class _Fetch:
    """One part: ``began`` is when it was first heard of, with ``first`` bytes there; ``said_at`` and ``said`` when a
    line was last said, and of how many bytes."""

    total: int
    began: float
    first: int
    done: int
    said_at: float
    said: int

    def rate(self, now: float) -> float:
        """Bytes a second since it began."""
        return (self.done - self.first) / (now - self.began) if now > self.began else 0.0


class FetchProgress:
    """Says in lines, to ``say``, how a fetch goes on, which reports to :meth:`told`."""

    def __init__(self, say: Callable[[str, str], None], clock: Clock) -> None:
        self._say, self._clock = say, clock
        self._parts: dict[PartName, _Fetch] = {}
        self._advised = False

    def told(self, part: PartName, done: int, total: int) -> None:
        """Note that so many bytes of a part are here; say a line for each tenth, and for what was not told for long."""
        now, known = self._clock.monotonic(), self._parts.get(part)
        if known is None or known.total != total or done < known.done:
            self._parts[part] = known = _Fetch(total, now, done, done, now, -1)
        known.done = done
        tenth = total / TENTHS
        if known.said < 0 or known.done // tenth > known.said // tenth or now - known.said_at >= EVERY_S:
            self._line(part, known, now)

    async def run(self) -> None:
        """Say how it goes on while nothing is told, until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S)
            now = self._clock.monotonic()
            for part, fetch in self._parts.items():
                if fetch.done < fetch.total and now - fetch.said_at >= EVERY_S:
                    self._line(part, fetch, now)

    def _line(self, part: PartName, fetch: _Fetch, now: float) -> None:
        text = f"{part}: {size_text(fetch.done)} of {size_text(fetch.total)}"
        rate, left_s = fetch.rate(now), 0.0
        if fetch.done == fetch.said and fetch.done < fetch.total:
            text += f", nothing more in {now - fetch.said_at:.0f} s; it is asked for again"
        elif rate > 0 and fetch.done < fetch.total:
            left_s = (fetch.total - fetch.done) / rate
            text += f", {size_text(rate)}/s, about {span(left_s)} left"
        self._say("fetching", text)
        fetch.said, fetch.said_at = fetch.done, now
        if left_s >= LONG_S and not self._advised:
            self._advised = True
            why = "peers may send no faster (their --max-upload), nor this machine's link receive"
            again = f"the same {command_name()} ckpt pull goes on from there"
            self._say("slow", f"{why}; Ctrl-C stops, and {again}")


@contextlib.asynccontextmanager
async def waiting(say: Callable[[str, str], None], clock: Clock, what: Callable[[], str]) -> AsyncIterator[None]:
    """While the block runs say every SILENT_S seconds ``what`` is waited for, as it is then."""

    async def repeat() -> None:
        began = clock.monotonic()
        while True:
            await clock.sleep(SILENT_S)
            say("waiting", f"for {what()}, {clock.monotonic() - began:.0f} s; Ctrl-C stops")

    repeating = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        await ended([repeating])
