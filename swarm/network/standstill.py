"""Finds that what should go on does not: a number that has stood still for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.waiting import StallDetector

LAST_LOOK_S = 1.0


class Standstill:
    """Looks at a number for as long as there is one, and tells once when it has stood still.

    It tells at a number that was too old at the last look already: after a process was stopped its timers come first,
    and what had happened meanwhile after them. That is between one and two ``patience_s`` after the number's last
    change. Costs a timer, and a look every ``patience_s``.
    """

    def __init__(self, number: Callable[[], int | None], patience_s: float, stands: Callable[[], None]) -> None:
        """``number()`` is None while nothing has to go on; ``stands`` is told. Neither may raise."""
        self._number, self._patience_s, self._stands = number, patience_s, stands
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look from now on, until there is no number at a look. Idempotent."""
        if self._timer is None:
            self._look(StallDetector(0, None), 0)

    def cancel(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, stall: StallDetector[int | None], looks: int) -> None:
        self._timer, number = None, self._number()
        if number is None:
            return
        still = stall.look(looks, number)  # in looks, not in seconds
        if still > 1:
            self._stands()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LAST_LOOK_S if still else self._patience_s, self._look, stall, looks + 1)
