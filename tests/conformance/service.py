"""The service both worlds are asked through: each method shows one thing a handler may do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swarm.errors import PEER_ERRORS, Busy, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.schema import Message

HANG_UPLOAD = "test/1/hang-upload"


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


class Bench:
    """The methods, and what they saw."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.handled = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.deadlines: list[float] = []

    def methods(self) -> Sequence[Method]:
        """See Service."""
        return [
            Method(name="test/1/echo", request=Note, handle=self._echo),
            Method(name="test/1/up", request=Note, handle=self._up, admit=self._admit_exactly),
            Method(name="test/1/down", request=Note, handle=self._down),
            Method(name="test/1/raise", request=Note, handle=self._raise),
            Method(name="test/1/hang", request=Note, handle=self._hang),
            Method(name=HANG_UPLOAD, request=Note, handle=self._hang, admit=self._admit_exactly),
            Method(name="test/1/full", request=Note, handle=self._echo, admit=self._full),
            Method(name="test/1/broken-admit", request=Note, handle=self._echo, admit=self._broken_admit),
            Method(name="test/1/wrong-answer", request=Note, handle=self._wrong_answer),
        ]

    def _admit_exactly(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        self.admitted.append(payload_bytes)
        if payload_bytes != body.number:
            raise Violation(f"expected {body.number} bytes, not {payload_bytes}")

    def _full(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise Busy("the queue is full")

    def _broken_admit(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise ZeroDivisionError

    async def _echo(self, request: Request) -> Answer:
        self.handled += 1
        return Answer(request.body)

    async def _up(self, request: Request) -> Answer:
        self.handled += 1
        request.payload[:1] = b"!"  # the buffer is the receiver's own
        return Answer(Note(number=len(request.payload), value=float(sum(request.payload[1:64]))))

    async def _down(self, request: Request) -> Answer:
        return Answer(Note(text="down"), payload=bytes(range(256)) * (request.body.number // 256))

    async def _raise(self, request: Request) -> Answer:
        if request.body.text == "bug":
            raise ZeroDivisionError("a secret")
        raise PEER_ERRORS[request.body.text]("as asked")

    async def _hang(self, request: Request) -> Answer:
        self.deadlines.append(request.deadline)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Answer(Note(text="released"))

    async def _wrong_answer(self, request: Request) -> Answer:
        return Answer(Anything(content=request.body.text))
