"""Reduce the members' sums chunk by chunk into the vector that a round fills, and the digest all must find equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.averaging.allreduce.partition import ReduceChunk
from swarm.averaging.allreduce.plan import RoundPlan, WireType
from swarm.errors import Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload


class ReducedVector:
    """One vector of ``elements`` of the plan's result. Every chunk enters as encoded bytes, one's own included, so that
    what one's own machine computed and what others received cannot differ.

    ``store`` and ``settle`` may run on another thread, one chunk on one thread; the rest is for the event loop's.
    """

    def __init__(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._codec = plan.results
        self.vector = np.empty(plan.elements, dtype=np.dtype(plan.result_dtype).newbyteorder("<"))
        self._seals: dict[int, tuple[float, bytes]] = {}

    def store(self, chunk: ReduceChunk, encoded: Payload, source: PeerId | None = None) -> memoryview:
        """Take one chunk's result; returns its bytes for others, which stay as they are: those in the vector where the
        codec is exact, else ``encoded``. Raises Violation when length or values are wrong, naming its source, or else
        its reducer.

        Cost: some 2 ns per element, half of it for the digest. That is BLAKE3, which on a processor with AVX2 does 4 GB
        in the second in which sha256 does 0.4 to 0.8 and BLAKE2b 0.5 to 0.7.
        """
        source = source or self._plan.reducer(chunk)
        try:
            values = self._codec.decode(encoded, chunk.elements)
        except Violation as error:
            raise Violation(f"answered chunk {chunk.index} with {error.reason}", peer=source) from error
        squared = squared_norm(values)
        if not np.isfinite(squared):
            raise Violation(f"answered chunk {chunk.index} with values that are not finite, or too large", peer=source)
        self.vector[chunk.start : chunk.stop] = values
        self._seals[chunk.index] = (squared, blake3(encoded).digest())
        own = self.vector[chunk.start : chunk.stop]
        return own.view(np.uint8).data if self._codec.exact else memoryview(encoded)

    def bytes_of(self, chunk: ReduceChunk) -> int:
        """Return the bytes of a chunk's result on the wire."""
        return self._codec.wire_bytes(chunk.elements)

    def settle(self, chunk: ReduceChunk, result: NDArray[Any]) -> memoryview:
        """:meth:`store` a result of our own as everybody else will."""
        return self.store(chunk, self._codec.encode(np.ascontiguousarray(result), chunk))

    def release(self) -> None:
        """Give the vector back: there will be no result. A chunk that is being stored then is stored nowhere."""
        self.vector = self.vector[:0].copy()

    @property
    def stored(self) -> int:
        """The number of stored chunks."""
        return len(self._seals)

    def seal(self, chunk: ReduceChunk) -> bytes:
        """Return the BLAKE3 of a stored chunk's result on the wire."""
        return self._seals[chunk.index][1]

    def squared_norm(self) -> float:
        """Squared L2 norm, the chunks' added in their order."""
        return sum((self._seals[chunk.index][0] for chunk in self._plan.chunks), 0.0)

    def digest(self) -> str:
        """Hex sha256 over the chunks' BLAKE3 in their order."""
        total = hashlib.sha256()
        for chunk in self._plan.chunks:
            total.update(self._seals[chunk.index][1])
        return total.hexdigest()


class Leftover:
    """What a round does not bring to all of one member's sum, (elements,) float32, for its next contribution: what
    encoding the sum lost and, of the chunks that it reduces, what encoding their mean lost. Of a member that sends
    nothing it is the whole of its vector.

    Chunk by chunk, on any thread, one chunk on one thread: first :meth:`sent`, then :meth:`settled`.
    """

    def __init__(self, plan: RoundPlan, local: Floats | None, *, sends: bool) -> None:
        self._divisor = np.float32(plan.divisor)
        whole = local is not None and not sends
        self.vector: Floats = local.copy() if whole and local is not None else np.zeros(plan.elements, np.float32)

    def sent(self, chunk: ReduceChunk, values: Floats, received: Floats) -> None:
        """Our sum of a chunk, and what its reducer makes of its bytes."""
        np.subtract(values, received, out=self.vector[chunk.start : chunk.stop])

    def settled(self, chunk: ReduceChunk, mean: Floats, received: Floats) -> None:
        """A mean that was computed here, and what all make of its bytes: the difference is added to our sum, so it
        counts as often as the mean is divided."""
        self.vector[chunk.start : chunk.stop] += (mean - received) * self._divisor


def squared_norm(values: NDArray[Any]) -> float:
    """Σ v² in float64, added piece by piece, a piece's by folding the upper half onto the lower until one is left.

    Only additions element by element: their order is ours and not that of a BLAS or of a CPU's vector width, so all
    machines get the same number. The square of a finite float32 and the sum of 10²³⁰ of them are finite in float64, as
    are those of all that a reducer gives in float64 (:data:`~swarm.averaging.allreduce.output.MOST`).
    """
    pieces = range(0, values.size, PIECE_ELEMENTS)
    return sum((_folded(values[start : start + PIECE_ELEMENTS]) for start in pieces), 0.0)


def _folded(values: NDArray[Any]) -> float:
    squares = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(squares, squares, out=squares)
        size = squares.size
        while size > 1:
            half = size // 2
            squares[:half] += squares[size - half : size]
            size -= half
    return float(squares[0])


# --- reducers: putting the members' sums of one chunk together -------------------------------------------------------


Floats = NDArray[np.floating[Any]]

PIECE_ELEMENTS = 1 << 16
"""How much is added at a time: what stays in a core's own cache."""


MOST = float(np.finfo(np.float32).max)
"""Sums in float64 are not larger than this, so that their mean fits into float32, and who sends a larger one is known
in the round in which it does."""


class Reducer(Protocol):
    """Sums of one chunk by peer, the rank order, the divisor, the result's type → what everybody gets: for tests and
    benchmarks that look on, or strike in the midst of it.

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
