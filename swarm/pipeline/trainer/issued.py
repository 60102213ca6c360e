"""The trainer's table: each microbatch that it took of its shard for an open step, how it stands, and what is retained
of it.

A row is found by what counts once at each part (:class:`~swarm.ids.StepWork`). It is there from when the microbatch is
taken until its step is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from swarm.ids import MicrobatchId, StepWork
from swarm.pipeline.retention import RETENTION_BYTES, Retained, Retention
from swarm.pipeline.trainer.journey import IssuedMicrobatch


class IssuedTable:
    """The rows, in the order in which they were taken. Those ``left`` of a step are always its last ones.
    ``retention_bytes`` is the budget for the tensors retained of them: what a trainer drops its stages give again."""

    def __init__(self, retention_bytes: int = RETENTION_BYTES) -> None:
        self._rows: dict[StepWork, IssuedMicrobatch] = {}
        self._retention: Retention[IssuedMicrobatch] = Retention(retention_bytes, _let_go)

    def __iter__(self) -> Iterator[IssuedMicrobatch]:
        return iter(list(self._rows.values()))

    def find(self, work: StepWork) -> IssuedMicrobatch | None:
        """Return the row of some work."""
        return self._rows.get(work)

    def of(self, step: int) -> list[IssuedMicrobatch]:
        """Return the rows of a step that were not taken back, in the shard's order: one that was fed early may be taken
        again after those behind it."""
        rows = (row for row in self._rows.values() if row.work.step == step and row.standing != "forgone")
        return sorted(rows, key=lambda row: (row.work.microbatch.epoch, row.work.microbatch.position))

    def begun(self, step: int, microbatch: MicrobatchId, *, early: bool) -> IssuedMicrobatch | None:
        """Return the row of a microbatch that was left and is on its way or at its end already, as it began, which may
        not be as it would be begun now."""
        rows = (self.find(StepWork(step, microbatch, as_begun)) for as_begun in (not early, early))
        return next((row for row in rows if row is not None and row.begun), None)

    def add(self, row: IssuedMicrobatch) -> None:
        """It was taken from the shard, maybe once more, when it was left."""
        step, microbatch, early, _ = row.work
        for known in (self.find(row.work), self.find(StepWork(step, microbatch, not early))):
            if known is not None and known is not row:
                known.standing = "forgone"
        if (replaced := self.find(row.work)) is not None:
            self._retention.forget(replaced)
        self._rows[row.work] = row

    def started(self, step: int) -> tuple[MicrobatchId, ...]:
        """All but those left, in order."""
        return tuple(row.work.microbatch for row in self.of(step) if row.standing != "left")

    def keep(self, step: int, count: int) -> list[IssuedMicrobatch]:
        """Only the first ``count`` of those started stay as they are. Return the others, which are left."""
        left = [row for row in self.of(step) if row.standing != "left"][count:]
        for row in left:
            row.standing = "left"
        return left

    def forgo(self, step: int) -> list[IssuedMicrobatch]:
        """Nothing was taken for this step. Return what was."""
        rows = self.of(step)
        for row in rows:
            row.standing, row.leased, row.untold = "forgone", True, False
        return rows

    def first_left(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int] | None:
        """(epoch, position) of the first that is neither committed nor set aside; None when there is none."""
        rows = (row.work.microbatch for row in self.of(step) if row.standing != "set aside")
        return min(((m.epoch, m.position) for m in rows if m not in committed), default=None)

    def drop_before(self, step: int) -> list[IssuedMicrobatch]:
        """Forget closed steps. Return what is forgotten."""
        return self._drop([row for row in self if row.work.step < step])

    def clear(self) -> list[IssuedMicrobatch]:
        """Forget everything. Return what is forgotten."""
        return self._drop(list(self))

    def _drop(self, rows: list[IssuedMicrobatch]) -> list[IssuedMicrobatch]:
        for row in rows:
            self._retention.forget(row)
            del self._rows[row.work]
        return rows

    # --- what is retained ----------------------------------------------------------------------------------------

    @property
    def retained_bytes(self) -> int:
        """Bytes that are retained now. Cost: a pass over the microbatches of the open step."""
        return sum(row.retained_bytes for row in self._rows.values())

    def hold(self, row: IssuedMicrobatch) -> None:
        """Count what a row holds now, which may let go of it at once. One that is not in the table is not counted."""
        if self._rows.get(row.work) is row:
            self._retention.hold(row)


def _let_go(retained: Retained, size: int) -> None:
    """Nobody is told."""
