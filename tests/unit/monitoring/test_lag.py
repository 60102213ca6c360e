"""Loop lag on a clock that says by how much each sleep overran."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from swarm.events import LoopLag
from swarm.monitoring.recorder import LoopLagProbe, summarize
from tests.harness.rigs.common import EventList


class LateClock:
    """Every sleep lasts longer than asked, by the next of ``overruns_s``; then it hangs."""

    def __init__(self, overruns_s: list[float]) -> None:
        self._overruns_s: Iterator[float] = iter(overruns_s)
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        overrun_s = next(self._overruns_s, None)
        if overrun_s is None:
            await asyncio.Event().wait()
        else:
            self._now += seconds + overrun_s


async def lags_of(overruns_s: list[float], interval_s: float) -> list[LoopLag]:
    told = EventList()
    probe = asyncio.ensure_future(LoopLagProbe(told, LateClock(overruns_s), interval_s=interval_s, tick_s=1.0).run())
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    return told.of(LoopLag)


async def test_probe_emits_once_per_interval_and_the_rest_when_it_ends() -> None:
    lags = await lags_of([0.0, 0.5, 0.0, 0.25], interval_s=2.0)
    assert [lag.max_ms for lag in lags] == pytest.approx([500.0, 250.0])


async def test_probe_that_measured_nothing_emits_nothing() -> None:
    assert await lags_of([], interval_s=2.0) == []


def test_summarize_takes_the_nearest_rank() -> None:
    lag = summarize([number / 1000 for number in range(1, 101)])
    assert (lag.p50_ms, lag.p99_ms, lag.max_ms) == pytest.approx((50, 99, 100))
    assert summarize([0.001]).p50_ms == pytest.approx(1)
