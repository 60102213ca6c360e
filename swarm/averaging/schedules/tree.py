"""One tree for the whole vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tree:
    """One binomial tree over the members, another root in each step, for a vector that is not cut into parts.

    With K members and n bytes: 2⌊log₂K⌋ hops, 2(K-1) messages for the whole group where ``direct`` has 2K(K-1); the
    root sends and receives ⌈log₂K⌉·n bytes, half of the others n. For tiny vectors of many members whose processors
    are the bottleneck.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, §4.5,
    reduce followed by broadcast.
    """

    name: Literal["tree"] = "tree"

    def core(self, able: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(able))

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """The next one in each turn."""
        return (turn % core,)

    def parent(self, rank: int, root: int, core: int) -> int:
        """The place, counted from the root, without its lowest set bit. Leaves are dealt out evenly."""
        if rank >= core:
            return rank % core
        place = (rank - root) % core
        return ((place & (place - 1)) + root) % core

    def levels(self, core: int) -> int:
        """None."""
        return 0
