"""Putting the members' sums of one chunk together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm.averaging.wire import WireType
from swarm.errors import Violation
from swarm.ids import PeerId

Floats = NDArray[np.floating[Any]]

PIECE_ELEMENTS = 1 << 16
"""How much is added at a time: what stays in a core's own cache."""


MOST = float(np.finfo(np.float32).max)
"""Sums in float64 are not larger than this, so that their mean fits into float32, and who sends a larger one is known
in the round in which it does."""


class Reducer(Protocol):
    """Sums of one chunk by peer, the rank order, the divisor, the result's type → what everybody gets.

    Must not depend on the order in which ``sums`` was filled. Raises Violation naming a member whose sum no honest
    member sends, one without which the result would fit among them.
    """

    def __call__(self, sums: Mapping[PeerId, Floats], order: Sequence[PeerId], divisor: int, dtype: WireType) -> Floats:
        """One chunk's result."""


def weighted_mean(
    sums: Mapping[PeerId, Floats], order: Sequence[PeerId], divisor: int, dtype: WireType = "float32"
) -> Floats:
    """(Σ sums in ``order``) ÷ ``divisor``, added and divided in float64 and rounded to ``dtype`` once.

    The sums are each member's Σ over its own target tokens, so no multiplication by a weight takes place: the mean has
    Σ weights for divisor, the sum 1. Additions are element by element and IEEE-exact, hence the same bits on every
    machine and for every order of arrival.
    Error: at most half an ulp of ``dtype`` beyond (K-1)·2⁻⁵³ relative to Σ|sums|. Cost: K passes over the chunk, half
    a MiB beside the result.
    Raises Violation naming the sender of a value that is not finite or, when only the result does not fit, the sender
    of the largest sum where it does not.
    """
    result: Floats = np.empty(sums[order[0]].size, dtype=np.dtype(dtype).newbyteorder("<"))
    # Overflow and invalid values are judged below, once, on the result: no sum of finite numbers hides an infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, result.size, PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            total = np.zeros(result[piece].size, dtype=np.float64)
            for peer in order:
                np.add(total, sums[peer][piece], out=total)
            np.divide(total, float(divisor), out=result[piece], casting="same_kind")
    fits = np.isfinite(result) if dtype == "float32" else np.abs(result) <= MOST
    if not fits.all():
        for peer in order:
            if not np.isfinite(sums[peer]).all():
                raise Violation("sent a sum that is not finite", peer=peer)
        largest = max(order, key=lambda peer: float(np.abs(sums[peer][~fits]).max()))
        raise Violation(f"sent the largest of sums whose result does not fit into {dtype}", peer=largest)
    return result
