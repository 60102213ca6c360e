"""The route of one microbatch: who computed what and whose turn it is, and the messages sent along it.

A hop's turn begins when the hop before it (on the way back: the one after it) reported; from then on its deadline runs.
Every replica that was ever named at a hop may still answer: the first answer counts, and names its sender.
:class:`RouteState` keeps that and is pure; :class:`StageClient` sends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.clock import Clock
from swarm.errors import PeerError
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Endpoint, Payload, RequestT, Rpc
from swarm.pipeline.messages import (
    ADOPT,
    BACKWARD,
    DROP,
    FORWARD,
    RESEND,
    TARGETS,
    Adopt,
    Backward,
    Drop,
    Forward,
    Resend,
    Targets,
)
from swarm.pipeline.trainer.pace import Work
from swarm.schema import Empty
from swarm.waiting import retry_while_busy


@dataclass(frozen=True, slots=True)
class Receipt:
    """A replica's signature that it added the microbatch; with hosted ends the last stage's loss."""

    signature: bytes
    loss_sum: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Hop:
    """One stage of the way. ``asked`` is when each replica's turn began and for what, until it is heard of; ``due`` is
    the end of the present turn, None while it is nobody's turn; ``misses`` counts turns that passed."""

    replica: PeerId
    named: set[PeerId]
    forwarded: bool = False
    receipts: dict[PeerId, Receipt] = field(default_factory=dict)
    asked: dict[PeerId, tuple[float, Work]] = field(default_factory=dict)
    due: float | None = None
    misses: int = 0

    @property
    def contributed(self) -> bool:
        """Whether the replica that the route names has added the microbatch."""
        return self.replica in self.receipts


class RouteState:
    """The state of one journey. ``back`` is set when the loss was computed and the way back began."""

    def __init__(self, route: Sequence[PeerId]) -> None:
        self.hops = [Hop(peer, {peer}) for peer in route]
        self.attempt = 0
        self.back = False
        self.home = False
        """Whether the first stage's gradient is here, or none is awaited."""

    @property
    def route(self) -> tuple[PeerId, ...]:
        """One replica per stage."""
        return tuple(hop.replica for hop in self.hops)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.hops) - 1

    @property
    def complete(self) -> bool:
        """Whether every stage has added the microbatch, and the gradient is home."""
        return self.home and all(hop.contributed for hop in self.hops)

    def done(self, at: int) -> bool:
        """Whether nothing more is awaited of a hop in this direction."""
        hop = self.hops[at]
        if not self.back:
            return hop.forwarded
        return hop.contributed and (at > 0 or self.home)

    def ever_named(self, at: int, peer: PeerId) -> bool:
        """Whether the trainer ever gave this hop to this replica."""
        return 0 <= at <= self.last and peer in self.hops[at].named

    def begin_turn(self, at: int, now: float, seconds: float, work: Work) -> None:
        """From now on the hop's replica has so long."""
        hop = self.hops[at]
        hop.due = now + seconds
        hop.asked.setdefault(hop.replica, (now, work))

    def asked_at(self, at: int, peer: PeerId) -> float | None:
        """Return when the replica's turn began, of which it has told nothing yet; None where that is unknown."""
        asked = self.hops[at].asked.get(peer)
        return None if asked is None else asked[0]

    def heard_of(self, at: int, peer: PeerId, now: float) -> tuple[Work, float] | None:
        """A replica reported: what it did and how long it took since its turn began; None where that is unknown."""
        asked = self.hops[at].asked.pop(peer, None)
        return None if asked is None else (asked[1], now - asked[0])

    def forwarded(self, at: int, peer: PeerId) -> bool:
        """``peer`` computed the hop on the way out, and so did all before it. False when that is no news. Who answers
        first takes the hop."""
        hop = self.hops[at]
        if self.back or hop.forwarded:
            return False
        self._name(at, peer)
        for earlier in self.hops[: at + 1]:
            earlier.forwarded, earlier.due = True, None
        return True

    def contributed(self, at: int, peer: PeerId, receipt: Receipt) -> bool:
        """``peer`` added the microbatch. False when that is no news, or another's counts already."""
        hop = self.hops[at]
        hop.receipts.setdefault(peer, receipt)
        if hop.contributed and peer != hop.replica:
            return False
        self._name(at, peer)
        hop.forwarded = True
        if self.done(at):
            hop.due = None
        return True

    def move(self, at: int, new: PeerId) -> None:
        """Another replica takes the hop; a new attempt. On the way out, what is after it has to be done, too."""
        hop = self.hops[at]
        hop.replica, hop.due = new, None
        hop.named.add(new)
        hop.asked.pop(new, None)
        self.attempt += 1
        if not self.back:
            for later in self.hops[at:]:
                later.forwarded, later.due = False, None

    def lost(self, peer: PeerId) -> list[int]:
        """A replica is gone with what it held. Returns the hops that have to be done again, or whose turn it has: a hop
        that it handed on is not missed before the way back."""
        found = []
        for at, hop in enumerate(self.hops):
            had = hop.receipts.pop(peer, None) is not None
            if hop.replica != peer:
                continue
            standing_in = next(iter(hop.receipts), None)
            if had and standing_in is not None:
                hop.replica = standing_in
            elif had or hop.due is not None:
                found.append(at)
        return found

    def overdue(self, now: float, silent: Container[PeerId] = ()) -> list[int]:
        """Hops whose turn has passed, or is one of somebody who has fallen silent."""
        hops = enumerate(self.hops)
        return [at for at, hop in hops if hop.due is not None and (hop.due <= now or hop.replica in silent)]

    def next_due(self) -> float | None:
        """When the first turn ends; None while nothing is awaited."""
        return min((hop.due for hop in self.hops if hop.due is not None), default=None)

    def _name(self, at: int, peer: PeerId) -> None:
        """The replica that answered is the one on the route."""
        if self.hops[at].replica != peer:
            self.hops[at].replica = peer
            self.attempt += 1


