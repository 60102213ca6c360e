"""The calling side of one stream, over a socket pair."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.network.rpc.client import CallerStream
from swarm.network.rpc.dispatcher import Desk, ServeLimits
from swarm.network.rpc.link import Meter
from swarm.network.rpc.server import ServerStream
from swarm.schema import Empty, Message

CALLER, SERVER = PeerId("caller"), PeerId("server")


class Ask(Message):
    """A question without content."""


class Full:
    """A service that takes no payload now."""

    def methods(self) -> Sequence[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [Method(name="test/1/full", request=Ask, handle=self._full, admit=self._refuse)]

    def _refuse(self, caller: PeerId, body: Message, size: int) -> None:
        raise Busy("not now")

    async def _full(self, request: Request) -> Answer:
        raise AssertionError("what is refused is never handled")


async def test_payload_of_a_refused_call_is_let_go_without_the_collector() -> None:
    desk = Desk(ServeLimits())
    desk.mount(Full())
    ours, theirs = socket.socketpair()
    server = ServerStream(CALLER, desk, SystemClock(), Meter(), public=False)
    serving = asyncio.create_task(server.serve(*await asyncio.open_connection(sock=theirs)))
    stream = await CallerStream.over(SERVER, Meter(), *await asyncio.open_connection(sock=ours))
    payload = np.zeros(1000, dtype=np.uint8)
    alive = weakref.ref(payload)
    deadline = asyncio.get_running_loop().time() + 30
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Busy):
            await stream.call("test/1/full", Ask(), Empty, deadline=deadline, payload=memoryview(payload))
        del payload
        assert alive() is None
    finally:
        gc.enable()
        stream.close()
        await serving


def test_bytes_of_very_many_peers_are_counted_and_not_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.MAX_METERED", 8)
    meter = Meter()
    meter.received[CALLER] += 1000
    for number in range(100):
        meter.received[PeerId(f"stranger{number}")] += 1
        meter.received[CALLER] += 1
    assert len(meter.received) <= 8
    assert meter.statistics().total == (0, 1200)
    assert meter.statistics().bytes_received[CALLER] == 1100
