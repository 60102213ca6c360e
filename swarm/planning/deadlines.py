"""Deadlines from what was measured, never from what somebody guessed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class AdaptiveDeadline:
    """Seconds to wait for a kind of work: a multiple of a high quantile of recent durations, within bounds.

    Until anything was observed the ceiling applies: an unknown peer on an unknown link gets all the time there is.
    The factor leaves room for a load twice as high as anything seen; the floor keeps a burst of quick answers from
    condemning the next one. Observing costs O(1), asking O(window log window).
    """

    floor_s: float
    ceiling_s: float
    quantile: float = 0.95
    factor: float = 4.0
    window: int = 128
    _recent: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.window)

    def observe(self, seconds: float) -> None:
        """Add one completed piece of work."""
        self._recent.append(seconds)

    def seconds(self) -> float:
        """How long to wait for the next piece."""
        if not self._recent:
            return self.ceiling_s
        ordered = sorted(self._recent)
        index = min(len(ordered) - 1, int(self.quantile * len(ordered)))
        return min(self.ceiling_s, max(self.floor_s, self.factor * ordered[index]))
