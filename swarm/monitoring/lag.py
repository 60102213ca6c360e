"""How late the event loop is: the first thing to look at when everything is slow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.clock import Clock
from swarm.events import EventSink, LoopLag

TICK_S = 0.05
"""200 samples in an interval, which is enough for a 99th percentile. Ten times as
many took, in a sampled profile, some two fifths of what a busy stage host's loop thread did."""


class LoopLagProbe:
    """Sleeps for a tick, again and again, and notes how much later it woke; emits one LoopLag per ``interval_s``."""

    def __init__(self, events: EventSink, clock: Clock, *, interval_s: float = 10.0, tick_s: float = TICK_S) -> None:
        self._events, self._clock = events, clock
        self._interval_s, self._tick_s = interval_s, tick_s

    async def run(self) -> None:
        """Until cancelled; what was measured since the last event is emitted then."""
        lags_s: list[float] = []
        told = self._clock.monotonic()
        try:
            while True:
                before = self._clock.monotonic()
                await self._clock.sleep(self._tick_s)
                now = self._clock.monotonic()
                lags_s.append(max(0.0, now - before - self._tick_s))
                if now - told >= self._interval_s:
                    told = now
                    self._emit(lags_s)
                    lags_s.clear()
        finally:
            self._emit(lags_s)

    def _emit(self, lags_s: Sequence[float]) -> None:
        if lags_s:
            self._events.emit(summarize(lags_s))


def summarize(lags_s: Sequence[float]) -> LoopLag:
    """Median, 99th percentile (nearest rank) and maximum of at least one lag."""
    ordered = sorted(lags_s)
    p50, p99, worst = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000 for share in (0.5, 0.99, 1.0))
    return LoopLag(p50_ms=p50, p99_ms=p99, max_ms=worst)
