"""Cutting a vector: into one part per reducer, and every part into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from swarm.errors import BugError

CHUNK_ELEMENTS = 1 << 16
"""Elements of one chunk: 256 KiB in float32, 512 KiB in float64. Large enough that a call's fixed price (some 0.5 ms of
CPU at either end) is small beside its bytes, small enough that a handful in flight fit into memory and into a slow
link's queue."""

LARGEST_CHUNK_ELEMENTS = 1 << 18
"""A long vector's: a quarter of the calls, and its window is as many bytes as before."""

_CHUNKS = 64

BLOCKS = 16
"""Of each chunk: what is looked at of one takes 16 KiB at least, beside which a call's price is small."""


@dataclass(frozen=True, slots=True)
class ReduceChunk:
    """Elements ``start`` up to, not including, ``stop`` of the vector, reduced by the reducer of that ``rank``."""

    index: int
    rank: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements; never 0."""
        return self.stop - self.start

    def block(self, number: int) -> slice:
        """Return the elements of one of its BLOCKS, from its own start; of a chunk of fewer elements some are empty."""
        return slice(self.elements * number // BLOCKS, self.elements * (number + 1) // BLOCKS)


def chunk_elements_of(elements: int) -> int:
    """Return the elements in each chunk of a vector: a power of two from CHUNK_ELEMENTS to LARGEST_CHUNK_ELEMENTS, the
    largest of which there are at least 64. A function of the length alone, so that groups of other sizes cut alike."""
    wanted = 1 << max(0, (elements // _CHUNKS).bit_length() - 1)
    return min(max(wanted, CHUNK_ELEMENTS), LARGEST_CHUNK_ELEMENTS)


def part_bounds(elements: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every reducer's part of a vector of ``elements``, in rank order.

    ``shares`` are integers, proportional to what a reducer can carry (its bandwidth); a part differs from its exact
    share by less than one element, and the parts cover the vector without gap or overlap. Integers only: the same
    cut on every machine. A share of 0 gives an empty part. Raises BugError without any positive share.
    """
    if elements < 0 or not shares or min(shares) < 0 or sum(shares) == 0:
        raise BugError(f"cannot cut {elements} elements by shares {tuple(shares)}")
    total = sum(shares)
    cuts = [elements * share // total for share in accumulate(shares, initial=0)]
    return tuple(pairwise(cuts))


def cut(
    elements: int, shares: Sequence[int], chunk_elements: int = CHUNK_ELEMENTS, *, aligned: bool = False
) -> tuple[ReduceChunk, ...]:
    """All chunks of a vector in its order, numbered from 0; none is empty, none crosses two parts.

    ``shares`` as in :func:`part_bounds`; rank is the position in it. ``aligned``: parts end where chunks do, so that
    the chunks are the same whatever the shares are; a part then differs from its share by less than one chunk.
    O(elements / chunk_elements).
    """
    if chunk_elements < 1:
        raise BugError(f"a chunk of {chunk_elements} elements")
    bounds = part_bounds(elements, shares)
    if aligned:
        whole = part_bounds(-(-elements // chunk_elements), shares)
        bounds = tuple((start * chunk_elements, min(elements, stop * chunk_elements)) for start, stop in whole)
    chunks: list[ReduceChunk] = []
    for rank, (start, stop) in enumerate(bounds):
        for offset in range(start, stop, chunk_elements):
            chunks.append(ReduceChunk(len(chunks), rank, offset, min(stop, offset + chunk_elements)))
    return tuple(chunks)