# --- courier ---------------------------------------------------------------------------------------------------------
# Sends to the replicas of a journey: each method is one message along the present route.


class StageClient:
    """Sends for one journey. Every method raises the PeerError that came of it; ``within_s`` bounds it."""

    def __init__(self, endpoint: Endpoint, clock: Clock, key: JourneyKey, way: RouteState) -> None:
        self._endpoint, self._clock, self._key, self._way = endpoint, clock, key, way

    async def forward(self, payload: Payload, within_s: float) -> None:
        """The activation (or token ids) to the first stage."""
        way = self._way
        body = Forward(**self._fields(), route=way.route, hop=0)
        await self._call(way.route[0], FORWARD, body, payload, within_s)

    async def targets(self, payload: Payload, within_s: float) -> None:
        """Hosted ends: the last stage keeps the targets until the microbatch gets there. Busy is waited for."""
        body, last = Targets(**self._fields(), route=self._way.route), self._way.route[-1]
        await self._insist(last, TARGETS, body, payload, within_s)

    async def backward(self, payload: Payload, within_s: float) -> None:
        """The gradient to the last stage. Busy is waited for: only this replica has the graph."""
        way = self._way
        body = Backward(**self._fields(), route=way.route, hop=way.last)
        await self._insist(way.route[way.last], BACKWARD, body, payload, within_s)

    async def resend(self, hop: int, within_s: float) -> None:
        """Have the replica before ``hop`` send its output there again."""
        body = Resend(**self._fields(), route=self._way.route, hop=hop)
        await self._call(self._way.route[hop - 1], RESEND, body, b"", within_s)

    async def adopt(self, hop: int, within_s: float) -> None:
        """Have ``hop`` taken over on the way back."""
        body = Adopt(**self._fields(), route=self._way.route, hop=hop, within_s=within_s)
        await self._call(self._way.route[hop], ADOPT, body, b"", within_s)

    async def drop(self, hop: int, peer: PeerId, attempt: int, within_s: float) -> None:
        """Tell a replica that another does its work; whether that arrives matters little."""
        body = Drop(**self._fields() | {"attempt": attempt}, hop=hop)
        try:
            await self._endpoint.notify(peer, DROP, body, timeout_s=within_s)
        except PeerError:
            return

    def _fields(self) -> dict[str, Any]:
        return self._key._asdict() | {"attempt": self._way.attempt}

    async def _call(
        self, peer: PeerId, rpc: Rpc[RequestT, Empty], body: RequestT, payload: Payload, within_s: float
    ) -> None:
        await self._endpoint.call(peer, rpc, body, timeout_s=within_s, payload=payload)

    async def _insist(
        self, peer: PeerId, rpc: Rpc[RequestT, Empty], body: RequestT, payload: Payload, within_s: float
    ) -> None:
        await retry_while_busy(lambda: self._call(peer, rpc, body, payload, within_s), self._clock, within_s=within_s)
