"""Recursive halving, and doubling on the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.averaging.schedules.limits import folded, spread


@dataclass(frozen=True, slots=True)
class Halving:
    """With each hop half of what is left of the vector goes to the member across one bit of the rank, and the results
    come back over the same pairs: each part has a binomial tree. The lowest bit, nearest neighbours, comes first.

    With K = 2^m members, all reducing equal parts of n bytes: 2m hops, 2(K-1)/K·n bytes sent by each, who speaks to m
    others. Of other numbers the next lower power of two makes the core, and a member outside sends to one of it: 2 hops
    and n bytes more. Members of few sites that stand side by side: over a site's border goes least of all schedules.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, §2.2 and §4.
    """

    name: Literal["halving"] = "halving"

    def core(self, able: int) -> tuple[int, ...]:
        """A power of two."""
        return folded(able)

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """All of the core, or as many, evenly spread, as one link may carry parts."""
        return spread(core)

    def parent(self, rank: int, root: int, core: int) -> int:
        """Across the lowest bit in which it differs from the root. Leaves are dealt out evenly."""
        if rank >= core:
            return rank % core
        differs = rank ^ root
        return rank ^ (differs & -differs)

    def levels(self, core: int) -> int:
        """None."""
        return 0
