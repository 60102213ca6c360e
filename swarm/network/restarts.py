"""How often a child that dies is started again, and after which pause. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm.waiting import doubled

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """``deaths`` within ``within_s`` seconds are too many; an attempt to start it that fails counts as one."""

    deaths: int = 5
    within_s: float = 60.0


class Restarts:
    """Counts deaths, with the time as an argument."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._died: deque[float] = deque(maxlen=limits.deaths)

    def died(self, now: float) -> float | None:
        """One death more, at ``now`` in seconds of a monotonic clock. Seconds to wait before the next start, or None:
        it is not started again.

        The first death within the window is mended at once; each further one waits twice as long as the one before,
        two seconds at most, so that whatever kills it gets time to pass.
        """
        self._died.append(now)
        while self._died[0] <= now - self._limits.within_s:
            self._died.popleft()
        recent = len(self._died)
        if recent >= self._limits.deaths:
            return None
        return 0.0 if recent == 1 else doubled(FIRST_PAUSE_S, recent - 2, LONGEST_PAUSE_S)

    @property
    def said(self) -> str:
        """How many deaths count now, in words."""
        return f"{len(self._died)} times within {self._limits.within_s:g} s"
