"""The format of a part's file: a safetensors file whose tensors are the state's vectors, so that any tool reads it and
each chunk of the state has its place in it.

First the header, then the parameters under their own names, then the optimizer's vectors under theirs, AdamW's as
``exp_avg.NAME`` and ``exp_avg_sq.NAME``, in the order of the layout and without the gaps of the flat vectors. The
metadata holds the hashes of all chunks beside the digest that they give: anyone who hands out a file describes it from
its header alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import VECTORS, FlatLayout
from swarm.parsing import parse_json
from swarm.state.checkpoints.files import FORMAT, REMEDY, part_path, read_header
from swarm.state.download import Data, Wanted
from swarm.state.snapshot import Chunk
from swarm.state.transfer import ChunkRequest, DescribeRequest, chunk_asked

MAX_VECTORS = 8
"""More than any optimizer keeps."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class PartFile:
    """A part's file: which state it holds, with the hashes of all chunks that give its digest, and where each chunk
    lies. ``meta`` are the writer's own words, beside those of the format: the run."""

    state: Wanted
    hashes: bytes
    meta: Mapping[str, str]

    @staticmethod
    def read(path: Path) -> PartFile:
        """Read a file's header. Raises StateError for a file that is not, but for the bytes of its tensors, what its
        metadata says; before anything of the tensors' size is allocated."""
        found = read_header(path)
        meta = dict(found.metadata)
        try:
            if (form := meta.pop("format", None)) != FORMAT:
                raise StateError(f"format {form!r} is not {FORMAT!r}")
            part, step, shapes, *vectors = parse_json(meta.pop("state"))
            layout = FlatLayout.from_shapes((str(name), tuple(map(int, shape))) for name, shape in shapes)
            if len(set(layout.names)) < len(layout.names) or any(
                min(slot.shape, default=0) < 0 for slot in layout.slots
            ):
                raise StateError("it names a parameter twice, or one of no size")
            if vectors:
                layout = layout.kept_by(_checked(*vectors))
            state = Wanted(part=PartName(str(part)), step=int(step), digest=meta.pop("digest"), layout=layout)
            file = PartFile(state, bytes.fromhex(meta.pop("hashes")), meta)
            if file._document() != found.header or (file.begins, file.size) != (found.begins, found.size):
                raise StateError("its header is not that of the state that it names")
            if not state.is_of(file.hashes):
                raise StateError("the hashes of its chunks do not give its digest")
        except (StateError, LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise StateError(f"{path}: {error}. {REMEDY}") from error
        return file

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor: their number, then JSON, padded to a multiple of eight."""
        text = json.dumps(self._document(), separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def begins(self) -> int:
        """The offset of the tensors."""
        return len(self.header)

    @property
    def size(self) -> int:
        """Bytes of the whole file, whatever the hashes and the digest are."""
        return self.begins + 4 * self._begins[-1]

    def read_chunk(self, descriptor: int, number: int) -> bytes | bytearray:
        """A chunk out of the file, the gaps between parameters included. Raises StateError when the file is too short,
        and OSError."""
        chunk = self.state.cut[number]
        offset, pieces = self._place(chunk)
        stored = os.pread(descriptor, sum(stop - start for start, stop in pieces), offset)
        if pieces == [(0, chunk.length)] and len(stored) == chunk.length:
            return stored
        data, taken = bytearray(chunk.length), 0
        for start, stop in pieces:
            data[start:stop] = stored[taken : taken + stop - start]
            taken += stop - start
        if taken != len(stored):
            raise StateError("it ends too early")
        return data

    def write_chunk(self, descriptor: int, number: int, data: Data) -> None:
        """Put a chunk where it belongs. Raises OSError."""
        offset, pieces = self._place(self.state.cut[number])
        write_at(descriptor, b"".join(data[start:stop] for start, stop in pieces), offset)

    def read_tensor(self, descriptor: int, vector: int, name: str, into: memoryview) -> None:
        """Fill ``into`` with one tensor of the vector of that number: its bytes, unverified. Raises StateError when the
        file is too short, OSError, and KeyError for a name that is not in it."""
        number = self._numbers[name]
        offset = self.begins + 4 * (self._begins[vector] + self._starts[vector][1][number])
        while into:
            got = os.preadv(descriptor, [into], offset)
            if not got:
                raise StateError("it ends too early")
            into, offset = into[got:], offset + got

    # --- what follows from the layout ----------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        """The header's JSON: the metadata, and every tensor in the file's order."""
        own = {"part": str(self.state.part), "step": str(self.state.step), "format": FORMAT}
        layout = self.state.layout
        vectors = [] if layout.vectors == VECTORS else [layout.vectors]
        own |= {"state": json.dumps([self.state.part, self.state.step, layout.shapes, *vectors])}
        own |= {"digest": self.state.digest, "hashes": self.hashes.hex()}
        document: dict[str, Any] = {"__metadata__": {**self.meta, **own}}
        begins = 0
        for vector in layout.vectors:
            prefix = "" if vector == layout.vectors[0] else f"{vector}."
            for slot in layout.kept_in(vector).slots:
                ends = begins + 4 * slot.elements
                shape = list(slot.shape)
                document[prefix + slot.name] = {"dtype": "F32", "shape": shape, "data_offsets": [begins, ends]}
                begins = ends
        return document

    @cached_property
    def _begins(self) -> list[int]:
        """Return how many elements are stored before each vector, and before the end: without gaps."""
        layout = self.state.layout
        stored = (sum(slot.elements for slot in layout.kept_in(vector).slots) for vector in layout.vectors)
        return [0, *accumulate(stored)]

    @cached_property
    def _starts(self) -> list[tuple[list[int], list[int]]]:
        """Return for each vector the start of each tensor: in the flat vector, and in its stored form."""
        found = []
        for vector in self.state.layout.vectors:
            slots = self.state.layout.kept_in(vector).slots
            stored = accumulate((slot.elements for slot in slots), initial=0)
            found.append(([slot.offset for slot in slots], [*stored][:-1]))
        return found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The place of each parameter among all, by name."""
        return {slot.name: number for number, slot in enumerate(self.state.layout.slots)}

    def _place(self, chunk: Chunk) -> tuple[int, list[tuple[int, int]]]:
        """Return the pieces of a chunk in the file, with their bytes (start, stop), one after another."""
        first, last = chunk.start // 4, (chunk.start + chunk.length) // 4
        flat, stored = self._starts[chunk.vector]
        slots = self.state.layout.kept_in(self.state.layout.vectors[chunk.vector]).slots
        offset, pieces = 0, list[tuple[int, int]]()
        for index in range(max(0, bisect_right(flat, first) - 1), len(flat)):
            slot = slots[index]
            if slot.offset >= last:
                break
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
            if start < stop:
                if not pieces:
                    offset = stored[index] + start - slot.offset
                pieces.append((4 * (start - first), 4 * (stop - first)))
        return self.begins + 4 * (self._begins[chunk.vector] + offset), pieces


def _checked(vectors: list[str]) -> tuple[str, ...]:
    """Return the names of a state's vectors as a file has them. Raises ValueError for what cannot be such names."""
    names = tuple(map(str, vectors))
    if not 1 <= len(set(names)) == len(names) <= MAX_VECTORS or any("." in name for name in names):
        raise ValueError(f"vectors {names}")
    return names


class StoredParts:
    """The parts below a root as one who hands them out needs them: by name, hashes and chunks. Blocking. Headers read
    last are remembered, as long as their file is the same. The bytes are handed out as they lie there: the receiver
    verifies them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def hashes(self, asked: DescribeRequest) -> bytes:
        """The hashes of all chunks. Raises FileNotFoundError where no such part lies, or that of another history,
        StateError for a damaged one, and OSError."""
        with self._opened(asked) as (_, file):
            return file.hashes

    def chunk(self, asked: ChunkRequest) -> bytes | bytearray:
        """One chunk. Raises as :meth:`hashes`, and Violation for a number that is none."""
        with self._opened(asked) as (descriptor, file):
            chunk_asked(file.state.cut, asked)
            return file.read_chunk(descriptor, asked.chunk)

    @contextlib.contextmanager
    def _opened(self, asked: DescribeRequest) -> Iterator[tuple[int, PartFile]]:
        path = part_path(self._root, asked.step, PartName(asked.part))
        with opened(path, os.O_RDONLY) as descriptor:
            there = os.fstat(descriptor)
            file = _remembered(path, (there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns))
            if file.state.describe() != DescribeRequest(part=asked.part, step=asked.step, digest=asked.digest):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            yield descriptor, file


@lru_cache(maxsize=16)
def _remembered(path: Path, same: tuple[int, ...]) -> PartFile:
    return PartFile.read(path)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for as long as this is; what it makes is readable by all. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: Data, offset: int) -> None:
    """Write all of it there. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
