"""The copies that a peer keeps of parts it does not train, so that a part whose replicas all die is not lost.

Which ones is read off the newest record's roster (``swarm.consensus.copies``), and changes with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from swarm.columns import becomes
from swarm.consensus.copies import copies_of
from swarm.consensus.records import CloseRecord, Decision
from swarm.ids import PartName
from swarm.membership.observer_service import ObserverService
from swarm.membership.part_copy import CopyContext, PartCopy, RecentRecords
from swarm.membership.run import RunContext
from swarm.optim.part import PartState
from swarm.state.snapshot import Snapshot
from swarm.waiting import ended

logger = logging.getLogger(__name__)

T = TypeVar("T")

TAKE_S, LAST_S = 10.0, 5.0
"""How long a copy that is taken may need for an update on its way; and one with whose state the run is over."""


class Copies:
    """The copies that are here, by part; :class:`Copying` adds and drops them."""

    def __init__(self) -> None:
        self.kept: dict[PartName, PartCopy] = {}

    @property
    def parts(self) -> tuple[PartName, ...]:
        """Return the parts of which a copy is here, sorted."""
        return tuple(sorted(part for part, copy in self.kept.items() if copy.step is not None))

    def tensors(self) -> list[torch.Tensor]:
        """Return what the copies hold now."""
        return [tensor for copy in self.kept.values() for tensor in copy.tensors()]

    def held(self, part: PartName, step: int) -> PartState | None:
        """Return our copy, if it is exactly at the state after this step. It goes on with the run:
        :meth:`Copying.take` it to keep it there."""
        copy = self.kept.get(part)
        return copy.state if copy is not None and copy.holds(step) else None

    def takes(self, part: PartName, step: int) -> bool:
        """Return whether our copy is just being brought to the state after this step."""
        return part in self.kept and self.kept[part].takes(step)

    async def snapshot(self, part: PartName) -> Snapshot | None:
        """Return our copy's state, for others; None for a part of which there is none."""
        copy = self.kept.get(part)
        return None if copy is None else await copy.snapshot()


