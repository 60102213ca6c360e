"""Limits on what a peer sends and receives, in virtual time: the rate holds, and control goes before payloads."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import pytest

from peers.sharing import limit_options as choice
from peers.sharing.limit_options import read_rate
from swarm.clock import SystemClock
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.rpc.client import CallerStream
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.framing import CHUNK_BYTES
from swarm.network.rpc.link import Link
from swarm.network.rpc.meter import MIN_RATE, SMALL_BYTES, ByteMeter, RateLimits
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import StrangerBudget
from tests.harness.rigs.clocks import virtual
from tests.harness.rigs.network import DOWN, ECHO, UP, Note, ServiceBench

ME, OTHER = PeerId("me"), PeerId("other")
MB = 1_000_000
SLACK = 2 * CHUNK_BYTES + 2 * MB // 4 + SMALL_BYTES
"""Burst, reserve and a frame, at 1 MB/s."""


class MemoryTransport:
    """One end of a stream in memory: what is written arrives at once where the other end reads, and waits where not."""

    def __init__(self) -> None:
        self.protocol: Link
        self.other: MemoryTransport
        self.waiting: deque[bytes] = deque()
        self.reading, self.closing = True, False
        self.sent: list[tuple[float, int]] = []
        self.read: list[tuple[float, int]] = []

    def write(self, piece: bytes | memoryview) -> None:
        self.sent.append((asyncio.get_running_loop().time(), len(piece)))
        self.other.waiting.append(bytes(piece))
        asyncio.get_running_loop().call_soon(self.other.deliver)

    def deliver(self) -> None:
        while self.waiting and self.reading and not self.closing:
            piece = self.waiting.popleft()
            buffer = self.protocol.get_buffer(-1)
            size = min(len(buffer), len(piece))
            buffer[:size] = piece[:size]
            if size < len(piece):
                self.waiting.appendleft(piece[size:])
            self.read.append((asyncio.get_running_loop().time(), size))
            self.protocol.buffer_updated(size)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if not self.reading:
            self.reading = True
            asyncio.get_running_loop().call_soon(self.deliver)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Pair:
    """Streams from us to another peer, which serves; each side has one meter for all of them."""

    def __init__(self, ours: ByteMeter, theirs: ByteMeter | None = None) -> None:
        self.ours, self.theirs, self.bench = ours, theirs or ByteMeter(), ServiceBench()
        self.dispatcher = Dispatcher(ServeLimits())
        self.dispatcher.mount(self.bench)

    def stream(self, to: PeerId = OTHER) -> tuple[CallerStream, MemoryTransport]:
        """A new stream, and our end of it."""
        strangers = StrangerBudget(SystemClock())
        strangers.known = lambda peer: True
        caller = CallerStream(to, self.ours)
        server = ServerStream(ME, self.dispatcher, SystemClock(), self.theirs, strangers, public=False)
        near, far = MemoryTransport(), MemoryTransport()
        near.other, far.other = far, near
        for transport, link in ((near, caller._link), (far, server._link)):
            transport.protocol = link
            link._transport = cast(Any, transport)
            link._writer = cast(Any, object())
        return caller, near


def later() -> float:
    return asyncio.get_running_loop().time() + 600


def most_in(window_s: float, moves: list[tuple[float, int]]) -> int:
    """The most bytes that moved in any window of so many seconds."""
    most, inside, total = 0, deque[tuple[float, int]](), 0
    for at, size in moves:
        inside.append((at, size))
        total += size
        while inside[0][0] < at - window_s:
            total -= inside.popleft()[1]
        most = max(most, total)
    return most


@virtual
@pytest.mark.parametrize("upload", [True, False], ids=["upload", "download"])
async def test_rate_is_kept_over_all_streams_together(upload: bool) -> None:
    pair = Pair(ByteMeter(RateLimits(upload=MB) if upload else RateLimits(download=MB)))
    (first, one), (second, two) = pair.stream(), pair.stream()
    began = asyncio.get_running_loop().time()
    asked = {"body": Note(number=5 * MB), "deadline": later()}
    extra = {"payload": bytes(5 * MB)} if upload else {"max_reply_bytes": 8 * MB}
    await asyncio.gather(*(each.call(UP if upload else DOWN, **asked, **extra) for each in (first, second)))
    took = asyncio.get_running_loop().time() - began
    assert 9.0 < took < 10.1, "10 MB at 1 MB/s, less what goes at once"
    moves = sorted(one.sent + two.sent if upload else one.read + two.read)
    assert sum(size for _, size in moves) > 10 * MB
    for window_s in (0.1, 1.0, 5.0):
        assert most_in(window_s, moves) <= window_s * MB + SLACK


@virtual
@pytest.mark.parametrize("limits", [RateLimits(upload=MIN_RATE), RateLimits(download=MIN_RATE)])
async def test_control_goes_before_payloads_both_ways(limits: RateLimits) -> None:
    pair = Pair(ByteMeter(limits))
    (tensors, _), (control, _) = pair.stream(), pair.stream()
    loading = [
        asyncio.create_task(tensors.call(UP, Note(number=4 * MB), deadline=later(), payload=bytes(4 * MB))),
        asyncio.create_task(tensors.call(DOWN, Note(number=1 << 22), deadline=later(), max_reply_bytes=8 * MB)),
    ]
    loop = asyncio.get_running_loop()
    for _ in range(20):
        await asyncio.sleep(1)
        asked = loop.time()
        await control.call(ECHO, Note(text="are you there?"), deadline=later())
        assert loop.time() - asked < 0.01
    assert not all(task.done() for task in loading), "a payload is under way all the time"
    await asyncio.gather(*loading)


@virtual
async def test_what_a_peer_says_to_itself_is_counted_and_not_limited() -> None:
    pair = Pair(ByteMeter(RateLimits(upload=MIN_RATE, download=MIN_RATE), ME))
    stream, _ = pair.stream(to=ME)
    began = asyncio.get_running_loop().time()
    await stream.call(UP, Note(number=8 * MB), deadline=later(), payload=bytes(8 * MB))
    assert asyncio.get_running_loop().time() == began
    assert pair.ours.sent[ME] > 8 * MB


@virtual
async def test_sender_that_gives_up_while_it_waits_leaves_the_stream_whole() -> None:
    pair = Pair(ByteMeter(RateLimits(upload=MIN_RATE)))
    stream, _ = pair.stream()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await stream.call(UP, Note(number=4 * MB), deadline=later(), payload=bytes(4 * MB))
    assert stream.alive
    answer, _ = await stream.call(UP, Note(number=CHUNK_BYTES), deadline=later(), payload=bytes(CHUNK_BYTES))
    assert answer.number == CHUNK_BYTES


@virtual
async def test_stream_that_ends_while_it_is_held_disturbs_no_other() -> None:
    pair = Pair(ByteMeter(RateLimits(download=MIN_RATE)))
    (first, one), (second, _) = pair.stream(), pair.stream()
    asked = Note(number=1 << 21)
    calls = [
        asyncio.create_task(each.call(DOWN, asked, deadline=later(), max_reply_bytes=8 * MB))
        for each in (first, second)
    ]
    await asyncio.sleep(5)
    assert not one.reading, "it is held"
    first.close("the test is over")
    await asyncio.gather(calls[0], return_exceptions=True)
    _, payload = await calls[1]
    assert len(payload) == 1 << 21


def test_least_rate_that_may_be_named_is_the_network_s_own() -> None:
    assert read_rate("1mbit") == choice.MIN_RATE == MIN_RATE


@virtual
@pytest.mark.parametrize("limits", [RateLimits(upload=MIN_RATE), RateLimits(download=MIN_RATE)])
@pytest.mark.parametrize("payload_bytes", [0, 40_000])
async def test_small_frames_that_take_the_whole_rate_do_not_stop_a_payload(
    limits: RateLimits, payload_bytes: int
) -> None:
    pair = Pair(ByteMeter(limits))
    small, large, loop = [pair.stream()[0] for _ in range(8)], pair.stream()[0], asyncio.get_running_loop()
    asked = Note(number=payload_bytes) if payload_bytes else Note(blob=bytes(40_000))
    sizes: list[int] = []

    async def flood(stream: CallerStream) -> None:
        while True:
            if not payload_bytes:
                await stream.call(ECHO, asked, deadline=later())
            elif limits.upload:
                await stream.call(UP, asked, deadline=later(), payload=bytes(payload_bytes))
            else:
                await stream.call(DOWN, asked, deadline=later(), max_reply_bytes=MB)
            sizes.append(40_000)

    floods = [asyncio.create_task(flood(stream)) for stream in small]
    await asyncio.sleep(30)
    assert sum(sizes) > 20 * MIN_RATE, "they take the whole rate"
    began = loop.time()
    if limits.upload:
        await large.call(UP, Note(number=MB // 2), deadline=later(), payload=bytes(MB // 2))
    else:
        await large.call(DOWN, Note(number=MB // 2), deadline=later(), max_reply_bytes=MB)
    assert loop.time() - began < (60 if payload_bytes else 400), "each of the others has many turns of the reserve"
    for task in floods:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


@virtual
async def test_large_control_frame_that_waits_keeps_no_small_one_of_its_stream_waiting() -> None:
    pair = Pair(ByteMeter(RateLimits(upload=MIN_RATE)))
    stream, _ = pair.stream()
    loop = asyncio.get_running_loop()
    large = asyncio.create_task(stream.call(ECHO, Note(blob=bytes(3 * MB)), deadline=later()))
    for _ in range(10):
        await asyncio.sleep(1)
        asked = loop.time()
        await stream.call(ECHO, Note(text="are you there?"), deadline=later())
        assert loop.time() - asked < 0.01
    assert not large.done(), "it waits all the time"
    await large


@virtual
async def test_frames_of_lost_streams_take_nothing_from_the_others() -> None:
    pair = Pair(ByteMeter(RateLimits(upload=MIN_RATE)))
    lost, other = [pair.stream()[0] for _ in range(20)], pair.stream()[0]
    chunk, loop = Note(number=CHUNK_BYTES), asyncio.get_running_loop()
    waiting = [asyncio.create_task(each.call(UP, chunk, deadline=later(), payload=bytes(CHUNK_BYTES))) for each in lost]
    await asyncio.sleep(5)
    assert sum(task.done() for task in waiting) < 5, "most wait for their turn"
    for each in lost:
        each.close("the test is over")
    began = loop.time()
    await other.call(UP, chunk, deadline=later(), payload=bytes(CHUNK_BYTES))
    assert loop.time() - began < 2 * CHUNK_BYTES / MIN_RATE
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(one, Unreachable) for one in ended) > 15
