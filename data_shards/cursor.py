"""The exact, resumable position in a shard, and the order of its rows in each epoch.

The order is a seeded permutation that is *computed*, not stored: a four-round balanced Feistel network over the row
numbers, keyed by (shard digest, epoch), with cycle walking down to the number of rows (Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002). Any row of any epoch costs a few hashes and no memory, and the order does not
depend on the version of any library: a cursor written today means the same rows in ten years.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from swarm.errors import ConfigError

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
