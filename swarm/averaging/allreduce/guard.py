"""Leave a sum out of a chunk's mean where it is far from the others'. Pure.

One bad sum of three may turn a run: at ten times its size and the other way round it makes the mean a step backwards.
Honest means per token differ by the noise of their tokens: by about the same from one to the other, once each distance
is divided by what the two weights let expect. A member that is :data:`FAR` times as far from most others as is usual is
left out of the chunk. Only what is loud is caught: a sum of usual length and another direction looks like another text.

Related: Krum (Blanchard et al., arXiv 1703.02757) takes the one vector that is nearest to the others; here all stay but
those that are far, so that honest members lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from swarm.averaging.allreduce.output import Floats
from swarm.ids import PeerId

FAR = 2.5
"""So many times the usual distance is far."""

SMALLEST = 1e-3
"""Of a sum's length: members that differ by less are left out for nothing, however alike the others are."""

LEAST = 3
"""Members without whom nobody can be told from the others."""


def far_out(sums: Mapping[PeerId, Floats], weights: Mapping[PeerId, int]) -> list[PeerId]:
    """The members to leave out of one chunk: fewer than half, none of fewer than :data:`LEAST`.

    ``sums`` are float32 (elements,), by member, each over as many target tokens as its weight says. What is not finite
    is not looked at: the mean refuses it. Machines may differ in the last bits of a distance.
    Cost: one product of (K, elements) with itself, some 3 ns an element of four members.
    """
    return [peer for peer, far in zip(sums, distances(sums, weights), strict=True) if far > FAR]


def distances(sums: Mapping[PeerId, Floats], weights: Mapping[PeerId, int]) -> list[float]:
    """How far each member is from most others, over what is usual among them; 0 for what is not judged."""
    count = len(sums)
    if count < LEAST:
        return [0.0] * count
    shares = np.array([1.0 / weights[peer] for peer in sums])
    with np.errstate(over="ignore", invalid="ignore"):
        stacked = np.stack([values * np.float32(share) for values, share in zip(sums.values(), shares, strict=True)])
        products = (stacked @ stacked.T).astype(np.float64)
        lengths = np.diagonal(products)
        if not all(np.isfinite(values).all() for values in stacked[~np.isfinite(lengths)]):
            return [0.0] * count
        squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * products, 0.0)
    squares[~np.isfinite(squares)] = np.inf
    squares[squares < SMALLEST**2 * np.minimum(lengths[:, None], lengths[None, :])] = 0.0
    apart = np.sqrt(squares / (shares[:, None] + shares[None, :]))
    most = [sorted(np.delete(row, place))[(count - 2) // 2] for place, row in enumerate(apart)]
    usual = sorted(most)[count // 2]
    return [float(one / usual) if usual > 0 else float(one > 0) * np.inf for one in most]
