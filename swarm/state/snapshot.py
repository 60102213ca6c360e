"""The whole state of one part after one step, as it is cut into chunks, digested, stored and downloaded.

The digest is a hash over a header and the hashes of all chunks. A peer that knows it can check a list of hashes from
anybody, and then each chunk from anybody, before the next one comes: of a state that many hand out it is known at once
which of them lied, and only that chunk is fetched again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import FlatLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """Parameters and both AdamW moments: flat float32 CPU vectors of ``layout.elements``. Nobody writes to them."""

    part: PartName
    step: int
    layout: FlatLayout
    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __post_init__(self) -> None:
        for vector in self.vectors:
            if (
                vector.shape != (self.layout.elements,)
                or vector.dtype != torch.float32
                or vector.is_cuda
                or not vector.is_contiguous()
            ):
                raise StateError(f"{self.part}: a vector of {vector.dtype} {tuple(vector.shape)} on {vector.device}")

    @staticmethod
    def blank(part: PartName, step: int, layout: FlatLayout) -> Snapshot:
        """A state of zeros, to be filled through its :meth:`buffers` by whoever makes it."""
        params, exp_avg, exp_avg_sq = (torch.zeros(layout.elements, dtype=torch.float32) for _ in range(3))
        return Snapshot(part=part, step=step, layout=layout, params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three vectors in the order of the digest and of the wire."""
        return self.params, self.exp_avg, self.exp_avg_sq

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by name, as views."""
        return self.layout.views(self.params)

    def buffers(self) -> tuple[memoryview, memoryview, memoryview]:
        """The vectors' bytes, little-endian, without a copy."""
        params, exp_avg, exp_avg_sq = (vector.view(torch.uint8).numpy().data for vector in self.vectors)
        return params, exp_avg, exp_avg_sq


def initial_snapshot(part: PartName, layout: FlatLayout, weights: Mapping[str, Tensor]) -> Snapshot:
    """Step 0: these weights and zero moments. Raises StateError when a weight is missing or misshapen."""
    params = layout.flatten(weights)
    return Snapshot(
        part=part,
        step=0,
        layout=layout,
        params=params,
        exp_avg=torch.zeros_like(params),
        exp_avg_sq=torch.zeros_like(params),
    )


def digest(snapshot: Snapshot) -> str:
    """Hex sha256 over part, names, shapes and the hashes of all chunks: see :mod:`swarm.state.snapshot`.

    Replicas compare these after every step. About 1 GB/s and more; lets go of the interpreter lock meanwhile.
    """
    return root_of(snapshot.part, snapshot.layout, hashes_of(snapshot.buffers()))


# --- chunks: how a state is cut, and the digest that vouches for every piece by itself -------------------------------


CHUNK_BYTES = 1 << 20
"""Part of what a digest means: another size gives another digest. Small enough that little is lost with a donor, large
enough that its hash (32 bytes) and its call (about a millisecond) cost nothing beside it."""
HASH_BYTES = 32
VECTORS = 3
_CHUNK_FORMAT = "swarm-state/2"


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
        """The number of chunks."""
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


def hash_of(chunk: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of one chunk, 32 bytes. Takes about 1 s a GB, without the interpreter lock."""
    return hashlib.sha256(chunk).digest()


def is_chunk(hashes: bytes, number: int, data: bytes | bytearray | memoryview) -> bool:
    """Return whether these bytes are the chunk of that number, as the hashes of all chunks say."""
    return hash_of(memoryview(data)) == hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]


def hashes_of(buffers: Sequence[memoryview]) -> bytes:
    """The hashes of all chunks of three vectors' bytes, one after the other. Reads everything once."""
    pieces = (buffer[start : start + CHUNK_BYTES] for buffer in buffers for start in range(0, len(buffer), CHUNK_BYTES))
    return b"".join(map(hash_of, pieces))


def root_of(part: PartName, layout: FlatLayout, hashes: bytes) -> str:
    """The digest of a state: hex sha256 of its header (part, names, shapes, size of chunks) and its hashes. Not of its
    step: a step that is given up leaves the state, and so its digest, what it was."""
    header = json.dumps([_CHUNK_FORMAT, CHUNK_BYTES, part, layout.shapes], separators=(",", ":"))
    return hashlib.sha256(header.encode() + hashes).hexdigest()
