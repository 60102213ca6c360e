"""Rows of whole documents: packed so that few positions are left over, and so that no document sees another.

A document of n tokens fills n - 1 positions: each token but the last is an input, the one after it its target. A
longer one than a row is cut, and every piece is a document of its own from then on. Pieces come in the order of the
shard. Each goes to the open row with the least room that still takes it (best fit); 64 rows are open at a time, and
when none takes it, the fullest is closed for a new one. Pieces without a target that counts are left out. What is left
over in a row is padding: input 0, target -1, positions of its own.

Where the pieces are is computed once for a shard and a length of rows, in some microseconds a document, and kept beside
the shard (``rows-1024.bin``), mapped and not loaded: 12 bytes a piece and 8 a row.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_shards.manifest import broken
from data_shards.packing import NOT_A_TARGET, Rows, StreamRows, counted_between
from data_shards.privacy import Private
from data_shards.shard import Shard
from swarm.errors import ConfigError

Packing = Literal["stream", "documents"]
OPEN_ROWS = 64

_HEADER_BYTES = 512
_DOCUMENTS_AT_ONCE = 1 << 16
_TOKENS_AT_ONCE = 1 << 22


def rows_of(shard: Shard, context: int, packing: Packing = "stream") -> StreamRows | DocumentRows:
    """The rows of a shard, as a run's ``batch.packing`` says. Raises StateError where it has changed."""
    return StreamRows(shard, context) if packing == "stream" else DocumentRows(shard, context)


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """Which pieces are in which row: those of row r are ``first[r]`` up to ``first[r + 1]``; piece p is ``length[p]``
    inputs from the token ``begin[p]`` on."""

    first: npt.NDArray[np.uint64]
    begin: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint32]


class DocumentRows(Private):
    """A shard's rows of one context, packed by documents."""

    def __init__(self, shard: Shard, context: int) -> None:
        self._shard = shard
        self._context = context
        self._file = shard.path / f"rows-{context}.bin"
        self._plan = _kept(self._file, _header(shard, context)) or self._make()
        self.count = len(self._plan.first) - 1

    def read(self, numbers: list[int]) -> Rows:
        """The rows of these numbers. Raises StateError when the shard has changed since it was opened."""
        self._shard.check_unchanged()
        inputs = np.zeros((len(numbers), self._context), dtype=np.int64)
        targets = np.full((len(numbers), self._context), NOT_A_TARGET, dtype=np.int64)
        positions = np.zeros((len(numbers), self._context), dtype=np.int64)
        for place, number in enumerate(numbers):
            at = 0
            for piece in range(int(self._plan.first[number]), int(self._plan.first[number + 1])):
                begin, length = int(self._plan.begin[piece]), int(self._plan.length[piece])
                end = at + length
                if end > self._context or begin + length >= self._shard.manifest.tokens:
                    raise broken(self._file, "it names tokens that are not there: delete it, it is made again")
                tokens = np.asarray(self._shard.tokens[begin : begin + length + 1])
                self._shard.check_ids(tokens)
                inputs[place, at:end] = tokens[:-1]
                targets[place, at:end] = tokens[1:]
                if self._shard.counted is not None:
                    left_out = ~counted_between(self._shard.counted, begin + 1, begin + 1 + length)
                    targets[place, at:end][left_out] = NOT_A_TARGET
                positions[place, at:end] = np.arange(length)
                at = end
            positions[place, at:] = np.arange(self._context - at)
        return Rows(inputs, targets, positions)

    @property
    def filled(self) -> float:
        """The share of positions that are no padding."""
        return float(self._plan.length.sum(dtype=np.int64)) / max(1, self.count * self._context)

    @property
    def targets(self) -> int:
        """Tokens that are targets and count, in all rows."""
        counted, total = self._shard.counted, int(self._plan.length.sum(dtype=np.int64))
        if counted is None:
            return total
        order = np.argsort(self._plan.begin, kind="stable")
        begin = self._plan.begin[order].astype(np.int64)
        return int(_targets_in(counted, begin, self._plan.length[order].astype(np.int64)).sum())

    def require(self, rows: int) -> None:
        """Raise ConfigError when there are fewer than ``rows`` rows."""
        if self.count < rows:
            raise ConfigError(
                "shard",
                str(self._shard.path),
                f"a shard whose documents fill at least {rows} rows of {self._context}",
                f"This one's {self._shard.manifest.documents} documents fill {self.count}: give it more text, or make "
                "context or microbatch_size smaller.",
            )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.count} rows of {self._context}"

    def _make(self) -> RowPlan:
        self._shard.check_unchanged()
        plan = pack(_pieces(self._shard, self._context), self._context)
        _keep(self._file, _header(self._shard, self._context), plan)
        return plan


