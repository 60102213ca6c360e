"""The vector a round fills chunk by chunk, and what all members must find equal about it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.averaging.partition import Chunk
from swarm.averaging.plan import RoundPlan
from swarm.averaging.reducers import PIECE_ELEMENTS
from swarm.averaging.wire import raw
from swarm.errors import Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload


class Output:
    """One vector of ``elements`` of the plan's result. Every chunk enters as encoded bytes, one's own included, so that
    what one's own machine computed and what others received cannot differ.

    ``store`` and ``settle`` may run on another thread, one chunk on one thread; the rest is for the event loop's.
    """

    def __init__(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._wire = plan.result_wire
        self.vector = np.empty(plan.elements, dtype=np.dtype(plan.result_dtype).newbyteorder("<"))
        self._seals: dict[int, tuple[float, bytes]] = {}

    def store(self, chunk: Chunk, encoded: Payload, source: PeerId | None = None) -> memoryview:
        """Take one chunk's result; returns its bytes for others, which stay as they are: those in the vector where the
        wire is exact, else ``encoded``. Raises Violation when length or values are wrong, naming its source, or else
        its reducer.

        Cost: some 2 ns per element, half of it for the digest. That is BLAKE3, which on a processor with AVX2 does 4 GB
        in the second in which sha256 does 0.4 to 0.8 and BLAKE2b 0.5 to 0.7.
        """
        source = source or self._plan.reducer(chunk)
        try:
            values = self._wire.decode(encoded, chunk.elements)
        except Violation as error:
            raise Violation(f"answered chunk {chunk.index} with {error.reason}", peer=source) from error
        squared = squared_norm(values)
        if not np.isfinite(squared):
            raise Violation(f"answered chunk {chunk.index} with values that are not finite, or too large", peer=source)
        self.vector[chunk.start : chunk.stop] = values
        self._seals[chunk.index] = (squared, blake3(encoded).digest())
        return raw(self.vector[chunk.start : chunk.stop]) if self._wire.exact else memoryview(encoded)

    def bytes_of(self, chunk: Chunk) -> int:
        """How many bytes a chunk's result has on the wire."""
        return self._wire.bytes_of(chunk.elements)

    def settle(self, chunk: Chunk, result: NDArray[Any]) -> memoryview:
        """:meth:`store` a result of our own as everybody else will."""
        return self.store(chunk, self._wire.encode(np.ascontiguousarray(result)))

    def release(self) -> None:
        """Give the vector back: there will be no result. A chunk that is being stored then is stored nowhere."""
        self.vector = self.vector[:0].copy()

    @property
    def stored(self) -> int:
        """How many chunks are there."""
        return len(self._seals)

    def squared_norm(self) -> float:
        """Squared L2 norm, the chunks' added in their order."""
        return sum((self._seals[chunk.index][0] for chunk in self._plan.chunks), 0.0)

    def digest(self) -> str:
        """Hex sha256 over the chunks' BLAKE3 in their order."""
        total = hashlib.sha256()
        for chunk in self._plan.chunks:
            total.update(self._seals[chunk.index][1])
        return total.hexdigest()


def squared_norm(values: NDArray[Any]) -> float:
    """Σ v² in float64, added piece by piece, a piece's by folding the upper half onto the lower until one is left.

    Only additions element by element: their order is ours and not that of a BLAS or of a CPU's vector width, so all
    machines get the same number. The square of a finite float32 and the sum of 10²³⁰ of them are finite in float64, as
    are those of all that a reducer gives in float64 (:data:`~swarm.averaging.reducers.MOST`).
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
