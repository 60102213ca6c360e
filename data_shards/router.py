"""Route text to experts: what kinds of text there are, learnt without labels, and of which kind a row is. Pure.

A row is described by how often tokens are in it, in 256 bins that their ids are hashed into: every tokenizer has ids,
while not every one gives back the bytes of a text, and no row has to be decoded, which may begin within a character. A
bin has the root of its share, in whole numbers, so that words that are everywhere do not outweigh all others. A kind
is a centre among such descriptions, and a row is of the kind that is nearest: all is whole numbers, added exactly, so
that every machine finds the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.errors import ConfigError
from swarm.schema import BINS, MOST_IN_BIN

MOST_POINTS, MOST_WEIGHT = 1 << 12, 1 << 36
"""Descriptions that centres are learnt from, for more tell nothing new, and about what they weigh together, so that no
sum is too large for 64 bits."""
_TRIES, _ROUNDS, _FINE = 4, 50, 1 << 10

Whole = npt.NDArray[np.int64]


def described(tokens: npt.NDArray[np.integer[Any]], counting: npt.NDArray[np.bool_] | None = None) -> Whole:
    """Describe each row of token ids (rows, T), or what is ``counting`` of it; of nothing all is 0."""
    rows = len(tokens)
    bins = ((tokens.astype(np.uint64) * np.uint64(0x9E3779B1)) >> np.uint64(24)).astype(np.uint8).astype(np.int64)
    places = bins + np.arange(rows)[:, None] * BINS
    found = np.bincount(places.ravel() if counting is None else places[counting], minlength=rows * BINS)
    counts = found.reshape(rows, BINS)
    shares = counts * MOST_IN_BIN**2 // np.maximum(counts.sum(axis=1, keepdims=True), 1)
    roots: Whole = np.sqrt(shares.astype(np.float64)).astype(np.int64)  # IEEE 754 says every bit of a root
    return roots


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Descriptions (points, 256), and the weight of each, a whole number of tokens."""

    at: Whole
    weights: Whole

    def thinned(self) -> Points:
        """Return some from all over, where there are more than are needed, with weights that can be added up."""
        kept = np.linspace(0, len(self.at) - 1, min(len(self.at), MOST_POINTS)).astype(np.int64)
        weights = self.weights[kept]
        return Points(self.at[kept], np.maximum(weights // max(1, int(weights.sum()) // MOST_WEIGHT), 1))


def evened(sources: Sequence[Points]) -> Points:
    """Return the points of all sources, each of which weighs no more than the median of them, of two the lighter: how
    much it has is its own word, and one alone decides no kinds of many."""
    sums = [int(one.weights.sum()) for one in sources]
    most = median_low(sums)
    fine = 1 if max(sums) == most else _FINE
    weights = [
        np.maximum(one.weights * fine * min(whole, most) // whole, 1) for one, whole in zip(sources, sums, strict=True)
    ]
    return Points(np.concatenate([one.at for one in sources]), np.concatenate(weights))


class Router:
    """Says of which kind a row is: the nearest of these centres, the first where several are."""

    def __init__(self, centres: Sequence[Sequence[int]]) -> None:
        self._centres = np.array(centres, np.int64)

    def __len__(self) -> int:
        return len(self._centres)

    def choices(self, points: Whole) -> Whole:
        """Return the kind of each row that is described."""
        nearest: Whole = _distances(points, self._centres).argmin(axis=1)
        return nearest

    def choices_of_rows(self, inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Whole:
        """Return the kind of each row of token ids (rows, T): by all of it up to the last target that counts, which is
        ≥ 0, so by no padding."""
        counting = np.flip(np.maximum.accumulate(np.flip(targets >= 0, axis=1), axis=1), axis=1)
        return self.choices(described(inputs, counting))

    def choice_of(self, tokens: Sequence[int]) -> int:
        """Return the kind of a text of these tokens."""
        return int(self.choices(described(np.array([tokens], np.int64)))[0])


def learn(points: Points, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the centres of so many kinds, those of most weight first: the best of some tries of k-means, begun as
    k-means++ does (Arthur and Vassilvitskii, 2007). The same points give the same centres.

    Raises ConfigError where there are not so many points that differ.
    """
    points, chance = points.thinned(), random.Random(seed)
    found = min((_try(points, count, chance) for _ in range(_TRIES)), key=lambda one: one[0])
    centres, weights = found[1], np.bincount(found[2], points.weights, minlength=count)
    order = sorted(range(count), key=lambda kind: (-weights[kind], centres[kind].tolist()))
    return tuple(tuple(centres[kind].tolist()) for kind in order)


def _distances(points: Whole, centres: Whole) -> Whole:
    """The square of each distance, less that of the point from 0."""
    distances: Whole = (centres * centres).sum(axis=1) - 2 * (points @ centres.T)
    return distances


def _try(points: Points, count: int, chance: random.Random) -> tuple[int, Whole, Whole]:
    """Return (cost, centres, the centre of each point)."""
    squares = (points.at * points.at).sum(axis=1)
    centres = points.at[[int(chance.random() * len(points.at))]]
    while len(centres) < count:
        far = (squares + _distances(points.at, centres).min(axis=1)) * points.weights
        if not far.any():
            raise ConfigError("split.variants", count, f"at most {len(centres)}, the kinds that the text has",
                              "Give more text to learn them from, or set fewer variants.")  # fmt: skip
        place = np.searchsorted(np.cumsum(far), int(chance.random() * int(far.sum())), side="right")
        centres = np.vstack([centres, points.at[place]])
    weighed = points.at * points.weights[:, None]
    for _ in range(_ROUNDS):
        nearest = _distances(points.at, centres).argmin(axis=1)
        totals = np.bincount(nearest, points.weights, count).astype(np.int64)[:, None]
        sums = np.stack([weighed[nearest == kind].sum(axis=0) for kind in range(count)])
        moved = np.where(totals > 0, (2 * sums + totals) // np.maximum(2 * totals, 1), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    distances = _distances(points.at, centres)
    return int(((squares + distances.min(axis=1)) * points.weights).sum()), centres, distances.argmin(axis=1)
