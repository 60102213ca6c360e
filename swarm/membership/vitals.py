"""What each member says about itself to anyone who looks at the swarm: the service ``vitals/1``.

Claims, for people: nothing is decided by them. What counts is in the close records. They name no address, and cost the
member that is asked some microseconds and one question to its daemon a second, however many ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.clock import Clock
from swarm.device import MeteredDevice
from swarm.errors import PeerError, Unreachable
from swarm.ids import PeerId
from swarm.membership.status import PeerStatus
from swarm.network.addresses import without_addresses
from swarm.network.protocols import AnyMethod, Endpoint, Rpc
from swarm.pipeline.activity import PipelineActivity
from swarm.schema import Count, Message, PartField, PeerIdField

MAX_LINKS, MAX_PROBATION, MAX_REASON = 16, 64, 200
ASK_S = 1.5
"""How long a member may take to answer: who looks wants to see who does not."""
MAX_ASKED_AT_ONCE = 32
LOOK_S = 3.0
"""How long one look at all members may take: who has not answered by then is not waited for."""
FRESH_S = 0.9
"""What was said so long ago at most is said again to anyone who asks next."""

Words = Annotated[str, StringConstraints(max_length=MAX_REASON)]
Seconds = Annotated[float, Field(ge=0, le=1e10)]
Kind = Literal["direct", "relayed", "unknown"]
Unanswered = Literal["stalled", "away"]
"""How a member does not answer: its connection stands and nothing comes, or nothing reaches it."""


class VitalsRequest(Message):
    """How are you?"""


class LinkVitals(Message):
    """One link of a peer: ``kind`` is direct, relayed or unknown; bytes since the peer started."""

    peer: PeerIdField
    kind: Kind
    bytes_sent: Count
    bytes_received: Count


class ProbationVitals(Message):
    """A replica that a trainer leaves out for ``left_s`` more, or tries with one microbatch, and why."""

    peer: PeerIdField
    left_s: Seconds
    reason: Words


class Vitals(Message):
    """One peer, now. ``busy_s`` its device had work; ``waiting_s`` it had none while microbatches were under way or its
    part was averaged, so that it waited for others; ``idle_s`` is the rest since it started: who looks takes the
    difference of two answers. ``queued``, ``under_way``, ``microbatches`` and ``compute_s`` see
    :class:`~swarm.pipeline.activity.PipelineActivity`, ``audits`` see its AuditCounts. ``links`` are those with the
    most bytes. ``wall`` is its clock, seconds since the epoch."""

    phase: Annotated[str, StringConstraints(max_length=16)]
    waiting_for: Words
    part: PartField | None
    step: Count
    queued: Count
    under_way: Count
    microbatches: Count
    compute_s: Seconds
    averaging: bool
    busy_s: Seconds
    waiting_s: Seconds
    idle_s: Seconds
    bytes_sent: Count
    bytes_received: Count
    reachability: Words
    wall: float
    links: Annotated[tuple[LinkVitals, ...], Field(max_length=MAX_LINKS)] = ()
    probation: Annotated[tuple[ProbationVitals, ...], Field(max_length=MAX_PROBATION)] = ()
    audits: tuple[Count, Count, Count, Count] = (0, 0, 0, 0)


VITALS = Rpc("vitals/1/standing", VitalsRequest, Vitals)

LinkKinds = Callable[[], Awaitable[Mapping[PeerId, Kind]]]


class VitalsService:
    """Answers for one peer. ``kinds`` tells how it reaches others: by one question to its daemon."""

    def __init__(
        self, status: PeerStatus, device: MeteredDevice, endpoint: Endpoint, clock: Clock, kinds: LinkKinds
    ) -> None:
        self._status, self._device, self._endpoint, self._clock, self._kinds = status, device, endpoint, clock, kinds
        self._seen_at, self._seen_busy_s = clock.monotonic(), device.busy_s
        self._waiting_s = self._idle_s = 0.0
        self._said: Vitals | None = None
        self._lock = asyncio.Lock()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [VITALS.handled(self._on_asked)]

    async def now(self) -> Vitals:
        """This peer's own vitals, at most FRESH_S old."""
        async with self._lock:
            if self._said is None or self._clock.monotonic() - self._seen_at >= FRESH_S:
                self._said = await self._look()
            return self._said

    async def _on_asked(self, caller: PeerId, body: VitalsRequest) -> Vitals:
        return await self.now()

    async def _look(self) -> Vitals:
        status, doing = self._status, self._status.activity()
        self._account(doing)
        traffic = self._endpoint.statistics()
        sent, received = traffic.total
        return Vitals(
            phase=status.phase,
            waiting_for=without_addresses(status.waiting_for)[:MAX_REASON],
            part=status.part,
            step=status.step,
            queued=doing.queued,
            under_way=doing.under_way,
            microbatches=doing.microbatches,
            compute_s=doing.compute_s,
            averaging=doing.averaging,
            busy_s=self._device.busy_s,
            waiting_s=self._waiting_s,
            idle_s=self._idle_s,
            bytes_sent=sent,
            bytes_received=received,
            reachability=status.reachability.partition(" ")[0],
            wall=self._clock.wall(),
            links=await self._links(traffic.bytes_sent, traffic.bytes_received),
            probation=tuple(
                ProbationVitals(peer=one.peer, left_s=one.left_s, reason=without_addresses(one.reason)[:MAX_REASON])
                for one in doing.probation[:MAX_PROBATION]
            ),
            audits=doing.audits,
        )

    def _account(self, doing: PipelineActivity) -> None:
        """The time since the last look in which the device had no work goes to what is the case now."""
        now, busy_s = self._clock.monotonic(), self._device.busy_s
        rest = max(0.0, now - self._seen_at - (busy_s - self._seen_busy_s))
        if doing.under_way or doing.averaging:
            self._waiting_s += rest
        else:
            self._idle_s += rest
        self._seen_at, self._seen_busy_s = now, busy_s

    async def _links(self, sent: Mapping[PeerId, int], received: Mapping[PeerId, int]) -> tuple[LinkVitals, ...]:
        try:
            kinds = await self._kinds()
        except PeerError:
            kinds = dict[PeerId, Kind]()
        both = {peer: (sent.get(peer, 0), received.get(peer, 0)) for peer in {*sent, *received} if peer}
        most = sorted(both, key=lambda peer: (-sum(both[peer]), peer))[:MAX_LINKS]
        return tuple(
            LinkVitals(
                peer=peer, kind=kinds.get(peer, "unknown"), bytes_sent=both[peer][0], bytes_received=both[peer][1]
            )
            for peer in most
        )


