"""What members do for a peer that wants to join: the ``observe/1`` service.

An observer follows a run without being counted on: it downloads one pinned state of its part, and then takes each
step's decision together with the update that was decided, the mean gradient, which it applies itself. So nobody waits
for it, however slow its link is; when it has caught up it asks to be a member (``swarm.optimization.changes``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.clock import Clock
from swarm.errors import Busy, Refused, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, Method, Payload, Request
from swarm.optimization.records import CloseRecord, Decision
from swarm.schema import Count, DigestField, Message, PartField, PeerIdField, SignatureField
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import StateDonor

STANDING, HASH, START, NEXT = (f"observe/1/{verb}" for verb in ("standing", "hash", "start", "next"))
MAX_OBSERVERS = 8
KEPT_UPDATES = 8
"""Steps that an observer may fall behind before it has to download a newer state. Each keeps 4 bytes a parameter of
the part in memory, and only while somebody observes it."""
LEASE_S = 60.0
"""An observer that has not asked, and neither downloads nor waits for an answer, for so long is forgotten."""

SnapshotOf = Callable[[], Awaitable[Snapshot | None]]
"""Our part as it is between two steps; None for a peer that holds nothing."""


class StandingRequest(Message):
    """Where does the run stand?"""


class RunStanding(Message):
    """Who founds the run, the newest closed step (None before the genesis), and what the start waits for."""

    founder: PeerIdField
    closed: Count | None
    waiting_for: Annotated[str, StringConstraints(max_length=400)]


class HashRequest(Message):
    """Which record did you see decided for this step?"""

    step: Count


class RecordHash(Message):
    """Hash of the record."""

    digest: DigestField


class StartRequest(Message):
    """Let me observe ``part``; with None: what is the newest decision?"""

    part: PartField | None


class NextRequest(Message):
    """The decision of ``step``, when there is one, and the update of ``part``."""

    part: PartField | None
    step: Count


class Decided(Message):
    """A decision as it travels; the payload beside it is the update: float32, little-endian."""

    record: CloseRecord
    acceptances: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)]

    def decision(self) -> Decision:
        """Without the update."""
        return Decision(self.record, self.acceptances)


@dataclass(slots=True)
class _Observer:
    part: PartName
    expires: float
    waiting: int = 0


class ObserverDesk:
    """Serves observers from what this member decides. ``publish`` it every decision.

    ``founder`` and ``waiting_for`` are told to whoever asks where the run stands.
    """

    def __init__(
        self, founder: PeerId, donor: StateDonor, snapshot: SnapshotOf, waiting_for: Callable[[], str], clock: Clock
    ) -> None:
        self._founder, self._donor, self._snapshot = founder, donor, snapshot
        self._waiting_for, self._clock = waiting_for, clock
        self._observers: dict[PeerId, _Observer] = {}
        self._decisions: deque[Decision] = deque(maxlen=KEPT_UPDATES)
        self._published = asyncio.Condition()

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name=STANDING, request=StandingRequest, handle=self._on_standing),
            Method(name=HASH, request=HashRequest, handle=self._on_hash),
            Method(name=START, request=StartRequest, handle=self._on_start),
            Method(name=NEXT, request=NextRequest, handle=self._on_next),
        ]

    @property
    def closed(self) -> int | None:
        """The newest closed step."""
        return self._decisions[-1].record.step if self._decisions else None

    async def publish(self, decision: Decision) -> None:
        """A step was decided and swapped here. Its update is kept only when somebody observes."""
        self._donor.tidy()
        self._expire()
        if self._decisions:  # who took part in this step has had what it needed
            for member in self._decisions[-1].record.roster:
                self._observers.pop(PeerId(member.peer), None)
        if not self._observers:
            self._forget_updates()
            decision = dataclasses.replace(decision, mean=None)
        self._decisions.append(decision)
        async with self._published:
            self._published.notify_all()

    async def _on_standing(self, request: Request) -> Answer:
        waiting = "" if self._decisions else self._waiting_for()[:400]
        return Answer(RunStanding(founder=self._founder, closed=self.closed, waiting_for=waiting))

    async def _on_hash(self, request: Request) -> Answer:
        body: HashRequest = request.body
        await self._wait_closed(body.step)
        return Answer(RecordHash(digest=self._decided(body.step).record.hash()))

    async def _on_start(self, request: Request) -> Answer:
        body: StartRequest = request.body
        self._expire()
        if not self._decisions:
            raise Refused("the run has not started")
        decision = self._decisions[-1]
        if body.part is not None:
            decision = await self._observed(request.caller, PartName(body.part))
        return Answer(Decided(record=decision.record, acceptances=dict(decision.acceptances)))

    async def _observed(self, caller: PeerId, part: PartName) -> Decision:
        """Take an observer. It is noted before its state is pinned, so that no update after that state is lost."""
        if caller not in self._observers and len(self._observers) >= MAX_OBSERVERS:
            raise Busy(f"{MAX_OBSERVERS} peers are joining with this one's help")
        before = self._observers.get(caller)
        self._observers[caller] = _Observer(part, self._clock.monotonic() + LEASE_S)
        try:
            return await self._pinned(caller, part)
        except BaseException:
            if before is None:
                self._observers.pop(caller, None)
            raise

    async def _pinned(self, caller: PeerId, part: PartName) -> Decision:
        """Keep our state for the caller; returns the decision that vouches for it."""
        snapshot = await self._snapshot()
        if snapshot is None or snapshot.part != part:
            raise Refused(f"{part} is not held here")
        await self._wait_closed(snapshot.step)  # swapped already, and about to be published
        decision = self._decided(snapshot.step)
        self._donor.pin(caller, snapshot, decision.record.digests[part])
        return decision

    async def _on_next(self, request: Request) -> Answer:
        body: NextRequest = request.body
        payload: Payload = b""
        if body.part is None:
            await self._wait_closed(body.step)
        else:
            payload = await self._update(request.caller, PartName(body.part), body.step)
        decision = self._decided(body.step)
        return Answer(Decided(record=decision.record, acceptances=dict(decision.acceptances)), payload)

    async def _update(self, caller: PeerId, part: PartName, step: int) -> Payload:
        observer = self._observers.get(caller)
        if observer is None or observer.part != part:
            raise Refused("not an observer of this part: start first")
        self._donor.release(caller, part)  # it asks for what comes after that state: so it has it
        observer.waiting += 1
        try:
            await self._wait_closed(step)
        finally:
            observer.waiting -= 1
            observer.expires = self._clock.monotonic() + LEASE_S
        mean = self._decided(step).mean
        if mean is None:
            raise WrongStep(f"the update of step {step} is not kept here any more")
        return mean.numpy().data.cast("B")

    def _decided(self, step: int) -> Decision:
        decision = next((kept for kept in self._decisions if kept.record.step == step), None)
        if decision is None:
            raise WrongStep(f"the decision of step {step} is not kept here any more")
        return decision

    def _forget_updates(self) -> None:
        for index, kept in enumerate(self._decisions):
            if kept.mean is not None:
                self._decisions[index] = dataclasses.replace(kept, mean=None)

    async def _wait_closed(self, step: int) -> None:
        """Until ``step`` is closed here; only the next one is waited for. The caller's deadline ends the waiting."""
        if step > (self.closed if self.closed is not None else -1) + 1:
            raise WrongStep(f"step {step} is far from closed here")
        async with self._published:
            await self._published.wait_for(lambda: self.closed is not None and self.closed >= step)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        self._observers = {
            peer: seen
            for peer, seen in self._observers.items()
            if seen.waiting or seen.expires > now or self._donor.serves(peer, seen.part)
        }
