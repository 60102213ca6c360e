"""How fast a donor hands out its state, so that its own work does not suffer (pure)."""

from __future__ import annotations

import statistics
from collections import deque

from swarm.state.bucket import BURST_BYTES as BURST_BYTES
from swarm.state.bucket import Bucket

MOST_BYTES_S = 64 << 20
"""While nothing suffers: half a gigabit a second, and about half of a processor's time for the streams."""
LEAST_BYTES_S = 2 << 20
SUFFERS = 1.05
"""A step that takes so much longer than most steps without a download is one that suffers."""
SLOWER, FASTER = 0.7, 1.2
_REMEMBERED = 32
_ENOUGH = 4


class Donation:
    """A rate, and the bytes that may go at once. It falls while steps take longer than without a download, and rises
    again when they do not: nobody has to know what the link and the processor can bear. Before our first step there is
    nothing that could suffer, and no limit.

    Steps are compared with the upper quartile of those without a download, since a median would take noise for harm.
    """

    def __init__(self, *, most: float = MOST_BYTES_S, least: float = LEAST_BYTES_S) -> None:
        self._most, self._least = most, least
        self._bucket = Bucket(most)
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed: float | None = None
        self._given = 0

    @property
    def bytes_s(self) -> float:
        """The rate at this time."""
        return self._bucket.bytes_s

    def pause_s(self, size: int, now: float) -> float:
        """Seconds until ``size`` bytes may go; 0 when they may go at once. More than a burst waits for a full one."""
        if self._closed is None:
            return 0.0
        return self._bucket.pause_s(size, now)

    def give(self, size: int, now: float) -> None:
        """So many bytes go now."""
        self._bucket.take(size, now)
        self._given += size

    def step_closed(self, now: float) -> None:
        """One step of our own work is done."""
        before, given = self._closed, self._given
        self._closed, self._given = now, 0
        if before is None:
            return
        if not given:
            self._quiet.append(now - before)
        elif len(self._quiet) >= _ENOUGH:
            usual = statistics.quantiles(self._quiet, n=4)[2]
            change = SLOWER if now - before > SUFFERS * usual else FASTER
            self._bucket.change(min(self._most, max(self._least, self.bytes_s * change)), now)