class VitalsBoard:
    """What the members of a run say about themselves, asked when somebody looks and not more often than every FRESH_S.
    ``round_trips`` are seconds from question to answer, by peer; ``unanswered`` is who of those asked did not answer,
    and how. ``own`` answers for ourselves, where we are a member."""

    def __init__(self, endpoint: Endpoint, clock: Clock, own: VitalsService | None = None) -> None:
        self._endpoint, self._clock, self._own = endpoint, clock, own
        self._at: float | None = None
        self._limit = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        self._asking = asyncio.Lock()
        self.said: dict[PeerId, Vitals] = {}
        self.round_trips: dict[PeerId, float] = {}
        self.unanswered: dict[PeerId, Unanswered] = {}

    async def look(self, members: Sequence[PeerId]) -> dict[PeerId, Vitals]:
        """Ask all ``members``; returns the answers that came within LOOK_S. Never raises a PeerError; cancel freely."""
        async with self._asking:
            now = self._clock.monotonic()
            if self._at is None or now - self._at >= FRESH_S:
                found = await self._ask_all(members)
                self.said = {peer: said for peer, said in found.items() if not isinstance(said, str)}
                self.unanswered = {peer: said for peer, said in found.items() if isinstance(said, str)}
                self.round_trips = {peer: s for peer, s in self.round_trips.items() if peer in self.said}
                self._at = now
            return self.said

    async def _ask_all(self, members: Sequence[PeerId]) -> dict[PeerId, Vitals | Unanswered]:
        asking = {peer: asyncio.create_task(self._ask(peer)) for peer in members}
        try:
            if asking:
                await asyncio.wait(asking.values(), timeout=LOOK_S)
            return {peer: task.result() if task.done() else "stalled" for peer, task in asking.items()}
        finally:
            for task in asking.values():
                task.cancel()

    async def _ask(self, peer: PeerId) -> Vitals | Unanswered:
        if self._own is not None and peer == self._endpoint.peer:
            return await self._own.now()
        async with self._limit:
            asked = self._clock.monotonic()
            try:
                said, _ = await self._endpoint.call(peer, VITALS, VitalsRequest(), timeout_s=ASK_S)
            except PeerError as error:
                return "away" if isinstance(error, Unreachable) else "stalled"
            self.round_trips[peer] = self._clock.monotonic() - asked
            return said
