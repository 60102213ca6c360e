"""Read a shard as the stream of microbatches that a trainer feeds, from an exact, resumable position.

This is the only file of the package that imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_shards.documents import DocumentRows, Packing, rows_of
from data_shards.order import ReadingOrder, RoutedOrder
from data_shards.packing import StreamRows
from data_shards.privacy import Private
from data_shards.router import Router, Whole
from data_shards.shard import Shard
from swarm.errors import ConfigError
from swarm.ids import MicrobatchId, PeerId

_AT_ONCE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardBatch(Private):
    """One microbatch: ``inputs`` and ``targets`` are int64, (B, T), the targets one token ahead, -1 where none counts;
    ``positions`` within documents where rows are packed by them, None of a stream; ``choice`` which variant of each
    stage it takes, modulo their number."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None
    choice: int = 0

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.id}, {tuple(self.inputs.shape)}"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a microbatch is: so many ``rows`` of so many tokens, packed so."""

    rows: int
    context: int
    packing: Packing = "stream"


class ShardSource(Private):
    """Microbatches of one shard, in the order of its cursor: the pipeline's ``BatchSource``.

    ``path`` is the shard's directory, verified on opening (StateError when it is not what its manifest says,
    ConfigError when it is too short for one microbatch or was made with another ``tokenizer`` than the given digest).
    ``by`` says which of the run's choices rows take, or all of them: a router reads every row once, some ten seconds a
    gigabyte. Not thread-safe: one trainer owns it.
    """

    def __init__(
        self,
        path: Path,
        *,
        trainer: PeerId,
        shape: BatchShape,
        tokenizer: str | None = None,
        by: Router | int = 0,
    ) -> None:
        opened = Shard.open(path)
        if tokenizer is not None and opened.manifest.tokenizer != tokenizer:
            raise ConfigError(
                "shard",
                str(path),
                f"a shard made with the run's tokenizer {tokenizer[:16]}",
                f"This one was made with {opened.manifest.tokenizer[:16]}: build it again with that one.",
            )
        self._rows = rows_of(opened, shape.context, shape.packing)
        self._rows.require(shape.rows)
        digest = opened.manifest.digest
        self.shard = digest[:16]
        self._trainer = trainer
        if isinstance(by, int):
            self._order = ReadingOrder(digest, self._rows.count, shape.rows, by)
        else:
            of_rows = _choices(self._rows, by, shape.context)
            groups = tuple(np.flatnonzero(of_rows == choice) for choice in range(len(by)))
            self._order = RoutedOrder(digest, self._rows.count, shape.rows, groups=groups)
        self._cursor = (0, 0)

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that its microbatches take."""
        return self._order.choices

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
            choice=self._order.choice_of(epoch, position),
        )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"shard {self.shard}, {self._rows.private_size()}, at {self._cursor}"


def _choices(rows: StreamRows | DocumentRows, router: Router, context: int) -> Whole:
    """The choice of each row."""
    step, found = max(1, _AT_ONCE_TOKENS // context), []
    for first in range(0, rows.count, step):
        read = rows.read(list(range(first, min(rows.count, first + step))))
        found.append(router.choices_of_rows(read.inputs, read.targets))
    return np.concatenate(found)
