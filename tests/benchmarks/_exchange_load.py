"""What both candidates of the benchmark ``allreduce`` average, and how a result is judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

TIMEOUT_S = 120.0
"""A round's, for either candidate: never reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many peers, how their numbers travel, ``float32`` or ``int8``, and how many: 100 MB in float32."""

    peers: int
    codec: str
    elements: int = 25_000_000

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.peers} x {self.codec}"

    @property
    def least_bytes(self) -> float:
        """What each member must send at least: 2(K-1)/K of the vector on the wire, without scales or frames."""
        return 2 * (self.peers - 1) / self.peers * self.elements * (4 if self.codec == "float32" else 1)


def vector_of(slot: int, elements: int) -> Vector:
    """A member's numbers; the same in every process."""
    return np.random.default_rng(slot).standard_normal(elements, dtype=np.float32)


def error_of(result: Vector, peers: int) -> float:
    """The largest distance of an element to the mean of all members' numbers, as a share of that mean's largest."""
    total = np.zeros(len(result), dtype=np.float64)
    for slot in range(peers):
        total += vector_of(slot, len(result))
    total /= peers
    return float(np.abs(result - total).max() / np.abs(total).max())
