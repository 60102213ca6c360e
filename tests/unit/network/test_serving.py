"""The serving side of one stream, driven frame by frame over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy, Refused, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Rpc, anybody_may
from swarm.network.rpc.bodies import Envelope, pack, pack_request
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.framing import HEADER_BYTES, MAX_PUBLIC_BYTES, Kind, decode_header, encode_frame, encode_header
from swarm.network.rpc.link import ByteMeter
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import StrangerBudget
from tests.harness.expect import eventually
from tests.harness.rigs.network import GIVE, SLOW, Ask, Generous, Slow, request

CALLER = PeerId("caller")
LONG = 8 << 20
"""More than a stream takes at once."""


@contextlib.asynccontextmanager
async def serving(dispatcher: Dispatcher, *, public: bool = False) -> AsyncIterator[socket.socket]:
    ours, theirs = socket.socketpair()
    stream = ServerStream(CALLER, dispatcher, SystemClock(), ByteMeter(), StrangerBudget(SystemClock()), public=public)
    task = asyncio.create_task(stream.serve(*await asyncio.open_connection(sock=theirs)))
    try:
        yield ours
    finally:
        ours.close()
        await task


async def told(caller: socket.socket) -> bytes:
    """All that is said until the stream is closed."""
    caller.setblocking(False)
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        while piece := await loop.sock_recv(caller, 1 << 16):
            received += piece
    return received


async def answered(caller: socket.socket) -> tuple[Kind, int, object]:
    """The next frame, with its content."""
    caller.setblocking(False)
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        while len(received) < HEADER_BYTES:
            received += await loop.sock_recv(caller, HEADER_BYTES - len(received))
        header = decode_header(received)
        content = await loop.sock_recv(caller, header.content_bytes)
    return header.kind, header.call, msgpack.Unpacker(io.BytesIO(content), use_list=False).unpack()


def places(dispatcher: Dispatcher) -> int:
    """How many more calls of the caller the dispatcher would take."""
    taken = 0
    with contextlib.suppress(Busy):
        while True:
            dispatcher.admit(CALLER, Envelope(SLOW.name, 30.0, 0, pack({})), 0, public=False)
            taken += 1
    return taken


async def test_serving_call_cancelled_before_its_handler_began_gives_its_place_back() -> None:
    """Request and cancel in one piece: the handler's task is cancelled before its first step."""
    dispatcher, service = Dispatcher(ServeLimits(calls_per_peer=4)), Slow()
    dispatcher.mount(service)
    async with serving(dispatcher) as caller:
        for call in range(1, 4):
            caller.send(request(call) + encode_frame(Kind.CANCEL, call))
        caller.send(request(4))
        await eventually(lambda: service.begun, what="the call that was not cancelled")
        await asyncio.sleep(0)  # the places are given back in the loop's turn after the one in which it began
        assert service.begun == 1
        assert places(dispatcher) == 3


async def test_serving_payloads_that_are_announced_and_never_sent_end_the_stream() -> None:
    dispatcher = Dispatcher(ServeLimits(calls_per_peer=10_000))
    dispatcher.mount(Slow())
    async with serving(dispatcher) as caller:
        caller.send(b"".join(request(call, remaining_s=1e-3, payload_bytes=8) for call in range(1, 1100)))
        assert b"announced and not sent" in await told(caller)


async def test_serving_frame_that_begins_and_does_not_go_on_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.FRAME_S", 0.01)
    monkeypatch.setattr("swarm.network.rpc.link.LAST_LOOK_S", 0.01)
    async with serving(Dispatcher(ServeLimits())) as caller:
        caller.send(encode_header(Kind.REQUEST, 1, 1000))
        with contextlib.suppress(ConnectionResetError):
            assert await told(caller) == b""


async def test_serving_caller_who_does_not_read_his_answer_loses_it_and_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.UNREAD_S", 0.01)
    monkeypatch.setattr("swarm.network.rpc.link.LAST_LOOK_S", 0.01)
    dispatcher, service = Dispatcher(ServeLimits()), Generous(LONG)
    dispatcher.mount(service)
    async with serving(dispatcher) as caller:
        caller.send(request(1, "give", remaining_s=3600.0, max_reply_bytes=LONG))
        await eventually(lambda: service.over, what="the end of the call")
        assert len(await told(caller)) < LONG


async def test_serving_stranger_who_announces_a_long_body_is_told_no_before_he_sends_it() -> None:
    async with serving(Dispatcher(ServeLimits()), public=True) as caller:
        caller.send(encode_header(Kind.REQUEST, 1, MAX_PUBLIC_BYTES + 1))
        assert b"exceeds the limit" in await told(caller)


async def test_serving_caller_whom_the_gate_refuses_has_no_byte_of_his_body_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def may(caller: PeerId, rpc: Rpc[Any, Any]) -> None:
        raise Refused(f"{rpc.name} is not for {caller}")

    def no_decoder(*args: object, **options: object) -> None:
        raise AssertionError("it was decoded")

    dispatcher, service = Dispatcher(ServeLimits(), may), Slow()
    dispatcher.mount(service)
    head, malformed = pack_request(SLOW.name, 30.0, 0, Ask())[0], b"\xc1"
    async with serving(dispatcher) as caller:
        with monkeypatch.context() as patch:
            patch.setattr("swarm.network.rpc.bodies.msgpack.unpackb", no_decoder)
            caller.send(encode_frame(Kind.REQUEST, 1, malformed, head=head))
            assert await answered(caller) == (Kind.ERROR, 1, ("refused", "test/1/slow is not for caller"))
            caller.send(encode_frame(Kind.REQUEST, 2, malformed, 2, head=head))
            caller.send(encode_frame(Kind.CHUNK, 2, b"ab"))
            assert (await answered(caller))[:2] == (Kind.ERROR, 2)
        dispatcher.may = anybody_may
        caller.send(request(3))
        await eventually(lambda: service.begun, what="the call that is let in")
        caller.send(encode_frame(Kind.REQUEST, 4, malformed, head=head))
        assert b"malformed body" in await told(caller)


async def test_serving_caller_with_too_many_calls_is_busy_before_his_body_is_decoded() -> None:
    dispatcher = Dispatcher(ServeLimits(calls_per_peer=1))
    dispatcher.mount(Slow())
    assert places(dispatcher) == 1
    with pytest.raises(Busy):
        dispatcher.admit(CALLER, Envelope(SLOW.name, 30.0, 0, b"\xc1"), 0, public=False)


async def test_serving_payload_that_no_method_takes_is_a_violation_before_the_body_is_decoded() -> None:
    dispatcher = Dispatcher(ServeLimits())
    dispatcher.mount(Generous(1))
    with pytest.raises(Violation, match="takes no payload"):
        dispatcher.admit(CALLER, Envelope(GIVE.name, 30.0, 0, b"\xc1"), 1, public=False)


async def test_serving_public_stream_knows_no_method_by_another_name() -> None:
    dispatcher = Dispatcher(ServeLimits())
    dispatcher.mount(Slow())
    with pytest.raises(Refused, match="no method"):
        dispatcher.admit(CALLER, Envelope(SLOW.name, 30.0, 0, b"\xc1"), 0, public=True)
