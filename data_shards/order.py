"""In which order rows are read: which of them make up the microbatch at an exact, resumable position. Pure.

The order of the rows in each epoch is a seeded permutation that is *computed*, not stored: a four-round balanced
Feistel network over the row numbers, keyed by (shard digest, epoch), with cycle walking down to the number of rows
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Any row of any epoch costs a few hashes and no
memory, and the order does not depend on the version of any library: a cursor written today means the same rows in ten
years.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

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
    choice: int = 0
    """That of all its microbatches: see :meth:`choice_of`."""

    @property
    def microbatches(self) -> int:
        """Microbatches per epoch."""
        return self.rows // self.microbatch_size

    def rows_of(self, epoch: int, position: int) -> list[int]:
        """Row numbers of one microbatch."""
        key = _key(self.digest, epoch)
        first = position * self.microbatch_size
        return [shuffled(index, self.rows, key) for index in range(first, first + self.microbatch_size)]

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that any of its microbatches takes."""
        return (self.choice,)

    def choice_of(self, epoch: int, position: int) -> int:
        """Which of the run's choices one microbatch takes."""
        return self.choice

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


@dataclass(frozen=True, slots=True, eq=False)
class RoutedOrder(ReadingOrder):
    """The same where the rows of a microbatch have their choice in common: ``groups`` has the rows of each choice.

    The rows of a choice are read again and again, each time in another order, and a microbatch that begins with the
    last of them goes on with the first of the next time: none is left out, and none comes twice before all others of
    its choice have come. Microbatches come in the order in which they would be full if all rows were read in turn, so
    that each choice has its share of any stretch, and what is in one follows from its number alone. An epoch is so many
    microbatches as all rows fill.
    """

    groups: tuple[npt.NDArray[np.integer[Any]], ...] = ()

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that any of its microbatches takes."""
        return tuple(choice for choice, rows in enumerate(self.groups) if len(rows))

    def rows_of(self, epoch: int, position: int) -> list[int]:
        """Row numbers of one microbatch."""
        choice, number = self._place(epoch, position)
        rows, first = self.groups[choice], number * self.microbatch_size
        times = (divmod(index, len(rows)) for index in range(first, first + self.microbatch_size))
        return [int(rows[shuffled(index, len(rows), _key(self.digest, time, choice))]) for time, index in times]

    def choice_of(self, epoch: int, position: int) -> int:
        """Which of the run's choices one microbatch takes."""
        return self._place(epoch, position)[0]

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """Return (choice, its how manieth) of one microbatch. The first are full with so many of these choices that the
        share of each is reached, rounded down; after them comes whichever is full next, the lowest of several."""
        before = epoch * self.microbatches + position
        done = [before * len(rows) // self.rows for rows in self.groups]
        due = [(Fraction(full + 1, len(rows)), choice)
               for choice, (full, rows) in enumerate(zip(done, self.groups, strict=True)) if len(rows)]  # fmt: skip
        heapq.heapify(due)
        for _ in range(before - sum(done)):
            when, choice = due[0]
            heapq.heapreplace(due, (when + Fraction(1, len(self.groups[choice])), choice))
        when, choice = due[0]
        return choice, int(when * len(self.groups[choice])) - 1


def _key(*names: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=32).digest()


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        text = number.to_bytes(1, "little") + right.to_bytes(8, "little")
        digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right
