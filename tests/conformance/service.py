"""The service both worlds are asked through: each method shows one thing a handler may do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swarm.errors import PEER_ERRORS, Busy, Violation
from swarm.ids import PeerId
from swarm.network.protocols import PUBLIC_PREFIX, Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Message


class Note(Message):
    """A body with everything bodies have: text, numbers, nesting, bytes."""

    text: str = ""
    number: int = 0
    value: float = 0.0
    pairs: tuple[tuple[str, int], ...] = ()
    blob: bytes = b""


class Anything(Message):
    """A body that takes any plain data, to send what no schema allows."""

    content: Any


ECHO = Rpc("test/1/echo", Note, Note)
UP = Rpc("test/1/up", Note, Note)
DOWN = Rpc("test/1/down", Note, Note)
RAISE = Rpc("test/1/raise", Note, Note)
HANG = Rpc("test/1/hang", Note, Note)
HANG_UPLOAD = Rpc("test/1/hang-upload", Note, Note)
FULL = Rpc("test/1/full", Note, Note)
BROKEN_ADMIT = Rpc("test/1/broken-admit", Note, Note)
WRONG_ANSWER = Rpc("test/1/wrong-answer", Note, Note)
PUBLIC = Rpc(f"{PUBLIC_PREFIX}test", Note, Note)
"""Who has entered no run may call it, too."""
NOTHING = Rpc("test/1/nothing", Note, Note)
"""Nobody serves it."""


class Bench:
    """The methods, and what they saw."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.handled = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.deadlines: list[float] = []

    def methods(self) -> Sequence[AnyMethod]:
        """See Service."""
        return [
            ECHO.handled(self._echo),
            PUBLIC.handled(self._echo),
            UP.handled_with_payload(self._up, admit=self._admit_exactly),
            DOWN.handled_with_payload(self._down),
            RAISE.handled(self._raise),
            HANG.handled_with_payload(self._hang),
            HANG_UPLOAD.handled_with_payload(self._hang, admit=self._admit_exactly),
            FULL.handled(self._echo, admit=self._full),
            BROKEN_ADMIT.handled(self._echo, admit=self._broken_admit),
            WRONG_ANSWER.handled(self._wrong_answer),
        ]

    def _admit_exactly(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        self.admitted.append(payload_bytes)
        if payload_bytes != body.number:
            raise Violation(f"expected {body.number} bytes, not {payload_bytes}")

    def _full(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise Busy("the queue is full")

    def _broken_admit(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise ZeroDivisionError

    async def _echo(self, caller: PeerId, body: Note) -> Note:
        self.handled += 1
        return body

    async def _up(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        self.handled += 1
        payload = incoming.payload
        payload[:1] = b"!"  # the buffer is the receiver's own
        return Answer(Note(number=len(payload), value=float(sum(payload[1:64]))))

    async def _down(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        return Answer(Note(text="down"), payload=bytes(range(256)) * (body.number // 256))

    async def _raise(self, caller: PeerId, body: Note) -> Note:
        if body.text == "bug":
            raise ZeroDivisionError("a secret")
        raise PEER_ERRORS[body.text]("as asked")

    async def _hang(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        self.deadlines.append(incoming.deadline)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Answer(Note(text="released"))

    async def _wrong_answer(self, caller: PeerId, body: Note) -> Any:
        return Anything(content=body.text)
