"""How a part's state is cut, and the digest that vouches for every piece of it by itself.

The digest is a hash over a header and the hashes of all chunks. So whoever knows it can check a list of hashes from
anybody, and then each chunk from anybody, before the next one comes: of a state that many hand out it is known at once
which of them lied, and only that chunk is fetched again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.ids import PartName
from swarm.models.layout import FlatLayout

CHUNK_BYTES = 1 << 20
"""Part of what a digest means: another size gives another digest. Small enough that little is lost with a donor, large
enough that its hash (32 bytes) and its call (about a millisecond) cost nothing beside it."""
HASH_BYTES = 32
VECTORS = 3
_FORMAT = "swarm-state/2"


@dataclass(frozen=True, slots=True)
class Chunk:
    """``length`` bytes from ``start`` of one of the three vectors; never across two of them."""

    vector: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of a state whose vectors have ``elements`` float32 each, numbered vector by vector."""

    elements: int

    @property
    def chunks(self) -> int:
        """How many there are."""
        return VECTORS * self._per_vector

    @property
    def total_bytes(self) -> int:
        """All three vectors."""
        return 4 * VECTORS * self.elements

    def __getitem__(self, index: int) -> Chunk:
        """Raises IndexError for a number that is none."""
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk {index} of {self.chunks}")
        vector, place = divmod(index, self._per_vector)
        start = place * CHUNK_BYTES
        return Chunk(vector, start, min(CHUNK_BYTES, 4 * self.elements - start))

    @property
    def _per_vector(self) -> int:
        return -(-4 * self.elements // CHUNK_BYTES)


def hash_of(chunk: memoryview) -> bytes:
    """What vouches for one chunk: 32 bytes. About 1 GB/s; lets go of the interpreter lock meanwhile."""
    return hashlib.sha256(chunk).digest()


def hashes_of(buffers: Sequence[memoryview]) -> bytes:
    """The hashes of all chunks of three vectors' bytes, one after the other. Reads everything once."""
    pieces = (buffer[start : start + CHUNK_BYTES] for buffer in buffers for start in range(0, len(buffer), CHUNK_BYTES))
    return b"".join(map(hash_of, pieces))


def root_of(part: PartName, layout: FlatLayout, hashes: bytes) -> str:
    """The digest of a state: hex sha256 of its header (part, names, shapes, size of chunks) and its hashes. Not of its
    step: a step that is given up leaves the state, and so its digest, what it was."""
    header = json.dumps([_FORMAT, CHUNK_BYTES, part, layout.shapes], separators=(",", ":"))
    return hashlib.sha256(header.encode() + hashes).hexdigest()
