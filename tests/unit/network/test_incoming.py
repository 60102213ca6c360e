"""Others' streams to us, all together, over socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from swarm.clock import SystemClock
from swarm.ids import PeerId
from swarm.network.libp2p.streams import StreamServer
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.link import ByteMeter
from tests.harness.expect import eventually
from tests.harness.rigs.network import Generous, Slow, request

MEMBER = PeerId("member")
MOST = 3
ANSWER = 300 << 10
"""More than the kernel takes at once, and less than a stream does."""


class Door:
    """The incoming streams of a peer that knows one other."""

    def __init__(self) -> None:
        self.service, self.dispatcher = Slow(), Dispatcher(ServeLimits())
        self.dispatcher.mount(self.service)
        self.incoming = StreamServer(self.dispatcher, SystemClock(), ByteMeter(), "public")
        self.incoming.known = lambda peer: peer == MEMBER
        self._ends: list[socket.socket] = []

    async def probe(self, peer: PeerId) -> socket.socket:
        """A stream of that peer's: its own end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self._ends.append(ours)
        self.incoming.accept(peer, "control", *await asyncio.open_connection(sock=theirs))
        return ours

    async def call(self, end: socket.socket, number: int = 1) -> None:
        """A call on that stream, its ``number``-th, until its handler runs."""
        begun = self.service.begun
        end.send(request(number))
        await eventually(lambda: self.service.begun > begun, what="the handler")

    async def close(self) -> None:
        """End all."""
        await self.incoming.close()
        for end in self._ends:
            end.close()


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    monkeypatch.setattr("swarm.network.libp2p.streams.MAX_STRANGER_STREAMS", MOST)
    made = Door()
    yield made
    await made.close()


async def ended(end: socket.socket) -> bool:
    """Until the other side has closed it."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            return not await asyncio.get_running_loop().sock_recv(end, 1)
    return True


async def test_strangers_stream_too_many_takes_the_place_of_the_oldest_on_which_nobody_calls(door: Door) -> None:
    ends = [await door.probe(PeerId(f"stranger{number}")) for number in range(MOST)]
    await door.call(ends[0])
    ends.append(await door.probe(PeerId("late")))
    assert await ended(ends[1])
    assert door.incoming.open == MOST
    await door.call(ends[2])
    await door.call(ends[3])


async def test_strangers_stream_too_many_takes_the_place_of_the_oldest_while_all_are_calling_and_no_members(
    door: Door,
) -> None:
    member = await door.probe(MEMBER)
    await door.call(member)
    ends = [await door.probe(PeerId(f"stranger{number}")) for number in range(MOST)]
    for end in ends:
        await door.call(end)
    ends.append(await door.probe(PeerId("late")))
    assert await ended(ends[0])
    await door.call(ends[-1])
    await door.call(await door.probe(MEMBER))
    assert door.incoming.open == MOST + 2
    for end in (member, *ends[1:]):
        await door.call(end, number=2)


async def test_strangers_who_are_expected_have_streams_of_their_own_beside_the_bound(door: Door) -> None:
    door.incoming.expect(2)
    ends = [await door.probe(PeerId(f"stranger{number}")) for number in range(MOST + 8)]
    for end in ends:
        await door.call(end)
    door.incoming.expect(0)
    await door.probe(PeerId("late"))
    assert await ended(ends[0])


async def test_strangers_stream_whose_answer_is_not_out_yet_is_not_one_on_which_nobody_calls(door: Door) -> None:
    answering = Generous(ANSWER)
    door.dispatcher.mount(answering)
    ends = [await door.probe(PeerId(f"stranger{number}")) for number in range(MOST)]
    ends[0].send(request(1, "give", max_reply_bytes=ANSWER))
    await eventually(lambda: answering.over, what="the end of the call")
    await door.probe(PeerId("late"))
    assert await ended(ends[1])
    await door.call(ends[0], number=2)


async def test_streams_that_come_all_at_once_leave_as_many_as_there_may_be(door: Door) -> None:
    for number in range(MOST * 4):
        ours, theirs = socket.socketpair()
        door._ends.append(ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        door.incoming.accept(PeerId(f"stranger{number}"), "control", reader, writer)
    await eventually(lambda: door.incoming.open == MOST, what="as many streams as there may be")


async def test_stream_of_a_stranger_that_was_barred_is_closed_at_once_and_a_members_is_served(door: Door) -> None:
    flooder = PeerId("flooder")
    door.incoming.bound_strangers(lambda peer: peer == MEMBER)
    for peer in (flooder, MEMBER):
        door.incoming._strangers.bar(peer)
    assert await ended(await door.probe(flooder))
    assert door.incoming.open == 0
    await door.call(await door.probe(MEMBER))
    assert door.incoming.open == 1
