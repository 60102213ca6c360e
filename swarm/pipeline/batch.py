"""Microbatches as the pipeline sees them, and the source they come from."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from swarm.ids import MicrobatchId
from swarm.schema import Section

if TYPE_CHECKING:
    import torch


Packing = Literal["stream", "documents"]


class BatchConfig(Section):
    """``[batch]``: a step's size. ``packing`` is left out of what is written where it is ``stream``, so that manifests
    without it keep their id."""

    microbatch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rows in a microbatch, each of ``model.context`` tokens."""
    microbatches_per_step: Annotated[int, Field(ge=1, le=100_000)] = 16
    """Microbatches in a step; with ``averaging.mode = "local"`` in each batch of it."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest fraction of a step that one trainer may feed while others can fill it; at least an equal share."""
    packing: Annotated[Packing, Field(exclude_if=lambda value: value == "stream")] = "stream"
    """What a row is: ``stream``, a piece of all documents one after the other; ``documents``, whole ones that do not
    see each other."""


class Batch(Protocol):
    """One microbatch of private data: ``inputs`` and ``targets`` are int64, (B, T); targets below 0 are not counted."""

    @property
    def id(self) -> MicrobatchId:
        """Its identity for ever."""

    @property
    def inputs(self) -> torch.Tensor:
        """Token ids."""

    @property
    def targets(self) -> torch.Tensor:
        """The token that follows each."""

    @property
    def positions(self) -> torch.Tensor | None:
        """The place of each input in its document, int64 (B, T), 0 where one begins; None: the rows are a stream."""

    @property
    def choice(self) -> int:
        """Which variants of stages it passes: see :func:`~swarm.columns.takes`."""


class BatchSource(Protocol):
    """Where a trainer's microbatches come from. Implemented by ``data_shards``, which this package cannot see.

    ``take`` returns the microbatch at the cursor and moves it; ``cursor`` is (epoch, position) of the next one.
    """

    shard: str

    @property
    def choices(self) -> Collection[int]:
        """Those that its microbatches may have (:attr:`Batch.choice`)."""

    def take(self) -> Batch:
        """The next microbatch. Raises StateError when the shard on disk is not what its manifest says."""

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, position) of the microbatch that ``take`` would return."""

    @property
    def microbatches_per_epoch(self) -> int:
        """Positions of one epoch."""

    def seek(self, cursor: tuple[int, int]) -> None:
        """Continue from there. Raises ConfigError outside the shard."""
