"""Two streams joined into one: bytes pass both ways until both directions have ended, or until a bound is met."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.network.libp2p.attach import LINK_ERRORS

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_READ_BYTES = 256 << 10
_BURST_S = 2.0
"""A bounded splice may save up what it did not send for this long: greetings and small calls are not slowed down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceLimits:
    """Limits while ``bounded()`` is true: both directions together carry ``bytes_per_s``, and the splice ends after
    ``idle_s`` without a byte. What it has in common with others, ``shared``, always counts."""

    bounded: Callable[[], bool]
    bytes_per_s: float
    idle_s: float
    shared: Sequence[RateLimiter] = ()


class RateLimiter:
    """A token bucket that returns the wait after each piece. Time and sizes are arguments."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._paid = now - _BURST_S

    def wait_s(self, size: int, now: float) -> float:
        """Seconds to wait for ``size`` bytes that were just passed on; 0 while the burst lasts."""
        self._paid = max(self._paid, now - _BURST_S) + size / self._rate
        return max(self._paid - now, 0.0)


class Splice:
    """Made for two streams, then :meth:`run` once. Closes neither."""

    def __init__(self, limits: SpliceLimits, clock: Clock, passed: Callable[[int], None]) -> None:
        """``passed`` is told of every piece's size."""
        self._limits, self._clock, self._passed = limits, clock, passed
        self._pace = RateLimiter(limits.bytes_per_s, clock.monotonic())
        self._last = clock.monotonic()

    async def run(self, here: Streams, there: Streams) -> None:
        """Until both directions have ended. Raises TimeoutError for an idle one, what a broken stream raises."""
        ways = asyncio.ensure_future(_first_failure(self._one_way(here[0], there[1]), self._one_way(there[0], here[1])))
        watch = asyncio.ensure_future(self._end_idle())
        try:
            await asyncio.wait({ways, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ways, watch):
                task.cancel()
            found = await asyncio.gather(ways, watch, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            self._last = self._clock.monotonic()
            self._passed(len(data))
            writer.write(data)
            await writer.drain()
            if wait_s := self._wait_s(len(data)):
                await self._clock.sleep(wait_s)
        with contextlib.suppress(*LINK_ERRORS):
            writer.write_eof()

    def _wait_s(self, size: int) -> float:
        """Seconds to wait after a piece: each bucket is told of it, the emptiest decides."""
        now = self._clock.monotonic()
        paces = (*self._limits.shared, *((self._pace,) if self._limits.bounded() else ()))
        return max((pace.wait_s(size, now) for pace in paces), default=0.0)

    async def _end_idle(self) -> None:
        """Also ends one whose reader does not read: then nothing is taken from its writer either."""
        idle_s = self._limits.idle_s
        while True:
            left_s = self._last + idle_s - self._clock.monotonic()
            if left_s <= 0:
                if self._limits.bounded():
                    raise TimeoutError(f"nothing was sent for {idle_s:g} s")
                left_s = idle_s  # looked at again then: who was known may be so no longer
            await self._clock.sleep(left_s)


async def _first_failure(*ways: Awaitable[None]) -> None:
    """Until all are done or one fails; none goes on afterwards."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