class Copying:
    """Keeps ``copies``, from which ``service`` serves others. Run it beside the membership, and tell it of every
    decision."""

    def __init__(self, run: RunContext, copies: Copies, service: ObserverService) -> None:
        self._around, self._rules, self.copies = run.around, run.rules, copies
        self._kept = copies.kept
        self._records = RecentRecords(run.around.clock)
        self._context = CopyContext(
            around=run.around,
            records=self._records,
            host=Host(),
            turn=asyncio.Lock(),
            copied=service.copied,
            dropped=service.dropped,
            disk_refuses=run.situation.disk_refuses,
        )
        self._wanted: frozenset[PartName] = frozenset()
        self._taken: set[PartName] = set()
        self._rewound: frozenset[PartName] = frozenset()
        self._decided: CloseRecord | None = None
        self._own: PartName | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep what this peer has to keep, until cancelled. A donor's failure costs the copy, never the peer."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._adjust()
        finally:
            await ended([copy.following for copy in self._kept.values() if copy.following is not None])

    async def decided(self, decision: Decision) -> None:
        """A record was decided here. What this peer shall keep may be something else from now on; the change itself is
        made next to this."""
        record = decision.record
        for copy in list(self._kept.values()) if record.void else ():
            await copy.finish(record)  # first: a copy that is behind what is known here is dropped
        if self._decided is not None and record.step <= self._decided.step and record.hash() != self._decided.hash():
            self._rewound = frozenset(self._kept)
        self._decided = record
        await self._records.add(decision)
        if self._rules.over(record):
            return  # the run is over: what is here stays, for :meth:`last`
        wanted = frozenset(copies_of(record.members, self._around.endpoint.peer, self._around.manifest.run.copies))
        self._taken.clear()
        before, self._own = self._own, self._part_in(record)
        if self._own is not None and self._own != before:
            wanted |= {self._own} & self._kept.keys()  # this very record makes it ours: it may be taken yet
            self._taken |= set(() if before is None else becomes(before))  # it is here, and may be kept: see keep
        self._wanted = wanted
        self._changed.set()

    @property
    def wanted(self) -> frozenset[PartName]:
        """Return the parts of which this peer is to keep a copy by the newest record."""
        return self._wanted

    async def take(self, part: PartName, step: int) -> Snapshot | None:
        """Our copy's state after this step, for a part to train; it is a copy no longer, until the next record says
        which copies this peer keeps. Waits at most TAKE_S for an update on its way; None when the copy is not at this
        step then. Cancelled, it may be given up for nothing."""
        copy = self._kept.get(part)
        if copy is None or not await copy.reach(step, TAKE_S) or self._kept.get(part) is not copy:
            return None
        self._taken.add(part)  # first: meanwhile another copy of it would be begun
        await self._kept.pop(part).stop()
        snapshot = await copy.snapshot(step)
        await copy.drop("it is taken as this peer's own part")
        return snapshot

    async def keep(self, state: Snapshot, record: CloseRecord) -> None:
        """Keep what was this peer's own part until this record as a copy, if it shall keep one of it: it is here
        already."""
        part = PartName(state.part)
        self._taken.discard(part)
        if part in self._wanted and part not in self._kept:
            copy = PartCopy(self._context, part)
            await copy.begin(state, record)
            self._follow(copy)
        self._changed.set()

    async def last(self, record: CloseRecord) -> list[Snapshot]:
        """Our copies of the parts that only one machine holds, at the state after this record, with which the run is
        over: it may not live to keep them. Waits at most LAST_S for those that have all but the last update."""
        sole = [copy for part, copy in self._kept.items() if record.members.spread(part) == 1]
        near = [copy for copy in sole if copy.step is not None and copy.step >= record.step - 1]
        found = await asyncio.gather(*(self._reached(copy, record.step) for copy in near))
        there = [snapshot for snapshot in found if snapshot is not None]
        if len(there) < len(sole):
            logger.info("of %d copies %d have the run's last state", len(sole), len(there))
        return there

    async def left(self, record: CloseRecord) -> list[Snapshot]:
        """All our copies at the state after this record, which no other follows, once :meth:`run` has ended: nothing
        leads them on any more, but the update to it may be here."""
        copies = list(self._kept.values())
        for copy in copies:
            await copy.finish(record)
        found = [await copy.snapshot(record.step) for copy in copies]
        return [snapshot for snapshot in found if snapshot is not None]

    async def _reached(self, copy: PartCopy, step: int) -> Snapshot | None:
        return await copy.snapshot(step) if await copy.reach(step, LAST_S) else None

    # --- duties --------------------------------------------------------------------------------------------------

    async def _adjust(self) -> None:
        rewound, self._rewound = self._rewound, frozenset()
        for part in sorted((self._kept.keys() - self._wanted) | (self._kept.keys() & rewound)):
            if part not in self._kept:
                continue  # it was taken while another was dropped
            copy = self._kept.pop(part)
            await copy.stop()
            await copy.drop("its steps did not count" if part in rewound else "other peers keep it now")
            await copy.leave()
        for part in sorted(self._wanted - self._kept.keys() - self._taken):
            self._follow(PartCopy(self._context, part))
        for copy in self._kept.values():
            copy.check()

    def _follow(self, copy: PartCopy) -> None:
        copy.follow(self._changed.set)
        self._kept[copy.part] = copy

    def _part_in(self, record: CloseRecord) -> PartName | None:
        me = self._around.endpoint.peer
        part = record.members[me].part if me in record.members else None
        return None if part is None else PartName(part)


class Host:
    """Runs the work of copies, piece after piece, off the event loop and the device: no microbatch waits for it."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """See :class:`swarm.device.Executor`. Cancelled while it runs, it ends first."""
        async with self._line:
            work = asyncio.ensure_future(asyncio.to_thread(_on_one_core, fn, *args))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.gather(work, return_exceptions=True)
                raise


def _on_one_core(fn: Callable[..., T], *args: object) -> T:
    torch.set_num_threads(1)  # of the calling thread, which is any of the loop's executor
    return fn(*args)
