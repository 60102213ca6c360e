"""Leave a sum out of a chunk's mean where it is far from the others'. Pure.

One bad sum of three may turn a run: at ten times its size and the other way round it makes the mean a step backwards.
Honest means per token differ by the noise of their tokens: by about the same from one to the other, once each distance
is divided by what the two weights let expect. A member that is :data:`FAR` times as far from most others as is usual is
left out of the chunk. Where noise is most of a sum, as in a step of few tokens, only what is loud is caught; where
there is little of it, other directions are, too: so honest members have to train on like texts.

Related: Krum (Blanchard et al., arXiv 1703.02757) takes the one vector that is nearest to the others; here all stay but
those that are far, so that honest members lose nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from swarm.averaging.allreduce.output import Floats
from swarm.ids import PeerId

FAR = 2.5
"""So many times the usual distance is far."""

SMALLEST = 1e-3
"""Of a sum's length: what differs by less counts as so far apart, however alike the others are."""

LEAST = 3
"""Members that have something in a chunk, without whom nobody can be told from the others."""


def far_out(sums: Mapping[PeerId, Floats], weights: Mapping[PeerId, int]) -> list[PeerId]:
    """The members to leave out of one chunk: fewer than half, none of fewer than :data:`LEAST`.

    ``sums`` are float32 (elements,), by member, each over as many target tokens as its weight says. What is not finite
    is not looked at: the mean refuses it. Machines may differ in the last bits of a distance.
    Cost: a difference of any two, some 8 ns an element of four members.
    """
    return [peer for peer, far in zip(sums, distances(sums, weights), strict=True) if far > FAR]


def distances(sums: Mapping[PeerId, Floats], weights: Mapping[PeerId, int]) -> list[float]:
    """Return how far each member is from most others, over what is usual among them; 0 for what is not judged: who has
    nothing in the chunk, as of tokens that it did not see, is like nobody."""
    found = dict.fromkeys(sums, 0.0)
    shares = {peer: 1.0 / weights[peer] for peer in sums}
    with np.errstate(over="ignore", invalid="ignore"):
        stacked = np.stack([values * np.float32(shares[peer]) for peer, values in sums.items()])
        lengths = np.array([float(one @ one) for one in stacked])
        if not all(np.isfinite(values).all() for values in stacked[~np.isfinite(lengths)]):
            return [*found.values()]
        there = np.flatnonzero(lengths > 0)
        if len(there) < LEAST:
            return [*found.values()]
        lengths, squares = lengths[there], np.zeros((len(there), len(there)))
        for row, column in itertools.combinations(range(len(there)), 2):
            apart = stacked[there[row]] - stacked[there[column]]  # their products would hide what little they differ by
            squares[row, column] = squares[column, row] = np.nan_to_num(float(apart @ apart), nan=np.inf, posinf=np.inf)
    peers = [peer for place, peer in enumerate(sums) if place in there]
    noise = np.array([shares[peer] for peer in peers])
    far = np.sqrt(np.maximum(squares, SMALLEST**2 * np.median(lengths)) / (noise[:, None] + noise[None, :]))
    most = [sorted(np.delete(row, place))[(len(peers) - 2) // 2] for place, row in enumerate(far)]
    usual = sorted(most)[len(peers) // 2]
    if math.isfinite(usual):
        found |= {peer: float(one / usual) for peer, one in zip(peers, most, strict=True)}
    return [*found.values()]
