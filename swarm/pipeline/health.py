"""Who is alive. In this version a peer that is gone ends the run, so a verdict needs evidence, not a rumour.

:class:`Health` decides (pure); :class:`Watch` pings. Every peer watches the next few peers of a ring over the roster
(cost O(k) pings a second, whatever the size) and whoever a failed call made it suspect. A loss is told to all, and
everybody who is told pings for himself before he believes it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import StringConstraints

from swarm.clock import Clock
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Endpoint, Method, Request
from swarm.schema import Empty, Message, PeerIdField

WATCHED_PEERS = 3
PING_EVERY_S = 1.0
PING_TIMEOUT_S = 2.0
MISSES_TO_LOSE = 3
"""Three misses in a row: a peer whose connections are reset is named within about 3 s, one that has fallen silent
within about 7 s (a ping starts every second, or when the one before has timed out). A stall below 4 s is forgiven."""


class Ping(Message):
    """Are you there?"""


class Lost(Message):
    """The sender believes that a peer is gone."""

    peer: PeerIdField
    reason: Annotated[str, StringConstraints(max_length=400)]


class Health:
    """Counts consecutive misses. Pure."""

    def __init__(self) -> None:
        self._misses: dict[PeerId, int] = {}

    def answered(self, peer: PeerId) -> None:
        """The peer is there."""
        self._misses.pop(peer, None)

    def missed(self, peer: PeerId, reason: str) -> str | None:
        """One miss more. Returns the reason for calling the peer lost, or None while it may still come back."""
        self._misses[peer] = self._misses.get(peer, 0) + 1
        if self._misses[peer] >= MISSES_TO_LOSE:
            return f"no answer to {self._misses[peer]} pings in a row: {reason}"
        return None


def watched(me: PeerId, roster: Sequence[PeerId], count: int = WATCHED_PEERS) -> tuple[PeerId, ...]:
    """The ``count`` peers after me on the hash ring of the roster: everybody is watched by as many."""
    ring = sorted(roster, key=lambda peer: hashlib.sha256(peer.encode()).digest())
    if me not in ring:
        return ()
    at = ring.index(me)
    following = ring[at + 1 :] + ring[:at]
    return tuple(following[:count])


class Watch:
    """The ``health/1`` service and the pinging. ``run`` returns (peer, reason) of the first peer that is lost.

    A peer that leaves says so and why; what it says about another is checked, what it says about itself is believed.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._health = Health()
        self._roster: tuple[PeerId, ...] = ()
        self._suspects: dict[PeerId, str] = {}
        self._left: dict[PeerId, Lost] = {}
        self._wake = asyncio.Event()

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="health/1/ping", request=Ping, handle=self._on_ping),
            Method(name="health/1/lost", request=Lost, handle=self._on_lost),
        ]

    def follow(self, roster: Sequence[PeerId]) -> None:
        """Watch this roster from now on; an empty one stops the watching. What was held against anyone is forgotten."""
        self._roster = tuple(peer for peer in roster if peer != self._endpoint.peer)
        self._health = Health()
        self._suspects.clear()
        self._left.clear()

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Ping this peer too, at once."""
        if peer in self._roster:
            self._suspects.setdefault(peer, reason)
            self._wake.set()

    def suspect_all(self, reason: str) -> None:
        """Something failed and nobody knows who: ping everybody."""
        for peer in self._roster:
            self.suspect(peer, reason)

    async def run(self) -> tuple[PeerId, str]:
        """Ping until somebody is lost, tell the others, return who and why. Cancel to stop."""
        while True:
            began = self._clock.monotonic()
            self._wake.clear()  # first, so that a suspicion that comes while we ping is not slept through
            me = self._endpoint.peer
            targets = [*self._suspects, *watched(me, (me, *self._roster))]
            asked = [peer for peer in dict.fromkeys(targets) if peer not in self._left and peer in self._roster]
            verdicts = await asyncio.gather(*(self._ping(peer) for peer in asked))
            lost = next(((p, v) for p, v in zip(asked, verdicts, strict=True) if v is not None), None) or self._leaver()
            if lost is not None and lost[0] in self._roster:
                await self.tell_all(*lost)
                return lost
            try:
                async with asyncio.timeout(max(0.0, PING_EVERY_S - (self._clock.monotonic() - began))):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _leaver(self) -> tuple[PeerId, str] | None:
        """A peer that left on its own account, or because of another that answers us or has left as well."""
        for leaver, message in self._left.items():
            if message.peer == leaver:
                return leaver, message.reason
        for leaver, message in self._left.items():
            if message.peer not in self._suspects or message.peer in self._left:
                return leaver, f"it left, saying that {message.peer} is gone: {message.reason}"
        return None

    async def _ping(self, peer: PeerId) -> str | None:
        try:
            await self._endpoint.call(peer, "health/1/ping", Ping(), Empty, timeout_s=PING_TIMEOUT_S)
        except PeerError as error:
            self._suspects.setdefault(peer, error.reason)
            return self._health.missed(peer, f"{error.code}, {error.reason}")
        self._health.answered(peer)
        self._suspects.pop(peer, None)
        return None

    async def tell_all(self, lost: PeerId, reason: str) -> None:
        """Tell the roster that a peer is gone, or (our own id) that we are leaving; not those that may be gone as
        well, who would only keep us waiting. Never raises a PeerError."""
        message = Lost(peer=lost, reason=reason[:400])
        others = [peer for peer in self._roster if peer != lost and peer not in self._suspects]
        await asyncio.gather(*(self._tell(peer, message) for peer in others))

    async def _tell(self, peer: PeerId, message: Lost) -> None:
        try:
            await self._endpoint.call(peer, "health/1/lost", message, Empty, timeout_s=PING_TIMEOUT_S)
        except PeerError:
            return  # it finds out by itself, or it is the next to be found lost

    async def _on_ping(self, request: Request) -> Answer:
        return Answer(Empty())

    async def _on_lost(self, request: Request) -> Answer:
        body: Lost = request.body
        if request.caller in self._roster:
            self._left[request.caller] = body
            self.suspect(PeerId(body.peer), body.reason)
            self._wake.set()
        return Answer(Empty())
