"""Other groups each time, drawn by lot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, in_groups, shuffled, square_root_size
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """All replicas dealt anew each round into groups of ``size`` (None: about √P), of sizes that differ by one at most.

    Mixes parameters or deltas. With r groups of P replicas a round leaves (r-1)/(P-1) of the disagreement, the mean
    squared distance from the mean, in expectation over the lot and whatever the disagreement is: the mean of all
    projections onto r groups has trace r and, by symmetry, one eigenvalue beside that of the mean.
    It needs no structure, so joins, losses and odd numbers cost nothing. Source: Moshpit SGD, arXiv 2103.03239, theorem
    3.2, whose bound is (r-1)/P + r/P².
    """

    size: int | None = None
    name: str = "random"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Every (step, round) another lot."""
        return in_groups(shuffled(replicas, seed, step, round), self.count(len(replicas)))

    def count(self, replicas: int) -> int:
        """How many groups there are."""
        return -(-replicas // (self.size or square_root_size(replicas)))

    def exact_after(self, replicas: int) -> int | None:
        """One round where one group holds all, else never."""
        return 1 if self.count(replicas) <= 1 else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """((r-1)/(P-1)) to the power of ``rounds``."""
        return ((self.count(replicas) - 1) / max(1, replicas - 1)) ** rounds
