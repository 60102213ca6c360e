"""Time as an argument, so that deciders can be tested and simulated without waiting."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """``monotonic`` for durations and deadlines, ``wall`` for expiry dates that other machines read."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, as this machine believes."""

    async def sleep(self, seconds: float) -> None:
        """Wait; a cancelled sleep raises CancelledError at once."""


class SystemClock:
    """The real clock."""

    def monotonic(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def wall(self) -> float:
        """See :class:`Clock`."""
        return time.time()  # noqa: TID251 - the one place that reads the wall clock

    async def sleep(self, seconds: float) -> None:
        """See :class:`Clock`."""
        await asyncio.sleep(seconds)


def moment(wall_s: float) -> str:
    """A time of :meth:`Clock.wall` as this machine's clock on the wall shows it, with the zone, for other machines may
    be in another."""
    return datetime.fromtimestamp(wall_s, UTC).astimezone().strftime("%H:%M:%S %Z")