# --- packing ---------------------------------------------------------------------------------------------------------


def pack(pieces: Iterator[tuple[int, int]], context: int) -> RowPlan:
    """Put pieces (first token, inputs) into rows. Memory: 12 bytes a piece, 8 a row."""
    first, begin, length = array("Q", [0]), array("Q"), array("I")
    rooms: list[tuple[int, int]] = []  # of open rows: room, number; ascending
    members: dict[int, list[tuple[int, int]]] = {}

    def close(row: int) -> None:
        for start, inputs in members.pop(row):
            begin.append(start)
            length.append(inputs)
        first.append(len(begin))

    made = 0
    for start, inputs in pieces:
        place = bisect.bisect_left(rooms, (inputs, -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            if len(rooms) >= OPEN_ROWS:
                close(rooms.pop(0)[1])
            room, row = context, made
            members[row] = []
            made += 1
        members[row].append((start, inputs))
        if room > inputs:
            bisect.insort(rooms, (room - inputs, row))
        else:
            close(row)
    for _, row in rooms:
        close(row)
    return RowPlan(np.array(first, np.uint64), np.array(begin, np.uint64), np.array(length, np.uint32))


def _pieces(shard: Shard, context: int) -> Iterator[tuple[int, int]]:
    """The pieces of all documents in their order that have a target which counts."""
    for first in range(0, shard.manifest.documents, _DOCUMENTS_AT_ONCE):
        starts = np.asarray(shard.starts[first : first + _DOCUMENTS_AT_ONCE + 1]).astype(np.int64)
        if len(starts) <= _DOCUMENTS_AT_ONCE:
            starts = np.append(starts, shard.manifest.tokens)
        inputs = np.diff(starts) - 1
        each = -(-inputs // context)
        document = np.repeat(np.arange(len(inputs)), each)
        number = np.arange(len(document)) - np.repeat(np.cumsum(each) - each, each)
        begin = starts[document] + number * context
        length = np.minimum(context, inputs[document] - number * context)
        if shard.counted is not None and len(begin):
            kept = _targets_in(shard.counted, begin, length) > 0
            begin, length = begin[kept], length[kept]
        yield from zip(begin.tolist(), length.tolist(), strict=True)


def _targets_in(
    counted: npt.NDArray[np.uint8], begin: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return how many targets count in each of these pieces, which ascend."""
    found = np.zeros(len(begin), dtype=np.int64)
    at = 0
    while at < len(begin):
        origin = int(begin[at])
        last = max(at + 1, int(np.searchsorted(begin, origin + _TOKENS_AT_ONCE)))
        bits = counted_between(counted, origin, int(begin[last - 1] + length[last - 1]) + 1)
        before = np.concatenate([[0], np.cumsum(bits, dtype=np.int64)])
        targets = begin[at:last] + 1 - origin
        found[at:last] = before[targets + length[at:last]] - before[targets]
        at = last
    return found


# --- plans that are kept ---------------------------------------------------------------------------------------------


def _header(shard: Shard, context: int) -> dict[str, Any]:
    manifest = shard.manifest
    counted = None if manifest.counted is None else manifest.counted.sha256
    made_of = {"tokens": manifest.tokens, "starts": manifest.starts.sha256, "counted": counted}
    return {"format": 1, **made_of, "context": context, "open": OPEN_ROWS}


def _kept(file: Path, header: dict[str, Any]) -> RowPlan | None:
    """The plan in a file, where it is of this shard and whole."""
    try:
        with file.open("rb") as opened:
            said = json.loads(opened.read(_HEADER_BYTES))
        rows, pieces = said.pop("rows"), said.pop("pieces")
        sizes = ((rows + 1) * 8, pieces * 8, pieces * 4)
        if said != header or file.stat().st_size != _HEADER_BYTES + sum(sizes):
            return None
        data = np.memmap(file, dtype=np.uint8, mode="r", offset=_HEADER_BYTES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    first, begin, length = np.split(data, [sizes[0], sizes[0] + sizes[1]])
    return RowPlan(first.view("<u8"), begin.view("<u8"), length.view("<u4"))


def _keep(file: Path, header: dict[str, Any], plan: RowPlan) -> None:
    """Where the directory is read-only, nothing is kept: the plan is made again the next time."""
    said = json.dumps(header | {"rows": len(plan.first) - 1, "pieces": len(plan.begin)})
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(said.encode().ljust(_HEADER_BYTES))
                for part, dtype in ((plan.first, "<u8"), (plan.begin, "<u8"), (plan.length, "<u4")):
                    opened.write(np.ascontiguousarray(part.astype(dtype, copy=False)).tobytes())
            os.replace(draft, file)
        except BaseException:
            os.unlink(draft)
            raise
