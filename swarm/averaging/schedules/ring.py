"""Sums that travel round a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.averaging.schedules.limits import spread


@dataclass(frozen=True, slots=True)
class Ring:
    """The sum of a part passes from neighbour to neighbour, each adding its own, and the result comes back the same
    way: the tree is a chain, another one for each part, all along one ring.

    With K members, all reducing equal parts of n bytes: 2(K-1) hops, 2(K-1)/K·n bytes sent by each, who sends to one
    neighbour and hears from one. For members of few sites that stand side by side in the ring: each site's link then
    carries 2(K-1)/K·n, whatever the number of members behind it.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, §3. Theirs
    sends the result on round the ring; back along the chain costs the same.
    """

    name: Literal["ring"] = "ring"

    def core(self, able: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(able))

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """All of the core, or as many, evenly spread, as one link may carry parts."""
        return spread(core)

    def parent(self, rank: int, root: int, core: int) -> int:
        """The next on the ring. Leaves are dealt out evenly."""
        if rank >= core:
            return rank % core
        return root if rank == root else (rank + 1) % core

    def levels(self, core: int) -> int:
        """None."""
        return 0
