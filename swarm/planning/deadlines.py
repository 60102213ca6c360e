"""Deadlines from what was measured, never from what somebody guessed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FEW = 4
"""From so many durations on the longest one is not taken for the rule: a single stall would set the deadline until
twenty more have been seen."""


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

    def seconds(self) -> float:
        """How long to wait for the next piece."""
        if not self._recent:
            return self.ceiling_s if self.first_s is None else self.first_s
        ordered = sorted(self._recent)
        last = len(ordered) - 1
        index = int(self.quantile * last) if len(ordered) >= FEW else last
        return min(self.ceiling_s, max(self.floor_s, self.factor * ordered[index]))
