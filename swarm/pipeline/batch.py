"""Microbatches as the pipeline sees them, and the source they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from swarm.ids import MicrobatchId
from swarm.schema import Section

if TYPE_CHECKING:
    import torch


Packing = Literal["stream", "documents"]


class BatchConfig(Section):
    """A step's size. ``max_share`` bounds the fraction of a step that one trainer may be leased (always at least
    an equal share, so that the trainers together can fill it). ``packing``: a row is a piece of the stream of all
    documents, or whole documents that do not see each other; the first is left out of what is written, so that
    manifests without it keep their id."""

    microbatch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    microbatches_per_step: Annotated[int, Field(ge=1, le=100_000)] = 16
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    packing: Annotated[Packing, Field(exclude_if=lambda value: value == "stream")] = "stream"


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


class BatchSource(Protocol):
    """Where a trainer's microbatches come from. Implemented by ``data_shards``, which this package cannot see.

    ``take`` returns the microbatch at the cursor and moves it; ``cursor`` is (epoch, position) of the next one.
    """

    shard: str

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
