"""Read a shard as the stream of microbatches that a trainer feeds, from an exact, resumable position.

The order of the rows in each epoch is a seeded permutation that is *computed*, not stored: a four-round balanced
Feistel network over the row numbers, keyed by (shard digest, epoch), with cycle walking down to the number of rows
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Any row of any epoch costs a few hashes and no
memory, and the order does not depend on the version of any library: a cursor written today means the same rows in ten
years.

This is the only file of the package that imports torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from data_shards.documents import Packing, rows_of
from data_shards.privacy import Private
from data_shards.shard import Shard
from swarm.errors import ConfigError
from swarm.ids import MicrobatchId, PeerId

_ROUNDS = 4


def shuffled(index: int, size: int, key: bytes) -> int:
    """The image of ``index`` under the permutation of ``range(size)`` that ``key`` (at most 64 bytes) names.

    Cost: at most about four walks of four hashes, some 10 µs.
    """
    if size < 2:
        return index
    half_bits = ((size - 1).bit_length() + 1) // 2
    value = index
    while True:
        value = _feistel(value, half_bits, key)
        if value < size:
            return value


@dataclass(frozen=True, slots=True)
class ReadingOrder:
    """Which rows make up which microbatch. ``rows`` in the shard, ``microbatch_size`` rows per microbatch.

    The remainder of an epoch, fewer rows than a microbatch, is left out; other rows are in the remainder next time.
    """

    digest: str
    rows: int
    microbatch_size: int

    @property
    def microbatches(self) -> int:
        """Microbatches per epoch."""
        return self.rows // self.microbatch_size

    def rows_of(self, epoch: int, position: int) -> list[int]:
        """Row numbers of one microbatch."""
        key = hashlib.blake2b(f"{self.digest}/{epoch}".encode(), digest_size=32).digest()
        first = position * self.microbatch_size
        return [shuffled(index, self.rows, key) for index in range(first, first + self.microbatch_size)]

    def after(self, epoch: int, position: int) -> tuple[int, int]:
        """The cursor that follows."""
        return (epoch, position + 1) if position + 1 < self.microbatches else (epoch + 1, 0)

    def at(self, cursor: tuple[int, int]) -> tuple[int, int]:
        """The same place, written as the beginning of an epoch where it is the end of one."""
        epoch, position = cursor
        return (epoch + 1, 0) if position == self.microbatches else cursor

    def check(self, cursor: tuple[int, int]) -> None:
        """Raise ConfigError unless the cursor names a microbatch of this shard, or the place behind an epoch's last."""
        epoch, position = cursor
        if epoch < 0 or not 0 <= position <= self.microbatches:
            raise ConfigError(
                "cursor",
                cursor,
                f"(epoch >= 0, 0 <= position <= {self.microbatches})",
                f"It was written for another shard, context or microbatch size than shard {self.digest[:16]} has now.",
            )


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        text = number.to_bytes(1, "little") + right.to_bytes(8, "little")
        digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right


# --- the shard as a batch source -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardBatch(Private):
    """One microbatch: ``inputs`` and ``targets`` are int64, (B, T), the targets one token ahead, -1 where none counts;
    ``positions`` within documents where rows are packed by them, None of a stream."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.id}, {tuple(self.inputs.shape)}"


class ShardSource(Private):
    """Microbatches of one shard, in the order of its cursor: the pipeline's ``BatchSource``.

    ``path`` is the shard's directory, verified on opening (StateError when it is not what its manifest says,
    ConfigError when it is too short for one microbatch or was made with another ``tokenizer`` than the given digest).
    Not thread-safe: one trainer owns it.
    """

    def __init__(
        self,
        path: Path,
        *,
        trainer: PeerId,
        microbatch_size: int,
        context: int,
        tokenizer: str | None = None,
        packing: Packing = "stream",
    ) -> None:
        opened = Shard.open(path)
        if tokenizer is not None and opened.manifest.tokenizer != tokenizer:
            raise ConfigError(
                "shard",
                str(path),
                f"a shard made with the run's tokenizer {tokenizer[:16]}",
                f"This one was made with {opened.manifest.tokenizer[:16]}: build it again with that one.",
            )
        self._rows = rows_of(opened, context, packing)
        self._rows.require(microbatch_size)
        digest = opened.manifest.digest
        self.shard = digest[:16]
        self._trainer = trainer
        self._order = ReadingOrder(digest, self._rows.count, microbatch_size)
        self._cursor = (0, 0)

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, position) of the microbatch that ``take`` would return."""
        return self._cursor

    @property
    def microbatches_per_epoch(self) -> int:
        """Positions of one epoch."""
        return self._order.microbatches

    def seek(self, cursor: tuple[int, int]) -> None:
        """Continue from there. Raises ConfigError outside the shard; the cursor then stays where it was."""
        self._order.check(cursor)
        self._cursor = self._order.at(cursor)

    def take(self) -> ShardBatch:
        """The microbatch at the cursor, which then moves on. Raises StateError when the shard has changed since it was
        opened. Cost: some 100 µs, and the pages of its rows."""
        epoch, position = self._cursor
        rows = self._rows.read(self._order.rows_of(epoch, position))
        self._cursor = self._order.after(epoch, position)
        return ShardBatch(
            id=MicrobatchId(self._trainer, self.shard, epoch, position),
            inputs=torch.from_numpy(rows.inputs),
            targets=torch.from_numpy(rows.targets),
            positions=None if rows.positions is None else torch.from_numpy(rows.positions),
        )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"shard {self.shard}, {self._rows.private_size()}, at {self._cursor}"
