"""Which microbatches of its shard a trainer took in which step. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from swarm.ids import MicrobatchId

Standing = Literal["counts", "left", "set aside"]


class Taken:
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

    def clear(self) -> None:
        """Forget everything."""
        self._taken.clear()

    def drop_before(self, step: int) -> None:
        """Forget closed steps."""
        for closed in [known for known in self._taken if known < step]:
            del self._taken[closed]
