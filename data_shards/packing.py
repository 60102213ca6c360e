"""Rows: the token sequences of one length that a shard is read as.

**stream**: rows of ``context`` + 1 tokens start every ``context`` tokens: the last token of one row is the first of the
next, so that every token but the very first is a target at most once per epoch. What this costs: rows cross document
borders, so a model sees the tail of one document as context of the next (the end-of-text token tells it), a row's first
tokens are predicted with little context, and fewer than ``context`` tokens at the end of the shard are never read. No
token is padding.

Tokens that are no targets to learn from (what a user says, in a conversation) are targets of -1. Rows without any
target are left out.

The other packing, by documents, is in :mod:`data_shards.documents`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_shards.privacy import Private
from data_shards.shard import Shard
from swarm.errors import ConfigError

NOT_A_TARGET = -1

_AT_ONCE_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Rows(Private):
    """Some rows of a shard, int64 (rows, context): ``inputs``; ``targets``, the token after each or -1; and where rows
    are packed by documents, ``positions``, the place of each in its document: 0 begins one."""

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None = None

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.inputs.shape[0]} rows of {self.inputs.shape[1]}"


class StreamRows(Private):
    """A shard's rows of one context, packed as a stream. Opening reads the bits of ``counted.bin``, where there are
    some, and no tokens."""

    def __init__(self, shard: Shard, context: int) -> None:
        self._shard = shard
        self._context = context
        every = row_count(shard.manifest.tokens, context)
        self._kept = None if shard.counted is None else rows_with_targets(shard.counted, every, context)
        self.count = every if self._kept is None else len(self._kept)

    def read(self, numbers: list[int]) -> Rows:
        """The rows of these numbers. Raises StateError when the shard has changed since it was opened."""
        self._shard.check_unchanged()
        rows = numbers if self._kept is None else [int(self._kept[number]) for number in numbers]
        tokens = read_rows(self._shard.tokens, rows, self._context)
        self._shard.check_ids(tokens)
        targets = tokens[:, 1:].copy()
        if self._shard.counted is not None:
            for place, row in enumerate(rows):
                first = row * self._context + 1
                targets[place][~counted_between(self._shard.counted, first, first + self._context)] = NOT_A_TARGET
        return Rows(np.ascontiguousarray(tokens[:, :-1]), targets)

    @property
    def targets(self) -> int:
        """Tokens that are targets and count, in all rows. Reads the bits of ``counted.bin``."""
        counted, every = self._shard.counted, row_count(self._shard.manifest.tokens, self._context)
        if counted is None:
            return every * self._context
        step = max(1, _AT_ONCE_TOKENS // self._context) * self._context
        ends = range(1, every * self._context + 1, step)
        return sum(int(counted_between(counted, at, min(at + step, every * self._context + 1)).sum()) for at in ends)

    def require(self, rows: int) -> None:
        """Raise ConfigError when there are fewer than ``rows`` rows."""
        if self.count < rows:
            have = self._shard.manifest.tokens
            raise ConfigError(
                "shard",
                str(self._shard.path),
                f"a shard of at least {rows * self._context + 1} tokens ({rows} rows of {self._context})",
                f"This one has {have}{' with targets in few rows' if self._kept is not None else ''}: give it more "
                "text, or make context or microbatch_size smaller.",
            )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.count} rows of {self._context}"


def row_count(tokens: int, context: int) -> int:
    """Rows of ``context`` inputs and as many targets that ``tokens`` tokens hold as a stream."""
    return max(0, (tokens - 1) // context)


def read_rows(tokens: npt.NDArray[np.unsignedinteger], rows: list[int], context: int) -> npt.NDArray[np.int64]:
    """The rows as an int64 array of shape (len(rows), context + 1). ``tokens`` may be a memory map: only these rows
    are read."""
    out = np.empty((len(rows), context + 1), dtype=np.int64)
    for place, row in enumerate(rows):
        out[place] = tokens[row * context : row * context + context + 1]
    return out


def counted_between(counted: npt.NDArray[np.uint8], begin: int, end: int) -> npt.NDArray[np.bool_]:
    """Which of the tokens from ``begin`` up to ``end`` count."""
    first = begin // 8
    bits = np.unpackbits(np.asarray(counted[first : -(-end // 8)]), bitorder="little")
    return bits[begin - first * 8 : end - first * 8].astype(np.bool_)


def rows_with_targets(counted: npt.NDArray[np.uint8], rows: int, context: int) -> npt.NDArray[np.uint32]:
    """The rows of a stream that have a target which counts, ascending. Memory: four bytes a row, and some megabytes."""
    step = max(1, _AT_ONCE_TOKENS // context)
    kept = []
    for first in range(0, rows, step):
        last = min(rows, first + step)
        bits = counted_between(counted, first * context + 1, last * context + 1)
        kept.append(np.flatnonzero(bits.reshape(-1, context).any(axis=1)).astype(np.uint32) + np.uint32(first))
    return np.concatenate(kept) if kept else np.empty(0, dtype=np.uint32)
