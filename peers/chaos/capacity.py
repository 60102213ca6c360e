"""What replicas could have done: the integral over time of what the weakest stage could take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Life:
    """A replica of a stage was there from one moment to another."""

    stage: int
    from_s: float
    to_s: float


def capacity(lives: Iterable[Life], stages: int, rate: float, from_s: float, to_s: float) -> float:
    """Microbatches that a run could have computed in the window: a replica takes ``rate`` a second, and a run what the
    stage with the fewest replicas at that moment takes. O(n log n)."""
    changes: list[tuple[float, int, int]] = []
    for life in lives:
        if life.from_s < to_s and life.to_s > from_s:
            changes += [(max(from_s, life.from_s), 1, life.stage), (min(to_s, life.to_s), -1, life.stage)]
    there: Counter[int] = Counter()
    total, since = 0.0, from_s
    for at_s, change, stage in sorted(changes):  # nobody is left after the last
        total += (at_s - since) * rate * min(there[one] for one in range(stages))
        there[stage] += change
        since = at_s
    return total
