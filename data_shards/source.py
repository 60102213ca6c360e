"""A shard as the stream of microbatches that a trainer feeds: the only file here that knows torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from data_shards.cursor import ReadingOrder
from data_shards.privacy import Private
from data_shards.shard import Shard
from swarm.errors import ConfigError
from swarm.ids import MicrobatchId, PeerId


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardBatch(Private):
    """One microbatch: ``inputs`` and ``targets`` are int64, (B, T), the targets one token ahead."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor

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
        self, path: Path, *, trainer: PeerId, microbatch_size: int, context: int, tokenizer: str | None = None
    ) -> None:
        opened = Shard.open(path)
        if tokenizer is not None and opened.manifest.tokenizer != tokenizer:
            raise ConfigError(
                "shard",
                str(path),
                f"a shard made with the run's tokenizer {tokenizer[:16]}",
                f"This one was made with {opened.manifest.tokenizer[:16]}: build it again with that one.",
            )
        opened.require(rows=microbatch_size, context=context)
        digest = opened.manifest.digest
        self.shard = digest[:16]
        self._opened = opened
        self._context = context
        self._trainer = trainer
        self._order = ReadingOrder(digest, opened.row_count(context), microbatch_size)
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
        rows = self._opened.rows(self._order.rows_of(epoch, position), self._context)
        self._cursor = self._order.after(epoch, position)
        tokens = torch.from_numpy(rows)
        return ShardBatch(
            id=MicrobatchId(self._trainer, self.shard, epoch, position),
            inputs=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(),
        )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"shard {self.shard}, {self._opened.private_size()}, at {self._cursor}"
