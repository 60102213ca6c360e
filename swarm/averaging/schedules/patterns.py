"""The schedules of a round: which member adds up which sums, hop by hop.

Read :class:`Direct` first, the simplest. The others differ in hops, bytes and how many members each one speaks to:
:class:`Ring`, :class:`Halving` (recursive halving, and doubling on the way back), :class:`Butterfly` (recursive
doubling: all compute all), and :class:`Tree` for a vector that is not cut into parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# --- limits: how many parts one pair of members may carry ------------------------------------------------------------


MAX_PARTS = 64
"""Calls of all parts between two members are open at the same time, a window of each. With the smallest window they are
128, half of what one peer may have open at another (``ServeLimits.calls_per_peer``)."""


def spread(core: int) -> tuple[int, ...]:
    """Return the ranks of a core that reduce parts when all parts share the same few pairs, evenly spread."""
    return tuple(range(0, core, -(-core // MAX_PARTS)))


def folded(able: int) -> tuple[int, ...]:
    """The ranks that make a core of the largest power of two not above ``able``: of the first pairs of neighbours as
    many as are too many give up their second. Source: Rabenseifner, "Optimization of collective reduction operations",
    ICCS 2004, §2.2."""
    size = 1 << (able.bit_length() - 1)
    extra = able - size
    return tuple(rank for rank in range(able) if rank >= 2 * extra or rank % 2 == 0)


# --- direct: every member reduces a part for all ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Direct:
    """All send their sums of a part straight to its reducer, which answers with the result: the tree is a star.

    With K members, all reducing equal parts of n bytes: 2 hops, 2(K-1)/K·n bytes sent by each, who speaks to all
    K-1 others. No schedule sends fewer bytes, or over fewer hops but ``butterfly`` with two members.
    Source: the all-to-all reduce-scatter and all-gather of Träff and Hunold, "Decomposing MPI collectives", 2020, that
    hivemind calls butterfly all-reduce.
    """

    name: Literal["direct"] = "direct"

    def core(self, able: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(able))

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """All of the core."""
        return tuple(range(core))

    def parent(self, rank: int, root: int, core: int) -> int:
        """The root."""
        return root

    def levels(self, core: int) -> int:
        """None."""
        return 0


# --- ring: sums that travel round it ---------------------------------------------------------------------------------


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


# --- recursive halving, and doubling on the way back -----------------------------------------------------------------


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


# --- butterfly: recursive doubling, all compute all ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Butterfly:
    """At each of log₂K levels two members, across one bit of the rank, send each other what they hold of the whole
    vector and add it up: after the last one everybody holds the sum, and nobody has computed it for another.

    Both add the same two numbers, and the sum of two numbers does not depend on their order, so all get the same bits.
    With K = 2^m members and n bytes: m hops, m·n bytes sent by each in m messages. Of other numbers the next lower
    power of two makes the core, as in ``halving``. For tiny vectors over fast links: half the hops of ``tree``, and no
    member's link is the bottleneck.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, §4.5,
    recursive doubling; a butterfly network is its graph. (What hivemind calls butterfly is ``direct``.)
    """

    name: Literal["butterfly"] = "butterfly"

    def core(self, able: int) -> tuple[int, ...]:
        """A power of two."""
        return folded(able)

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """One part, the whole vector."""
        return (0,)

    def parent(self, rank: int, root: int, core: int) -> int:
        """None within the core, which trades level by level. Leaves are dealt out evenly."""
        return rank % core

    def levels(self, core: int) -> int:
        """log₂ of the core."""
        return core.bit_length() - 1


# --- tree: one for the whole vector ----------------------------------------------------------------------------------


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
