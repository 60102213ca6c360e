"""The newest records that were decided at this peer, for whoever follows them."""

from __future__ import annotations

import asyncio
from collections import deque

from swarm.clock import Clock
from swarm.errors import OutOfSync
from swarm.optimization.records import CloseRecord
from swarm.optimization.updates import KEPT_UPDATES


class RecentRecords:
    """``add`` every record, in order: they are one chain. One event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: deque[CloseRecord] = deque(maxlen=KEPT_UPDATES)
        self._came: deque[float] = deque(maxlen=KEPT_UPDATES)
        self._added = asyncio.Condition()

    @property
    def head(self) -> CloseRecord:
        """The newest. Raises OutOfSync before the first."""
        if not self._records:
            raise OutOfSync("the run has not started")
        return self._records[-1]

    @property
    def newest(self) -> int:
        """The newest one's step, -1 before the first."""
        return self._records[-1].step if self._records else -1

    @property
    def step_s(self) -> float | None:
        """Seconds from one record to the next lately; None when there is one only."""
        return (self._came[-1] - self._came[0]) / (len(self._came) - 1) if len(self._came) > 1 else None

    def at(self, step: int) -> CloseRecord | None:
        """The record of a step; None when it is not known, or not any more."""
        return next((record for record in self._records if record.step == step), None)

    async def add(self, record: CloseRecord) -> None:
        """It was decided just now. When it does not follow the newest, for steps were left out or did not count, none
        before it is known any more."""
        if self._records and not record.follows(self.head):
            self._records.clear()
            self._came.clear()
        self._records.append(record)
        self._came.append(self._clock.monotonic())
        async with self._added:
            self._added.notify_all()

    async def wait(self, step: int) -> CloseRecord:
        """The newest record, once it is of this step or a later one."""
        async with self._added:
            await self._added.wait_for(lambda: bool(self._records) and self.head.step >= step)
        return self.head
