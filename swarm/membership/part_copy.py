"""A copy of one part that this peer does not train, brought from step to step by what the part's replicas decide.

It is an observer of them (``swarm.membership.observer_service``) that never asks to be let in. No replica waits for it:
its state comes at a limited rate, from donors that nobody else downloads from just now, and its updates are computed
off the event loop and the device, on the host. The update, 4 bytes a parameter, is asked for as soon as the replicas
have agreed on it: it is here by the time the step is decided, or soon after, and needs none of them from then on. Until
the copy has taken it the step cannot be had from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from swarm.clock import Clock
from swarm.consensus.copies import COPY_BYTES_S, KEPT_UPDATES, copy_holders, copy_rate
from swarm.consensus.records import CloseRecord, Decision, RecentDecisions
from swarm.consensus.roster import Roster
from swarm.device import Executor
from swarm.errors import OutOfSync, PeerError, StateError
from swarm.events import CopyDropped, CopyHeld
from swarm.ids import PartName, PeerId
from swarm.membership.download import PartDownload
from swarm.membership.observer import Observer, ObserverContext, take_update
from swarm.membership.observer_service import LEASE_S
from swarm.membership.parts import Sparing, ensure_frozen
from swarm.membership.roles import PeerContext
from swarm.membership.rules import parting_of, spec_of, update_of
from swarm.optim.part import PartState
from swarm.security.signing import verify
from swarm.state.snapshot import Cut, Snapshot
from swarm.state.transfer import BURST_BYTES
from swarm.waiting import ExponentialBackoff, News, TokenBucket, ended, first_done

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MAX_STEPS_WAITED = 64
"""A copy whose state came too late waits one step before it is fetched anew, then two, and so on up to this many."""
DECIDED_S = LEASE_S / 2
"""How long a copy that has a step's update waits for this peer itself to hear how the step was decided. Then it asks
those who lead it on: this peer may be cut off, and who asks nothing for long is forgotten."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The update with which ``step`` closes, if it closes as the replicas had agreed when we asked."""

    step: int
    mean: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """What the copies of one peer share. ``host`` runs what takes long; ``turn`` is held by the one that downloads;
    ``copied`` is told of every decision whose result a copy holds, ``dropped`` when it holds nothing any more,
    ``disk_refuses`` of what this machine's disk has no room for, and why; "" once it has."""

    around: PeerContext
    records: RecentRecords
    host: Executor
    turn: asyncio.Lock
    copied: Callable[[PartName, Decision], Awaitable[None]]
    dropped: Callable[[PartName], Awaitable[None]]
    disk_refuses: Callable[[str, str], None]


