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
KEPT_HASHES = 256
KEPT_UPDATES = 8
"""Steps that an observer may fall behind before it has to download a newer state. Each keeps 4 bytes a parameter of
the part in memory, and only while somebody observes it."""
LEASE_S = 60.0
"""An observer that does not ask for so long is forgotten."""

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
    """Let me observe ``part``, or with None the decisions only."""

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
    part: PartName | None
    expires: float


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
        self._hashes: dict[int, str] = {}
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
        self._expire()
        if not self._observers:
            decision = dataclasses.replace(decision, mean=None)
        step = decision.record.step
        self._decisions.append(decision)
        self._hashes[step] = decision.record.hash()
        self._hashes.pop(step - KEPT_HASHES, None)
        async with self._published:
            self._published.notify_all()

    async def _on_standing(self, request: Request) -> Answer:
        waiting = "" if self._decisions else self._waiting_for()[:400]
        return Answer(RunStanding(founder=self._founder, closed=self.closed, waiting_for=waiting))

    async def _on_hash(self, request: Request) -> Answer:
        body: HashRequest = request.body
        await self._wait_closed(body.step)
        if body.step not in self._hashes:
            raise WrongStep(f"step {body.step} is too long ago")
        return Answer(RecordHash(digest=self._hashes[body.step]))

    async def _on_start(self, request: Request) -> Answer:
        body: StartRequest = request.body
        self._expire()
        if not self._decisions:
            raise Refused("the run has not started")
        if request.caller not in self._observers and len(self._observers) >= MAX_OBSERVERS:
            raise Busy(f"{MAX_OBSERVERS} peers are joining with this one's help")
        part = None if body.part is None else PartName(body.part)
        # First, so that no update between the state and the first question is lost.
        self._observers[request.caller] = _Observer(part, self._clock.monotonic() + LEASE_S)
        decision = self._decisions[-1] if part is None else await self._pinned(request.caller, part)
        return Answer(Decided(record=decision.record, acceptances=dict(decision.acceptances)))

    async def _pinned(self, caller: PeerId, part: PartName) -> Decision:
        """Keep our state for the caller; returns the decision that vouches for it."""
        snapshot = await self._snapshot()
        if snapshot is None or snapshot.part != part:
            raise Refused(f"{part} is not held here")
        await self._wait_closed(snapshot.step)  # swapped already, and about to be published
        decision = next((d for d in self._decisions if d.record.step == snapshot.step), None)
        if decision is None:
            raise Busy("steps close faster than a state can be kept")
        self._donor.pin(caller, snapshot, decision.record.digests[part])
        return decision

    async def _on_next(self, request: Request) -> Answer:
        body: NextRequest = request.body
        observer = self._observers.get(request.caller)
        if observer is None or observer.part != body.part:
            raise Refused("not an observer of this part: start first")
        await self._wait_closed(body.step)
        observer.expires = self._clock.monotonic() + LEASE_S
        self._observers[request.caller] = observer  # who waited longer than its lease is still here
        decision = next((d for d in self._decisions if d.record.step == body.step), None)
        if decision is None or (body.part is not None and decision.mean is None):
            raise WrongStep(f"the update of step {body.step} is not kept here any more")
        payload: Payload = b""
        if body.part is not None and decision.mean is not None:
            payload = decision.mean.numpy().data.cast("B")
        return Answer(Decided(record=decision.record, acceptances=dict(decision.acceptances)), payload)

    async def _wait_closed(self, step: int) -> None:
        """Until ``step`` is closed here; only the next one is waited for. The caller's deadline ends the waiting."""
        if step > (self.closed if self.closed is not None else -1) + 1:
            raise WrongStep(f"step {step} is far from closed here")
        async with self._published:
            await self._published.wait_for(lambda: self.closed is not None and self.closed >= step)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        self._observers = {peer: seen for peer, seen in self._observers.items() if seen.expires > now}
