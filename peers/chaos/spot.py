"""When spot machines are taken back, how many at once, and when others come in their place: seeded, scale-free, pure.

The shape is that of the public traces of Bamboo and Parcae: removals are a Poisson process whose rate grows with the
machines that are up, each takes a geometric number of them (mean 2.1, at most 6: Bamboo's p3 trace, where every second
one takes more than one), lifetimes are memoryless but for that, and each machine comes back after an exponential delay
of mean 10 minutes where machines live for 100 (0.6 removals per machine and hour). Time is told in steps, so the same
shape is played at any churn: at 1 % a machine lives for 100 steps and is gone for 10.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

BULK_MEAN, BULK_MOST = 2.1, 6
DOWN_SHARE = 0.1
"""Mean seconds until a machine is replaced, as a share of its mean life."""
NOTICED_SHARE = 0.5
"""Part of the removals that are announced. Clouds announce all of them and promise nothing, machines of people just
vanish; no trace says how many were: an assumption."""


@dataclass(frozen=True, slots=True)
class Removal:
    """These places lose their machine at ``at_s``, all at once; ``back_s`` is when each has another. ``noticed``: the
    machines are told before."""

    at_s: float
    places: tuple[int, ...]
    back_s: tuple[float, ...]
    noticed: bool


def bulk_size(rng: random.Random) -> int:
    """How many machines one removal takes: geometric, of mean BULK_MEAN before it is cut off at BULK_MOST."""
    stays = 1.0 - 1.0 / BULK_MEAN
    return min(BULK_MOST, 1 + int(math.log(1.0 - rng.random()) / math.log(stays)))


def mean_bulk() -> float:
    """The mean of :func:`bulk_size`, cut off as it is."""
    stays = 1.0 - 1.0 / BULK_MEAN
    return sum(stays**size for size in range(BULK_MOST))


def spot_trace(*, places: int, churn: float, step_s: float, until_s: float, seed: int) -> tuple[Removal, ...]:
    """Removals before ``until_s``, in order, from ``places`` that all have a machine at 0. ``churn`` is the expected
    share of the machines that are up which is removed in ``step_s`` seconds; a removal takes no more than there are.
    """
    rng = random.Random(f"spot {seed}")
    up, returns = set(range(places)), list[tuple[float, int]]()
    life_s = step_s / churn
    now, removals = 0.0, list[Removal]()
    while True:
        rate = len(up) / (life_s * mean_bulk())
        next_s = now + rng.expovariate(rate) if up else math.inf
        if returns and returns[0][0] <= next_s:  # memoryless: what was drawn for fewer machines is drawn again
            now, place = heapq.heappop(returns)
            up.add(place)
            if now >= until_s:
                return tuple(removals)
            continue
        if next_s >= until_s:
            return tuple(removals)
        now = next_s
        taken = tuple(rng.sample(sorted(up), min(bulk_size(rng), len(up))))
        back = tuple(now + rng.expovariate(1.0 / (DOWN_SHARE * life_s)) for _ in taken)
        removals.append(Removal(now, taken, back, rng.random() < NOTICED_SHARE))
        up -= set(taken)
        for back_s, place in zip(back, taken, strict=True):
            heapq.heappush(returns, (back_s, place))


def removed(trace: Sequence[Removal]) -> int:
    """Machines removed in all."""
    return sum(len(removal.places) for removal in trace)