class PartCopy:
    """:meth:`follow` until it is not wanted any more, :meth:`stop`, then :meth:`drop` it. Memory per parameter: 12
    bytes with AdamW, 4 more for an update that is not decided yet, and the updates that others want of it."""

    def __init__(self, context: CopyContext, part: PartName) -> None:
        self._context, self.part = context, part
        around = context.around
        self._observing = ObserverContext(
            run=around.manifest.run_id,
            endpoint=around.endpoint,
            device=context.host,
            verify=verify,
            observe=self._observe,
            known=context.records.at,
            newest=lambda: context.records.newest,
        )
        self._observer: Observer | None = None
        self._state: PartState | None = None
        self._record: CloseRecord | None = None
        self._ahead: _Ahead | None = None
        self._moved = News()
        self.following: asyncio.Task[None] | None = None
        self._failures = self._late = 0

    @property
    def step(self) -> int | None:
        """The closed step whose result it holds; None while it holds nothing."""
        return None if self._record is None else self._record.step

    def holds(self, step: int) -> bool:
        """Return whether it is exactly at this step's state, as it was decided here."""
        decided = self._context.records.at(step)
        return self.step == step and (decided is None or self._is(decided))

    def takes(self, step: int) -> bool:
        """Return whether it is at the state before, and has the update with which it will be at this step's, most
        likely."""
        return self.step == step - 1 and self._ahead is not None and self._ahead.step == step

    def _is(self, record: CloseRecord) -> bool:
        return self._record is not None and self._record.hash() == record.hash()

    @property
    def state(self) -> PartState | None:
        """Return what it holds. It moves on with the run, until the one who runs it stops."""
        return self._state if self._record is not None else None

    def tensors(self) -> list[torch.Tensor]:
        """Return what is held now: the state, and an update that is not decided yet."""
        state, ahead = self._state, self._ahead
        held = [] if state is None else [one for kind in state.tensors().values() for one in kind]
        return held if ahead is None else [*held, ahead.mean]

    async def snapshot(self, step: int | None = None) -> Snapshot | None:
        """The state, for others; None while there is none, or none of this ``step``. Waits for an update that is being
        taken."""
        state = self.state
        found = None if state is None else await self._context.host.run(state.snapshot)
        return found if found is not None and step in (None, found.step) else None

    async def begin(self, state: Snapshot, record: CloseRecord) -> None:
        """Hold this state, that after the record, as if it had been fetched. Before :meth:`follow`."""
        held = self._empty()
        await self._context.host.run(held.install, state)
        self._state = held
        await self._observe(Decision(record, {}, None))

    async def reach(self, step: int, within_s: float) -> bool:
        """Wait so long at most for an update on its way; whether it holds just this step's state then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._moved.wait(lambda: self.step is not None and self.step >= step)
        return self.holds(step)

    def follow(self, over: Callable[[], None]) -> None:
        """Begin to :meth:`run`; ``over`` is called when that ends."""
        self.following = asyncio.create_task(self.run())
        self.following.add_done_callback(lambda _: over())

    async def stop(self) -> None:
        """Follow no longer."""
        if self.following is not None:
            await ended([self.following])

    def check(self) -> None:
        """Raises what has ended :meth:`run`, which only a bug does."""
        if self.following is not None and self.following.done():
            self.following.result()

    async def run(self) -> None:
        """Follow, until cancelled. What fails is tried again, with others first: when a step closes, or after a pause.
        What is held is kept as long as no newer step was decided: it may be all that is left."""
        patience = ExponentialBackoff(FIRST_PAUSE_S)
        while True:
            head = await self._context.records.wait(0)
            late = self._late
            try:
                await self._follow(head)
            except (PeerError, StateError, OutOfSync) as error:
                logger.info("the copy of %s at step %s: %s", self.part, self.step, error)
            await self.leave()
            self._failures += 1
            if self._late > late:
                await self._context.records.wait(head.step + min(2**self._late, MAX_STEPS_WAITED))
            else:
                pause = self._context.around.clock.sleep(patience.pause_s())
                await first_done(self._context.records.wait(head.step + 1), pause)

    async def leave(self) -> None:
        """Nobody needs to keep anything for us any more. A courtesy: never raises a PeerError."""
        observer, self._observer = self._observer, None
        if observer is not None:
            await observer.close()

    async def drop(self, reason: str) -> None:
        """Hold nothing any more, and free the memory. Not while it runs."""
        if self._record is not None:
            self._context.around.events.emit(CopyDropped(part=self.part, reason=reason))
        self._state = self._record = self._ahead = None
        self._refuses("")
        await self._context.dropped(self.part)

    # --- following -----------------------------------------------------------------------------------------------

    async def _follow(self, head: CloseRecord) -> None:
        """Never returns. Raises PeerError, StateError or OutOfSync when nobody is left who leads on."""
        if self._record is not None and self._record.step < head.step and not await self.finish(head):
            await self.drop(f"it was at step {self._record.step}, and nobody keeps what came after it")
        observer = self._observer = Observer(self._observing, self._donors(head.members), self.part)
        me = self._context.around.endpoint.peer
        if self._record is None:
            async with self._context.turn:
                await self._have_frozen(head.members)
                await self._fetch(observer, await observer.start(me, wanted=self._context.records.head, spare=True))
        else:
            await observer.start(me, wanted=self._record)
            observer.resume(self._state)
        while True:
            if not await self._step_ahead(observer):
                await observer.follow()

    async def _have_frozen(self, roster: Roster) -> None:
        """What is frozen beside it: without that the copy would be of no use. It stays on the disk."""
        sparing = Sparing(pace=TokenBucket(COPY_BYTES_S, BURST_BYTES), refuses=self._refuses)
        await ensure_frozen(self._context.around, self.part, (*self._donors(roster), *roster.peers), sparing)
        self._refuses("")

    def _refuses(self, reason: str) -> None:
        self._context.disk_refuses(f"the frozen weights of a copy of {self.part}", reason)

    async def _step_ahead(self, observer: Observer) -> bool:
        """Take the next step with an update that is here before it is decided. False when there was none, another was
        decided, or this peer does not hear of it. Raises what the observer raises."""
        step = observer.head.step + 1
        if self._ahead is None or self._ahead.step != step:
            mean = await observer.ahead()
            self._ahead = None if mean is None else _Ahead(step, mean)
        if self._ahead is None:
            return False
        await first_done(self._context.records.wait(step), self._context.around.clock.sleep(DECIDED_S))
        record = self._context.records.at(step)
        if record is None or not await self.finish(record):
            return False
        observer.went_on(record)
        return True

    async def finish(self, record: CloseRecord) -> bool:
        """Take the update that is here for ``record``, of which this peer knows itself that it was decided. A step that
        was given up needs none: the state that is held is the next one's, too, and nobody may be left who could tell.
        False when there is none, or it is not the one that was decided: then nothing has changed."""
        state, ahead, before = self._state, self._ahead, self._record
        if self.step == record.step:
            return self._is(record)  # given up, as we were told before
        if state is None or before is None or record.previous != before.hash():
            return False
        if not (record.void or self.takes(record.step)):
            return False
        mean = None if record.void or ahead is None else ahead.mean
        try:
            await self._context.host.run(take_update, state, record, mean)
        except (PeerError, StateError) as error:
            logger.info("the copy of %s: %s", self.part, error)
            return False
        finally:
            self._ahead = None  # only now: until then it :meth:`takes` the step
        await self._observe(Decision(record, {}, mean))
        return True

    def _donors(self, roster: Roster) -> tuple[PeerId, ...]:
        """The part's replicas, each holder beginning with another, and with another after every failure."""
        around, replicas = self._context.around, roster.replicas(self.part)
        holders = copy_holders(roster, self.part, around.manifest.run.copies)
        me = around.endpoint.peer
        first = (holders.index(me) if me in holders else 0) + self._failures
        first %= max(1, len(replicas))
        return replicas[first:] + replicas[:first]

    async def _fetch(self, observer: Observer, decision: Decision) -> None:
        """The state after this decision, at a limited rate."""
        around, record, state = self._context.around, decision.record, self._empty()
        rate = copy_rate(Cut.of(state.layout).total_bytes, self._context.records.step_s)
        download = PartDownload(around, record, state, pace=TokenBucket(rate, BURST_BYTES))
        snapshot, gave = await download.fetch(observer.donors)
        await self._context.host.run(state.install, snapshot)
        self._state, self._late = state, self._late + 1  # until it has caught up
        await observer.begin(decision, state)
        around.events.emit(
            CopyHeld(
                part=self.part,
                step=record.step,
                donor=gave[0],
                bytes_received=download.verified_bytes,
                seconds=download.seconds,
            )
        )

    def _empty(self) -> PartState:
        manifest = self._context.around.manifest
        state = PartState.of(spec_of(manifest, self.part), manifest.model, update_of(manifest))
        state.parting = parting_of(manifest, self.part)
        return state

    async def _observe(self, decision: Decision) -> None:
        """The copy holds the result of this decision."""
        self._record = decision.record
        if decision.record.step >= self._context.records.head.step:
            self._late = self._failures = 0
        await self._context.copied(self.part, decision)
        await self._moved.tell()


