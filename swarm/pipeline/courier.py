"""What a trainer sends to the replicas of a journey: each method is one message along the present route."""

from __future__ import annotations

from typing import Any

from swarm.clock import Clock
from swarm.errors import PeerError
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Endpoint, Payload
from swarm.pipeline.insistence import insist
from swarm.pipeline.itinerary import Itinerary
from swarm.pipeline.messages import Adopt, Backward, Drop, Forward, Resend, Targets
from swarm.schema import Empty, Message


class Courier:
    """Sends for one journey. Every method raises the PeerError that came of it; ``within_s`` bounds it."""

    def __init__(self, endpoint: Endpoint, clock: Clock, key: JourneyKey, way: Itinerary) -> None:
        self._endpoint, self._clock, self._key, self._way = endpoint, clock, key, way

    async def forward(self, payload: Payload, within_s: float) -> None:
        """The activation (or token ids) to the first stage."""
        way = self._way
        body = Forward(**self._fields(), route=way.route, hop=0)
        await self._call(way.route[0], "pipeline/1/forward", body, payload, within_s)

    async def targets(self, payload: Payload, within_s: float) -> None:
        """Hosted ends: the last stage keeps the targets until the microbatch gets there. Busy is waited for."""
        body, last = Targets(**self._fields(), route=self._way.route), self._way.route[-1]
        await self._insist(last, "pipeline/1/targets", body, payload, within_s)

    async def backward(self, payload: Payload, within_s: float) -> None:
        """The gradient to the last stage. Busy is waited for: only this replica has the graph."""
        way = self._way
        body = Backward(**self._fields(), route=way.route, hop=way.last)
        await self._insist(way.route[way.last], "pipeline/1/backward", body, payload, within_s)

    async def resend(self, hop: int, within_s: float) -> None:
        """Have the replica before ``hop`` send its output there again."""
        body = Resend(**self._fields(), route=self._way.route, hop=hop)
        await self._call(self._way.route[hop - 1], "pipeline/1/resend", body, b"", within_s)

    async def adopt(self, hop: int, within_s: float) -> None:
        """Have ``hop`` taken over on the way back."""
        body = Adopt(**self._fields(), route=self._way.route, hop=hop, within_s=within_s)
        await self._call(self._way.route[hop], "pipeline/1/adopt", body, b"", within_s)

    async def drop(self, hop: int, peer: PeerId, attempt: int, within_s: float) -> None:
        """Tell a replica that another does its work; whether that arrives matters little."""
        body = Drop(**self._fields() | {"attempt": attempt}, hop=hop)
        try:
            await self._endpoint.notify(peer, "pipeline/1/drop", body, timeout_s=within_s)
        except PeerError:
            return

    def _fields(self) -> dict[str, Any]:
        return self._key._asdict() | {"attempt": self._way.attempt}

    async def _call(self, peer: PeerId, method: str, body: Message, payload: Payload, within_s: float) -> None:
        await self._endpoint.call(peer, method, body, Empty, timeout_s=within_s, payload=payload)

    async def _insist(self, peer: PeerId, method: str, body: Message, payload: Payload, within_s: float) -> None:
        await insist(lambda: self._call(peer, method, body, payload, within_s), self._clock, within_s=within_s)
