"""What a trainer retains of its own microbatches until their step is closed."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import Refused
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Payload
from swarm.pipeline.batch import Batch, BatchSource
from swarm.pipeline.retention import payload_bytes


@dataclass(slots=True, eq=False)
class Kept:
    """One microbatch. Implements :class:`~swarm.pipeline.retention.Retained`.

    Its ``step`` follows the record whose hash begins with ``after``. ``output`` is the last stage's, ``gradient`` that
    of the first stage's input, both wire-encoded as they came; ``loss_gradient`` spares computing it from the output
    while the journey is under way. The batch itself is small, and read again from the shard where it is not known any
    more.
    """

    step: int
    batch: Batch
    after: str = ""
    route: tuple[PeerId, ...] = ()
    output: Payload | None = None
    gradient: Payload | None = None
    loss_gradient: Payload | None = None
    complete: bool = False

    @property
    def retained_bytes(self) -> int:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        return payload_bytes(self.output, self.gradient, self.loss_gradient)

    def clear(self) -> None:
        """Let go of everything large."""
        self.output = self.gradient = self.loss_gradient = None


def read_again(source: BatchSource, microbatch: MicrobatchId) -> Batch:
    """A microbatch of our shard, by its name; the cursor stays where it is. Raises Refused for another shard's."""
    if microbatch.shard != source.shard:
        raise Refused(f"{microbatch} is not of the shard that is open here")
    cursor = source.cursor
    source.seek((microbatch.epoch, microbatch.position))
    try:
        batch = source.take()
    finally:
        source.seek(cursor)
    if batch.id != microbatch:
        raise Refused(f"{microbatch} is another trainer's")
    return batch