# --- the newest records decided at this peer, for those that follow them ---------------------------------------------


class RecentRecords:
    """The newest records, and how fast they come. ``add`` every record, in order: they are one chain. One event
    loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decisions = RecentDecisions(KEPT_UPDATES)
        self._came: deque[float] = deque(maxlen=KEPT_UPDATES)
        self._added = News()

    @property
    def head(self) -> CloseRecord:
        """The newest. Raises OutOfSync before the first."""
        if self._decisions.newest is None:
            raise OutOfSync("this peer has no record of the run yet")
        return self._decisions.newest.record

    @property
    def newest(self) -> int:
        """The newest one's step, -1 before the first."""
        return -1 if self._decisions.newest is None else self._decisions.newest.record.step

    @property
    def step_s(self) -> float | None:
        """Seconds from one record to the next lately; None when there is one only."""
        return (self._came[-1] - self._came[0]) / (len(self._came) - 1) if len(self._came) > 1 else None

    def at(self, step: int) -> CloseRecord | None:
        """The record of a step; None when it is not known, or not any more."""
        decision = self._decisions.at(step)
        return None if decision is None else decision.record

    async def add(self, decision: Decision) -> None:
        """It was made just now; see :meth:`swarm.consensus.records.RecentDecisions.add`."""
        if not self._decisions.add(decision):
            self._came.clear()
        self._came.append(self._clock.monotonic())
        await self._added.tell()

    async def wait(self, step: int) -> CloseRecord:
        """The newest record, once it is of this step or a later one."""
        await self._added.wait(lambda: self.newest >= step)
        return self.head
