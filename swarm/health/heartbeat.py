"""Ask one peer whether it is there, until it answers: the questions, and the bodies of ``health/1``.

A late answer is an answer, and whatever the peer sends is a sign of life. On a link that is long, narrow and full a
question waits behind the tensors of the same connection: code that forgot each question as its time ran out would call
a peer lost that answers every one of them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.errors import DeadlineMissed
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, Rpc
from swarm.schema import Count, Empty, Message, PeerIdField

LONGEST_TALK_S = 20.0
"""Who sends, and answers no question for that long, does not hear us."""


class Questions:
    """To one peer; closed with :meth:`close` however it ends. ``patience_s`` is how long one waits for an answer before
    it asks again, ``open_s`` how long an answer to a question still counts."""

    def __init__(self, endpoint: Endpoint, peer: PeerId, patience_s: float, open_s: float) -> None:
        self._endpoint, self._peer = endpoint, peer
        self._patience_s, self._open_s = patience_s, open_s
        self._open: set[asyncio.Task[HeartbeatReply]] = set()
        self._began: float | None = None

    async def ask(self, beat: Heartbeat) -> HeartbeatReply | None:
        """One question more. The first answer that comes, whichever question it is to; None when none has come in
        ``patience_s`` and something else has from that peer: it is there. Raises PeerError when this question fails,
        DeadlineMissed when nothing at all has come. The question stays open then."""
        loop = asyncio.get_running_loop()
        self._began = loop.time() if self._began is None else self._began
        heard = self._heard()
        newest = loop.create_task(self._ask(beat))
        self._open.add(newest)
        ends = loop.time() + self._patience_s
        while newest in self._open:
            left = ends - loop.time()
            done, _ = await asyncio.wait(self._open, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            self._open -= done
            answered = [
                question for question in done if question.exception() is None
            ]  # asks each, or asyncio complains
            if answered:
                return answered[0].result()
            if not done:
                if self._heard() > heard and loop.time() - self._began < LONGEST_TALK_S:
                    return None
                raise DeadlineMissed(f"no answer to {BEAT.name} in {self._patience_s:g} s", peer=self._peer)
        return newest.result()

    async def _ask(self, beat: Heartbeat) -> HeartbeatReply:
        standing, _ = await self._endpoint.call(self._peer, BEAT, beat, timeout_s=self._open_s)
        return standing

    def _heard(self) -> int:
        """Bytes from it so far, of whatever."""
        return self._endpoint.statistics().bytes_received.get(self._peer, 0)

    async def close(self) -> None:
        """No question is open when this returns."""
        for question in self._open:
            question.cancel()
        if self._open:
            await asyncio.wait(self._open)
        for question in self._open:
            if not question.cancelled():
                question.exception()  # it failed as we closed: that is nobody's business any more
        self._open.clear()


# --- the bodies of health/1: what peers ask and tell each other to know who is there ---------------------------------


class Ping(Message):
    """Are you there?"""


class Heartbeat(Message):
    """Are you there, and where do you stand? Asked by this life of the sender."""

    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class DuplicateQuery(Message):
    """Does anybody else ask in my name? This is the life that I know of."""

    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)]


class DuplicateIdentity(Message):
    """Another life has asked in the caller's name since it wanted to know."""

    there: bool


class HeartbeatReply(Message):
    """The sender's open step, whether it takes part in it, and of which lineage that is; ``incarnation`` is another for
    every process."""

    step: Count
    member: bool
    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)]
    lineage: Count = 0


class Lost(Message):
    """The sender believes that a peer is gone, or says so of itself. Told by this life of it."""

    peer: PeerIdField
    reason: Annotated[str, StringConstraints(max_length=400)]
    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


PING = Rpc("health/1/ping", Ping, Empty)
BEAT = Rpc("health/1/beat", Heartbeat, HeartbeatReply)
LOST = Rpc("health/1/lost", Lost, Empty)
HEARD = Rpc("health/1/heard", DuplicateQuery, DuplicateIdentity)
