"""The whole state of one part after one step, as it is cut into chunks, digested, stored and downloaded.

The digest is a hash over a header and the hashes of all chunks. A peer that knows it can check a list of hashes from
anybody, and then each chunk from anybody, before the next one comes: of a state that many hand out it is known at once
which of them lied, and only that chunk is fetched again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import FlatLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Snapshot:
    """The state's ``vectors``, as many as the layout names and in that order, the parameters first: flat float32 CPU
    vectors of ``layout.lengths``.

    They may be lent: nobody writes to them for as long as somebody holds this object, and who needs them holds it.
    """

    part: PartName
    step: int
    layout: FlatLayout
    vectors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.vectors) != len(self.layout.vectors):
            raise StateError(f"{self.part}: {len(self.vectors)} vectors, expected {', '.join(self.layout.vectors)}")
        for vector, elements in zip(self.vectors, self.layout.lengths, strict=True):
            if (
                vector.shape != (elements,)
                or vector.dtype != torch.float32
                or vector.device.type != "cpu"
                or not vector.is_contiguous()
            ):
                raise StateError(f"{self.part}: a vector of {vector.dtype} {tuple(vector.shape)} on {vector.device}")

    @staticmethod
    def blank(part: PartName, step: int, layout: FlatLayout) -> Snapshot:
        """A state of zeros, to be filled through its :meth:`buffers` by the one who makes it."""
        vectors = tuple(torch.zeros(elements, dtype=torch.float32) for elements in layout.lengths)
        return Snapshot(part=part, step=step, layout=layout, vectors=vectors)

    def apart(self) -> Snapshot:
        """Return the same state in vectors of its own."""
        return replace(self, vectors=tuple(vector.clone() for vector in self.vectors))

    @property
    def params(self) -> Tensor:
        """The parameters' vector."""
        return self.vectors[0]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by name, as views."""
        return self.layout.views(self.params)

    def buffers(self) -> tuple[memoryview, ...]:
        """The vectors' bytes, little-endian, without a copy: to be used while the snapshot is held."""
        return tuple(vector.view(torch.uint8).numpy().data for vector in self.vectors)


def initial_snapshot(part: PartName, layout: FlatLayout, weights: Mapping[str, Tensor]) -> Snapshot:
    """Step 0: these weights, and zeros. Raises StateError when a weight is missing or misshapen."""
    params = layout.flatten(weights)
    kept = (torch.zeros(elements) for elements in layout.lengths[1:])
    return Snapshot(part=part, step=0, layout=layout, vectors=(params, *kept))


def digest(snapshot: Snapshot) -> str:
    """Hex sha256 over part, names, shapes and the hashes of all chunks: see :mod:`swarm.state.snapshot`.

    Replicas compare these after every step. About 1 GB/s and more; lets go of the interpreter lock meanwhile.
    """
    return root_of(snapshot.part, snapshot.layout, hashes_of(snapshot.buffers()))


# --- chunks: how a state is cut, and the digest that attests every piece by itself -------------------------------


CHUNK_BYTES = 1 << 20
"""Part of what a digest means: another size gives another digest. Small enough that little is lost with a donor, large
enough that its hash (32 bytes) and its call (about a millisecond) cost nothing besides it."""
HASH_BYTES = 32
_CHUNK_FORMAT = "swarm-state/2"


@dataclass(frozen=True, slots=True)
class Chunk:
    """``length`` bytes from ``start`` of one of the vectors; never across two of them."""

    vector: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of a state's float32 vectors, which have so many elements, numbered vector by vector."""

    lengths: tuple[int, ...]

    @staticmethod
    def of(layout: FlatLayout) -> Cut:
        """Return the cut of a state that lies so."""
        return Cut(layout.lengths)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return sum(map(_chunks_of, self.lengths))

    @property
    def total_bytes(self) -> int:
        """All vectors."""
        return 4 * sum(self.lengths)

    def __getitem__(self, index: int) -> Chunk:
        """Raises IndexError for a number that is none."""
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk {index} of {self.chunks}")
        vector, place = 0, index
        while place >= (chunks := _chunks_of(self.lengths[vector])):
            vector, place = vector + 1, place - chunks
        start = place * CHUNK_BYTES
        return Chunk(vector, start, min(CHUNK_BYTES, 4 * self.lengths[vector] - start))


def _chunks_of(elements: int) -> int:
    return -(-4 * elements // CHUNK_BYTES)


def hash_of(chunk: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of one chunk, 32 bytes. Takes about 1 s a GB, without the interpreter lock."""
    return hashlib.sha256(chunk).digest()


def is_chunk(hashes: bytes, number: int, data: bytes | bytearray | memoryview) -> bool:
    """Return whether these bytes are the chunk of that number, as the hashes of all chunks say."""
    return hash_of(memoryview(data)) == hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]


def hashes_of(buffers: Sequence[memoryview]) -> bytes:
    """The hashes of all chunks of some vectors' bytes, one after the other. Reads everything once."""
    pieces = (buffer[start : start + CHUNK_BYTES] for buffer in buffers for start in range(0, len(buffer), CHUNK_BYTES))
    return b"".join(map(hash_of, pieces))


def root_of(part: PartName, layout: FlatLayout, hashes: bytes) -> str:
    """The digest of a state: hex sha256 of its header (part, names, shapes, size of chunks) and its hashes. Not of its
    step: a step that is given up leaves the state, and so its digest, what it was."""
    header = json.dumps([_CHUNK_FORMAT, CHUNK_BYTES, part, layout.shapes], separators=(",", ":"))
    return hashlib.sha256(header.encode() + hashes).hexdigest()
