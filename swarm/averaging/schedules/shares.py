"""How much of the vector each member reduces, by the bandwidth of its link. In integers, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from statistics import median_low

from swarm.errors import BugError
from swarm.ids import PeerId

MOST_CLASSES = 10
"""A link counts as at most 2¹⁰ times as fast, or as slow, as the middle one."""


def shares(rates: Mapping[PeerId, int], members: int) -> dict[PeerId, int]:
    """Shares that let the slowest of a round be done as early as it can, and of the others the next slowest.

    ``rates`` are bytes a second of those who may reduce, any unit, at least 1 each; ``members`` all who ask. Who
    reduces the share s of n bytes sends (1-s)·n for the others' parts and (K-1)·s·n of answers, hence is done after
    (1+(K-2)·s)·n/rate. All whose share is positive are done at the same time; a link too slow to be done by then gets
    none, and its own n bytes are what it sends. Equal links get equal shares. (The linear programme that minimises the
    time of the slowest alone has many solutions when one link is slow, and its solvers return one where a single member
    reduces everything.)
    Raises BugError without rates. Cost: O(K²) at most. Source: ours; the programme is that of Ryabinin et al., "Moshpit
    SGD", 2021, appendix on load balancing.
    """
    if not rates or min(rates.values()) < 1:
        raise BugError(f"shares of links {dict(rates)}")
    if members <= 2:
        return dict.fromkeys(rates, 1)
    taking = dict(rates)
    while True:
        total, others = sum(taking.values()), members - 2 + len(taking)
        given = {peer: others * rate - total for peer, rate in taking.items()}
        if min(given.values()) > 0:
            break
        taking = {peer: taking[peer] for peer, share in given.items() if share > 0}
    unit = gcd(*given.values())
    return {peer: given.get(peer, 0) // unit for peer in rates}


def steady(rates: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Rates as multiples of the middle one, which is 2¹⁰. Measurements of equal links differ, and they shall have equal
    shares: what is within a factor of two of the middle counts as the middle, the rest is rounded to a power of two.
    Raises BugError for a rate below 1.
    """
    if not rates or min(rates.values()) < 1:
        raise BugError(f"rates of links {dict(rates)}")
    middle = median_low(rates.values())
    return {peer: 1 << (MOST_CLASSES + _class(rate, middle)) for peer, rate in rates.items()}


def _class(rate: int, middle: int) -> int:
    """⌊log₂(rate/middle)⌋, towards 0 below: without a logarithm, which might differ between machines."""
    if rate < middle:
        return -_class(middle, rate)
    doublings = (rate // middle).bit_length() - 1
    return min(MOST_CLASSES, doublings if rate > 2 * middle else 0)
