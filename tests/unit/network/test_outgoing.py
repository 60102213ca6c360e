"""Streams to others, with diallers that are made up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from swarm.clock import SystemClock
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p.streams import Outgoing
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.link import ByteMeter
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import StrangerBudget
from tests.harness.expect import eventually
from tests.harness.rigs.network import ECHO, HANG, Note, ServiceBench

TARGET = PeerId("target")


def dialling_for_ever() -> tuple[Outgoing, asyncio.Event]:
    """What gives streams, and an event: a dial has begun."""
    begun = asyncio.Event()

    async def through(operation: Callable[[], Awaitable[object]]) -> object:
        return await operation()

    async def open_stream(target: PeerId, protocol: str) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    dialler = SimpleNamespace(open_stream=open_stream)
    return Outgoing(
        PeerId("me"), dialler, SimpleNamespace(through=through), SimpleNamespace(meter=ByteMeter()), 30.0
    ), begun


async def test_call_that_waits_for_a_dial_when_the_endpoint_closes_is_unreachable_and_not_cancelled() -> None:
    outgoing, begun = dialling_for_ever()
    waiting = asyncio.create_task(outgoing.stream(TARGET, "control"))
    await begun.wait()
    await outgoing.close()
    with pytest.raises(Unreachable, match="closed"):
        await waiting


async def test_call_that_is_cancelled_as_it_waits_for_a_dial_is_cancelled() -> None:
    outgoing, begun = dialling_for_ever()
    waiting = asyncio.create_task(outgoing.stream(TARGET, "control"))
    await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, outgoing.close(), return_exceptions=True)
    assert waiting.cancelled()


class Served:
    """What gives streams to one server; ``streams`` are its ends of all that were dialled."""

    def __init__(self) -> None:
        async def through(operation: Callable[[], Awaitable[object]]) -> object:
            return await operation()

        self.bench = ServiceBench()
        self.dispatcher = Dispatcher(ServeLimits())
        self.dispatcher.mount(self.bench)
        self.streams: list[asyncio.Task[None]] = []
        self.dialling, self.may_dial = asyncio.Event(), asyncio.Event()
        self.may_dial.set()
        dialler, supervisor = SimpleNamespace(open_stream=self._open), SimpleNamespace(through=through)
        self.outgoing = Outgoing(PeerId("me"), dialler, supervisor, SimpleNamespace(meter=ByteMeter()), 30.0)
        self.lost: list[PeerId] = []
        self.outgoing.on_lost = self.lost.append

    async def _open(self, target: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.dialling.set()
        await self.may_dial.wait()
        ours, theirs = socket.socketpair()
        clock = SystemClock()
        members = StrangerBudget(clock)
        members.known = lambda peer: True
        server = ServerStream(PeerId("me"), self.dispatcher, clock, ByteMeter(), members, public=False)
        self.streams.append(asyncio.create_task(server.serve(*await asyncio.open_connection(sock=theirs))))
        return await asyncio.open_connection(sock=ours)

    async def echo(self) -> int:
        """One call on the stream of now."""
        stream = await self.outgoing.stream(TARGET, "control")
        reply, _ = await stream.call(ECHO, Note(number=7), deadline=asyncio.get_running_loop().time() + 30)
        return reply.number


async def test_call_that_waits_keeps_its_stream_when_the_next_ones_take_another() -> None:
    served = Served()
    stream = await served.outgoing.stream(TARGET, "control")
    waiting = asyncio.create_task(stream.call(HANG, Note(), deadline=asyncio.get_running_loop().time() + 30))
    await served.bench.started.wait()
    served.outgoing.renew(TARGET)
    assert (await served.echo(), len(served.streams)) == (7, 2)
    assert not served.streams[0].done()
    assert not waiting.done()
    waiting.cancel()
    await served.streams[0]
    assert served.bench.cancelled.is_set(), "it was told that the call was given up"
    again = await served.outgoing.stream(TARGET, "control")
    hanging = asyncio.create_task(again.call(HANG, Note(), deadline=asyncio.get_running_loop().time() + 30))
    await served.echo()
    served.outgoing.renew(TARGET)
    await served.outgoing.close()
    with pytest.raises(Unreachable, match="closing"):
        await hanging
    await served.streams[1]


async def test_stream_that_is_being_dialled_when_they_are_renewed_is_dialled_again() -> None:
    served = Served()
    served.may_dial.clear()
    calls = [asyncio.create_task(served.echo()) for _ in range(2)]
    await served.dialling.wait()
    assert served.outgoing.renew(TARGET)
    served.may_dial.set()
    assert await asyncio.gather(*calls) == [7, 7]
    await served.streams[0]
    assert len(served.streams) == 2, "both calls share the second one"
    assert served.lost == []
    assert (await served.echo(), len(served.streams)) == (7, 2)
    await served.outgoing.close()
    await served.streams[1]


async def test_notice_on_a_stream_that_is_renewed_behind_it_arrives_whole_and_is_handled() -> None:
    served = Served()
    stream = await served.outgoing.stream(TARGET, "control")
    deadline = asyncio.get_running_loop().time() + 30
    await stream.notify(HANG, Note(blob=bytes(3 << 20)), deadline=deadline)
    assert not stream._link.flushed, "the fault: not all of it is sent"
    served.outgoing.renew(TARGET)
    assert (stream.alive, stream.ended) == (False, False)
    async with asyncio.timeout_at(deadline):
        await served.bench.started.wait()
    await eventually(lambda: stream.ended)
    served.bench.release.set()
    await served.streams[0]
    assert not served.bench.cancelled.is_set()
    assert served.lost == []
    await served.outgoing.close()
