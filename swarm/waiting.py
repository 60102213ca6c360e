"""The rules of waiting, each in one place: for whichever comes first, for news, until a deadline, again and again.

Pure but for :func:`first_done`, :func:`ended`, :class:`News` and :func:`retry_while_busy`: times are arguments, in
seconds of any steady clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar

from swarm.clock import Clock
from swarm.errors import Busy

SHORTEST_S = 0.005
LONGEST_S = 1.0
"""Bounds of how long a peer is left alone before it is asked again, unless a caller knows better."""

FEW = 4
"""From so many durations on the longest one is not taken for the rule: a single stall would set the deadline until
twenty more have been seen."""

OTHERS, SLOWER, LATER_S = 2, 8.0, 5.0
"""Of so many others at least: who is so many times slower than their median, and by more than so many seconds, is late
however long it took before."""

MAX_DOUBLINGS, LONGEST_TURN_S = 6, 960.0
"""Who was late has twice as long the next time, so many times and for so many seconds at most: what was too short for a
tensor on a full link is so each time, and to send it again fills that more."""

T = TypeVar("T")


async def first_done(*works: Coroutine[Any, Any, Any]) -> None:
    """Run these side by side; return when one has ended, having cancelled the others. Raises what that one raised.
    Cancelled, it leaves no task that goes on."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


async def ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these; return when none goes on, whatever each ends with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class News:
    """Those who wait for something here to change. A ``failure`` ends all their waiting."""

    def __init__(self) -> None:
        self._told = asyncio.Condition()
        self.failure: Exception | None = None

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Return when it holds; it is looked at whenever :meth:`tell` is called. Raises the failure."""
        async with self._told:
            await self._told.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise self.failure

    async def tell(self) -> None:
        """Something has changed."""
        async with self._told:
            self._told.notify_all()


def longest_s(usual_s: float) -> float:
    """Return how long anybody is waited for, where that is the median of what others take."""
    return max(SLOWER * usual_s, usual_s + LATER_S)


def doubled(first_s: float, times: int, longest_s: float) -> float:
    """A time, doubled so many times, ``longest_s`` at most."""
    return min(longest_s, first_s * 2.0**times)


class ExponentialBackoff:
    """Pauses that double from ``first_s`` to ``longest_s``; none is below SHORTEST_S."""

    def __init__(self, first_s: float = SHORTEST_S, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._first_s = self.next_s = min(longest_s, max(SHORTEST_S, first_s))

    def pause_s(self) -> float:
        """The next pause."""
        pause_s, self.next_s = self.next_s, doubled(self.next_s, 1, self._longest_s)
        return pause_s

    def restart(self) -> None:
        """It went well: the next pause is the first again."""
        self.next_s = self._first_s


@dataclass(slots=True)
class AdaptiveDeadline:
    """Seconds to wait for a kind of work: a multiple of a high quantile of recent durations, within bounds.

    Until anything was observed the ceiling applies: an unknown peer on an unknown link gets all the time there is;
    ``first_s`` instead, if given, where waiting costs more than giving up.
    The factor leaves room for a load twice as high as anything seen; the floor keeps a burst of quick answers from
    condemning the next one. Observing costs O(1), asking O(window log window).
    """

    floor_s: float
    ceiling_s: float
    quantile: float = 0.95
    factor: float = 4.0
    window: int = 128
    first_s: float | None = None
    _recent: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.window)

    def observe(self, seconds: float) -> None:
        """Add one completed piece of work."""
        self._recent.append(seconds)

    def typical(self) -> float:
        """The median of what was observed lately; something was."""
        return median(self._recent)

    def seconds(self) -> float:
        """Return how long to wait for the next piece."""
        if not self._recent:
            return self.ceiling_s if self.first_s is None else self.first_s
        ordered = sorted(self._recent)
        last = len(ordered) - 1
        index = int(self.quantile * last) if len(ordered) >= FEW else last
        return min(self.ceiling_s, max(self.floor_s, self.factor * ordered[index]))


class StallDetector(Generic[T]):
    """Since when something that should change has not. It is ``seen`` now and then, at a time, or at a look by its
    number: that is for the caller to choose, and for how long is too long."""

    def __init__(self, now: float, seen: T) -> None:
        self._seen, self.moved = seen, now

    def look(self, now: float, seen: T) -> float:
        """For how long it has stood still."""
        if seen != self._seen:
            self._seen, self.moved = seen, now
        return self.still(now)

    def still(self, now: float) -> float:
        """The same, as far as was looked."""
        return now - self.moved

    def excuse(self, now: float) -> None:
        """Nothing could have changed until now."""
        self.moved = now


# --- sending again while the receiver is busy ------------------------------------------------------------------------


class TokenBucket:
    """Keeps what goes to ``rate`` units a second, which may change at any time, and lets a ``burst`` go at once. Times
    are of one monotonic clock."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._allowed, self._since = rate, burst, burst, 0.0

    @property
    def rate(self) -> float:
        """Units a second at this time."""
        return self._rate

    def change(self, rate: float, now: float) -> None:
        """Keep to another rate from now on."""
        self._refill(now)
        self._rate = rate

    def pause_s(self, size: float, now: float) -> float:
        """Return the seconds until ``size`` units may go; 0 when they may go at once. More than a burst waits for a
        full one."""
        self._refill(now)
        missing = min(size, self._burst) - self._allowed
        return missing / self._rate if missing >= 1.0 else 0.0  # less is rounding, too short for a clock to show

    def take(self, size: float, now: float) -> None:
        """Count units that go now, whether they may or not: what is too much is owed."""
        self._refill(now)
        self._allowed -= size

    def _refill(self, now: float) -> None:
        self._allowed = min(self._burst, self._allowed + (now - self._since) * self._rate)
        self._since = now


async def retry_while_busy(send: Callable[[], Awaitable[T]], clock: Clock, *, within_s: float) -> T:
    """Send until the receiver is not Busy any more. For messages that only one peer can take: the way back.

    Raises what ``send`` raises, and its Busy when ``within_s`` seconds have passed.
    """
    patience, deadline = ExponentialBackoff(), clock.monotonic() + within_s
    while True:
        try:
            return await send()
        except Busy:
            pause = patience.pause_s()
            if clock.monotonic() + pause > deadline:
                raise
        await clock.sleep(pause)
