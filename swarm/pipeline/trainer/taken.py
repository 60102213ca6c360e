"""The microbatches that a trainer took of its shard, by step, and what it retains of each until the step is closed.

:class:`Issued` is pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from swarm.errors import Refused
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.network.protocols import Payload
from swarm.pipeline.batch import Batch, BatchSource
from swarm.pipeline.retention import payload_bytes

Standing = Literal["counts", "left", "set aside"]


class Issued:
    """Microbatches by step, in the order in which they were taken, and what became of them. Those ``left`` are always
    the last ones: the shard goes back to the first of them, so that they are taken again before any other, in this
    step or in another. Those ``set aside`` never count; the step's leader must know of them as of those that may."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[MicrobatchId, Standing]] = {}

    def add(self, step: int, microbatch: MicrobatchId) -> None:
        """It was taken from the shard, to be fed to this step; maybe once more, when it was left."""
        self._taken.setdefault(step, {})[microbatch] = "counts"

    def counts(self, step: int, microbatch: MicrobatchId) -> bool:
        """Whether it may count, as far as is known."""
        return self._taken.get(step, {}).get(microbatch) == "counts"

    def set_aside(self, step: int, microbatch: MicrobatchId) -> None:
        """It will never count."""
        if self.counts(step, microbatch):
            self._taken[step][microbatch] = "set aside"

    def started(self, step: int) -> tuple[MicrobatchId, ...]:
        """All but those left, in order."""
        return tuple(m for m, standing in self._taken.get(step, {}).items() if standing != "left")

    def keep(self, step: int, count: int) -> tuple[MicrobatchId, ...]:
        """Only the first ``count`` of those started stay as they are. Returns the others, which are left."""
        left = self.started(step)[count:]
        for microbatch in left:
            self._taken[step][microbatch] = "left"
        return left

    def first_left(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int] | None:
        """(epoch, position) of the first that is neither committed nor set aside; None when there is none."""
        taken = self._taken.get(step, {})
        left = [m for m, standing in taken.items() if standing != "set aside" and m not in committed]
        return min(((m.epoch, m.position) for m in left), default=None)

    def forget(self, step: int) -> None:
        """Nothing was taken for this step."""
        self._taken.pop(step, None)

    def clear(self) -> None:
        """Forget everything."""
        self._taken.clear()

    def drop_before(self, step: int) -> None:
        """Forget closed steps."""
        for closed in [known for known in self._taken if known < step]:
            del self._taken[closed]


# --- what is retained of one microbatch ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class IssuedMicrobatch:
    """One microbatch. Implements :class:`~swarm.pipeline.retention.Retained`.

    It is computed with the parameters of the record whose hash begins with ``after``. ``output`` is the last stage's,
    ``gradient`` that of the first stage's input, both wire-encoded as they came; ``loss_gradient`` spares computing it
    from the output
    while the journey is under way. The batch itself is small, and read again from the shard where it is not known any
    more.
    """

    step: int
    batch: Batch
    after: str = ""
    early: bool = False
    route: tuple[PeerId, ...] = ()
    output: Payload | None = None
    gradient: Payload | None = None
    loss_gradient: Payload | None = None
    complete: bool = False

    @property
    def work(self) -> StepWork:
        """What counts of it."""
        return StepWork(self.step, self.batch.id, self.early)

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


# --- what is fed early ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """How much of a step may be fed early: ``share`` of its ``target`` microbatches, in equal shares of all trainers;
    nothing after the ``last`` step. ``exact``: neither more nor less of a trainer's microbatches are early, whenever
    they begin, so that timing changes nothing that is computed."""

    share: float = 0.0
    target: int = 0
    last: int = 0
    exact: bool = False

    def quota(self, step: int, trainers: int) -> int:
        """Return how many microbatches of a step each of so many trainers may feed early."""
        return math.floor(self.share * self.target / max(1, trainers)) if step <= self.last else 0


NOTHING_EARLY = EarlyRules()
