"""How many parts one pair of members may carry."""

from __future__ import annotations

MOST_PARTS = 64
"""Calls of all parts between two members are open at the same time, a window of each. With the smallest window they are
128, half of what one peer may have open at another (``ServeLimits.calls_per_peer``)."""


def spread(core: int) -> tuple[int, ...]:
    """As many ranks of a core as may reduce a part where all parts go through the same few pairs, evenly spread."""
    return tuple(range(0, core, -(-core // MOST_PARTS)))


def folded(able: int) -> tuple[int, ...]:
    """The ranks that make a core of the largest power of two not above ``able``: of the first pairs of neighbours as
    many as are too many give up their second. Source: Rabenseifner, "Optimization of collective reduction operations",
    ICCS 2004, §2.2."""
    size = 1 << (able.bit_length() - 1)
    extra = able - size
    return tuple(rank for rank in range(able) if rank >= 2 * extra or rank % 2 == 0)
