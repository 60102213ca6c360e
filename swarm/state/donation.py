"""Limit how a donor hands out its state, so that its own work does not suffer. Pure.

:class:`Donation` sets the rate, a :class:`~swarm.waiting.TokenBucket` keeps to it, :class:`OpenAnswers` bounds the
answers of one caller.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from swarm.errors import Busy, Violation
from swarm.ids import PeerId
from swarm.waiting import TokenBucket

BURST_BYTES = 8 << 20
MAX_BYTES_S = 64 << 20
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

    def __init__(self, *, most: float = MAX_BYTES_S, least: float = LEAST_BYTES_S) -> None:
        self._most, self._least = most, least
        self._bucket = TokenBucket(most, BURST_BYTES)
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed: float | None = None
        self._given = 0

    @property
    def bytes_s(self) -> float:
        """The rate at this time."""
        return self._bucket.rate

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


# --- answers on their way to one caller ------------------------------------------------------------------------------
# Bounded: a caller that never reads what it asked for holds no more of them.


def _all_alike(body: Any) -> str:
    return ""


FEW = 2


class OpenAnswers:
    """Counts calls from their admission until they are over, the answer's way included: one more than ``most`` of a
    caller and of one ``kind`` is Busy. When there are ``in_all`` a caller has FEW, so that those who read nothing keep
    nobody out, until there are twice as many: identities are free, memory is not. For methods that take no payload:
    give them :meth:`admit` and :meth:`over`.

    The endpoint's own bound is for small answers: as many of some MiB each would be a gigabyte.
    """

    def __init__(self, most: int, in_all: float = math.inf, *, kind: Callable[[Any], str] = _all_alike) -> None:
        self._most, self._in_all, self._kind = most, in_all, kind
        self._open: Counter[tuple[PeerId, str]] = Counter()

    def admit(self, caller: PeerId, body: Any, payload_bytes: int) -> None:
        """See :class:`~swarm.network.protocols.Method`. Raises Busy, and Violation for a payload."""
        if payload_bytes:
            raise Violation("this takes no payload", peer=caller)
        key = caller, self._kind(body)
        if self._open[key] >= self._most:
            raise Busy(f"{self._most} answers to this peer are on their way")
        in_all = self._open.total()
        if in_all >= (2 if self._open[key] < FEW else 1) * self._in_all:
            raise Busy(f"{in_all} answers are on their way")
        self._open[key] += 1

    def over(self, caller: PeerId, body: Any) -> None:
        """See :class:`~swarm.network.protocols.Method`."""
        key = caller, self._kind(body)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
