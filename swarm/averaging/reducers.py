"""Putting the members' sums of one chunk together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm.errors import RoundFailed, Violation
from swarm.ids import PeerId

Floats = NDArray[np.floating[Any]]
Result = NDArray[np.float32]


class Reducer(Protocol):
    """Sums of one chunk by peer, the rank order, the divisor → what everybody gets.

    Must not depend on the order in which ``sums`` was filled. Raises Violation naming a member whose sum no honest
    member sends, and RoundFailed when the result cannot be used.
    """

    def __call__(self, sums: Mapping[PeerId, Floats], order: Sequence[PeerId], total_weight: int) -> Result:
        """One chunk's result."""


def weighted_mean(sums: Mapping[PeerId, Floats], order: Sequence[PeerId], total_weight: int) -> Result:
    """(Σ sums in ``order``) ÷ ``total_weight``, added and divided in float64 and rounded to float32 once.

    The sums are each member's Σ over its own target tokens, so no multiplication by a weight takes place. Additions are
    element by element and IEEE-exact, hence the same bits on every machine and for every order of arrival.
    Error: at most half an ulp of float32 beyond (K-1)·2⁻⁵³ relative to Σ|sums|. Cost: K passes over the chunk.
    Raises Violation naming the sender of a value that is not finite, RoundFailed when the mean itself does not fit.
    """
    total = np.zeros_like(sums[order[0]], dtype=np.float64)
    # Overflow and invalid values are judged below, once, on the result: no sum of finite numbers hides an infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        for peer in order:
            np.add(total, sums[peer], out=total)
        np.divide(total, float(total_weight), out=total)
        result: Result = total.astype(np.float32)
    if not np.isfinite(result).all():
        for peer in order:
            if not np.isfinite(sums[peer]).all():
                raise Violation("sent a sum that is not finite", peer=peer)
        raise RoundFailed("the mean of finite sums does not fit into float32")
    return result
