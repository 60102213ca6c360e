"""Tell how work goes on that takes long: a line once it has taken a moment, then every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S, EVERY_S = 1.5, 5.0
"""Who waits for longer wants to know for what."""


Told = Callable[[str, float, float], None]
"""Is told of what so much is done, of how much."""


def tells_nobody(what: str, done: float, total: float) -> None:
    """Say nothing: for those who asked for quiet."""


def span(seconds: float) -> str:
    """Return a time to wait in words: ``40 s``, ``11 min``, ``2.3 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Lasting:
    """Says in lines, to ``say``, how far the work is that reports to :meth:`told`: what is done of it, of how much, and
    the time that is left at the pace so far.

    Args:
        say: What is told each line.
        amount: How an amount is written.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        amount: Callable[[float], str] = "{:g}".format,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._amount, self._now = say, amount, now
        self._what, self._began, self._had = "", now(), 0.0
        self._next = self._began + FIRST_S

    def told(self, what: str, done: float, total: float) -> None:
        """Note that so much of ``what`` is done; say a line where it is time for one."""
        now = self._now()
        if what != self._what:
            self._what, self._began, self._had = what, now, done
        if now < self._next:
            return
        self._next = now + EVERY_S
        text = f"{what}: {self._amount(done)} of {self._amount(total)}"
        if self._had < done < total and now > self._began:
            text += f", about {span((total - done) * (now - self._began) / (done - self._had))} left"
        self._say(text)
