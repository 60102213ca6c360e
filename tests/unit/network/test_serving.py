"""The serving side of one stream, driven frame by frame over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.network.rpc.bodies import Envelope, pack_request
from swarm.network.rpc.dispatcher import Desk, ServeLimits
from swarm.network.rpc.framing import MAX_PUBLIC_BYTES, Kind, encode_frame, encode_header
from swarm.network.rpc.link import Meter
from swarm.network.rpc.server import ServerStream
from swarm.schema import Empty, Message
from tests.harness.expect import eventually

CALLER = PeerId("caller")
LONG = 8 << 20
"""More than a stream takes at once."""


class Ask(Message):
    """A question without content."""


class Generous:
    """A service whose one method answers with many bytes."""

    def __init__(self, size: int) -> None:
        self._size, self.over = size, 0

    def methods(self) -> Sequence[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [Method(name="test/1/give", request=Ask, handle=self._give, over=self._over)]

    async def _give(self, request: Request) -> Answer:
        return Answer(Empty(), bytes(self._size))

    def _over(self, caller: PeerId, body: Message) -> None:
        self.over += 1


class Slow:
    """A service whose one method takes a payload and never answers."""

    def __init__(self) -> None:
        self.begun = 0

    def methods(self) -> Sequence[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [Method(name="test/1/slow", request=Ask, handle=self._slow, admit=lambda caller, body, size: None)]

    async def _slow(self, request: Request) -> Answer:
        self.begun += 1
        return await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def serving(desk: Desk, *, public: bool = False) -> AsyncIterator[socket.socket]:
    ours, theirs = socket.socketpair()
    stream = ServerStream(CALLER, desk, SystemClock(), Meter(), public=public)
    task = asyncio.create_task(stream.serve(*await asyncio.open_connection(sock=theirs)))
    try:
        yield ours
    finally:
        ours.close()
        await task


def request(
    call: int, what: str = "slow", *, remaining_s: float = 30.0, payload_bytes: int = 0, max_reply_bytes: int = 0
) -> bytes:
    body = pack_request(f"test/1/{what}", remaining_s, max_reply_bytes, Ask())
    return encode_frame(Kind.REQUEST, call, body, payload_bytes)


async def told(caller: socket.socket) -> bytes:
    """All that is said until the stream is closed."""
    caller.setblocking(False)
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(10):
        while piece := await loop.sock_recv(caller, 1 << 16):
            received += piece
    return received


def places(desk: Desk) -> int:
    """How many more calls of the caller the desk would take."""
    taken = 0
    with contextlib.suppress(Busy):
        while True:
            desk.admit(CALLER, Envelope("test/1/slow", 30.0, 0, {}), 0, public=False)
            taken += 1
    return taken


async def test_serving_call_cancelled_before_its_handler_began_gives_its_place_back() -> None:
    """Request and cancel in one piece: the handler's task is cancelled before its first step."""
    desk, service = Desk(ServeLimits(calls_per_peer=4)), Slow()
    desk.mount(service)
    async with serving(desk) as caller:
        for call in range(1, 4):
            caller.send(request(call) + encode_frame(Kind.CANCEL, call))
        caller.send(request(4))
        await eventually(lambda: service.begun, what="the call that was not cancelled")
        assert service.begun == 1
        assert places(desk) == 3


async def test_serving_payloads_that_are_announced_and_never_sent_end_the_stream() -> None:
    desk = Desk(ServeLimits(calls_per_peer=10_000))
    desk.mount(Slow())
    async with serving(desk) as caller:
        caller.send(b"".join(request(call, remaining_s=1e-3, payload_bytes=8) for call in range(1, 1100)))
        assert b"announced and not sent" in await told(caller)


async def test_serving_frame_that_begins_and_does_not_go_on_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.FRAME_S", 0.01)
    monkeypatch.setattr("swarm.network.rpc.link.LAST_LOOK_S", 0.01)
    async with serving(Desk(ServeLimits())) as caller:
        caller.send(encode_header(Kind.REQUEST, 1, 1000))
        with contextlib.suppress(ConnectionResetError):
            assert await told(caller) == b""


async def test_serving_caller_who_does_not_read_his_answer_loses_it_and_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.UNREAD_S", 0.01)
    monkeypatch.setattr("swarm.network.rpc.link.LAST_LOOK_S", 0.01)
    desk, service = Desk(ServeLimits()), Generous(LONG)
    desk.mount(service)
    async with serving(desk) as caller:
        caller.send(request(1, "give", remaining_s=3600.0, max_reply_bytes=LONG))
        await eventually(lambda: service.over, what="the end of the call")
        assert len(await told(caller)) < LONG


async def test_serving_stranger_who_announces_a_long_body_is_told_no_before_he_sends_it() -> None:
    async with serving(Desk(ServeLimits()), public=True) as caller:
        caller.send(encode_header(Kind.REQUEST, 1, MAX_PUBLIC_BYTES + 1))
        assert b"exceeds the limit" in await told(caller)
