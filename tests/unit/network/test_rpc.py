"""The calling side of one stream, over a socket pair."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from swarm import WIRE_VERSION
from swarm.clock import SystemClock
from swarm.errors import Busy, SpeaksOtherWire
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.network.rpc.client import CallerStream
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.framing import Kind, encode_frame
from swarm.network.rpc.link import ByteMeter
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import StrangerBudget
from swarm.schema import Empty, Message
from tests.harness.rigs.network import Ask

CALLER, SERVER = PeerId("caller"), PeerId("server")


FULL = Rpc("test/1/full", Ask, Empty)


class Full:
    """A service that takes no payload now."""

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [FULL.handled(self._full, admit=self._refuse)]

    def _refuse(self, caller: PeerId, body: Message, size: int) -> None:
        raise Busy("not now")

    async def _full(self, caller: PeerId, body: Ask) -> Empty:
        raise AssertionError("what is refused is never handled")


async def test_payload_of_a_refused_call_is_let_go_without_the_collector() -> None:
    dispatcher = Dispatcher(ServeLimits())
    dispatcher.mount(Full())
    ours, theirs = socket.socketpair()
    server = ServerStream(CALLER, dispatcher, SystemClock(), ByteMeter(), StrangerBudget(SystemClock()), public=False)
    serving = asyncio.create_task(server.serve(*await asyncio.open_connection(sock=theirs)))
    stream = await CallerStream.over(SERVER, ByteMeter(), *await asyncio.open_connection(sock=ours))
    payload = np.zeros(1000, dtype=np.uint8)
    alive = weakref.ref(payload)
    deadline = asyncio.get_running_loop().time() + 30
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Busy):
            await stream.call(FULL, Ask(), deadline=deadline, payload=memoryview(payload))
        del payload
        assert alive() is None
    finally:
        gc.enable()
        stream.close("the test is over")
        await serving


async def test_call_to_a_peer_of_another_wire_version_fails_at_once_and_says_which() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    with theirs:
        stream = await CallerStream.over(SERVER, ByteMeter(), *await asyncio.open_connection(sock=ours))
        asking = asyncio.create_task(stream.call(FULL, Ask(), deadline=loop.time() + 30))
        assert await loop.sock_recv(theirs, 1 << 10)
        frame = bytearray(encode_frame(Kind.ERROR, 0, b"of which we can read nothing"))
        frame[2] = WIRE_VERSION - 1
        theirs.send(frame)
        reason = f"wire version {WIRE_VERSION - 1}, and not {WIRE_VERSION}"
        with pytest.raises(SpeaksOtherWire, match=reason) as caught:
            await asking
        assert (caught.value.peer, caught.value.code) == (SERVER, "violation")


def test_bytes_of_very_many_peers_are_counted_and_not_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.meter.MAX_METERED", 8)
    meter = ByteMeter()
    meter.received[CALLER] += 1000
    for number in range(100):
        meter.received[PeerId(f"stranger{number}")] += 1
        meter.received[CALLER] += 1
    assert len(meter.received) <= 8
    assert meter.statistics().total == (0, 1200)
    assert meter.statistics().bytes_received[CALLER] == 1100
