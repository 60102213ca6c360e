"""The proxy: bytes arrive whole and in order, as late and as slowly as described, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from swarm.clock import Clock, SystemClock
from swarm.errors import BugError
from swarm.sim.links import Links, LinkShape, Traffic
from swarm.sim.proxy import HELD_BYTES, LinkProxy
from tests.harness.expect import eventually


class Echo:
    """A server that sends back what it gets."""

    def __init__(self) -> None:
        self.received = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


class Hurried(SystemClock):
    """A clock that is wherever the latest sleep ends, and stands still otherwise: sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """The end of the latest sleep."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Be there, when the others have had their turn."""
        ends = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, ends)


@contextlib.asynccontextmanager
async def proxied(links: Links | None = None, clock: Clock | None = None) -> AsyncIterator[tuple[LinkProxy, Echo, int]]:
    """(proxy, the server "b" behind it, the proxy's port); every caller is "a"."""
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = LinkProxy(Traffic(links), clock or SystemClock(), lambda port: "a")
    port = await proxy.expose("b", "127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield proxy, echo, port
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


async def there_and_back(port: int, data: bytes) -> bytes:
    """What the echo sends back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    received, _ = await asyncio.gather(reader.read(-1), send())
    writer.close()
    await writer.wait_closed()
    return received


async def test_bytes_pass_unchanged_and_are_counted_by_direction() -> None:
    data = random.Random(1).randbytes(3 << 20)
    async with proxied() as (proxy, _, port):
        assert await there_and_back(port, data) == data
        assert proxy.passed == {("a", "b"): len(data), ("b", "a"): len(data)}


async def test_rate_is_kept_with_any_number_of_connections() -> None:
    shape, clock = LinkShape(bytes_per_s=4e6), Hurried()
    async with proxied(Links(rules=(("a", "b", shape),)), clock) as (_, _, port):
        data = bytes(400_000)
        assert await asyncio.gather(*(there_and_back(port, data) for _ in range(2))) == [data, data]
        assert clock.now == pytest.approx(0.2)


async def test_cut_holds_bytes_until_it_is_healed() -> None:
    async with proxied() as (proxy, echo, port):
        proxy.traffic.cut(("a",), ("b",), both=False)
        waiting = asyncio.create_task(there_and_back(port, b"held"))
        await eventually(lambda: proxy._connections, what="the connection")
        for _ in range(20):
            await asyncio.sleep(0)
        assert echo.received == 0
        proxy.traffic.heal()
        proxy.changed()
        assert await waiting == b"held"


async def test_one_way_cut_lets_the_other_way_through() -> None:
    async with proxied() as (proxy, echo, port):
        proxy.traffic.cut(("b",), ("a",), both=False)
        waiting = asyncio.create_task(there_and_back(port, b"question"))
        await eventually(lambda: echo.received == 8, what="the question")
        assert not waiting.done()
        proxy.traffic.heal()
        proxy.changed()
        assert await waiting == b"question"


async def test_described_resets_break_the_connection() -> None:
    async with proxied(Links(LinkShape(reset=0.99), seed=3)) as (proxy, _, port):
        with contextlib.suppress(ConnectionError):
            assert await there_and_back(port, bytes(1 << 20)) == b""
        assert proxy.resets >= 1


async def test_sender_is_held_back_by_a_slow_link() -> None:
    async with proxied(Links(LinkShape(latency_s=30.0))) as (proxy, echo, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_flood(writer, 64 << 20))
        await eventually(lambda: writer.transport.get_write_buffer_size() > 0, what="a full link")
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
        assert echo.received == 0
        assert HELD_BYTES < 64 << 20


async def _flood(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size >> 20):
        writer.write(bytes(1 << 20))
        await writer.drain()


async def test_peer_that_is_not_there_breaks_the_callers_connection() -> None:
    proxy = LinkProxy(Traffic(), SystemClock(), lambda port: "a")
    port = await proxy.expose("b", "127.0.0.1", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    with pytest.raises(BugError):
        await proxy.expose("b", "127.0.0.1", 1)
    await proxy.close()
    await proxy.close()


async def test_corrupt_piece_differs_in_one_bit() -> None:
    async with proxied() as (proxy, _, port):
        proxy.corrupt("a", "b")
        received = await there_and_back(port, bytes(1000))
        assert sum(byte.bit_count() for byte in received) == 1
        assert proxy.corrupt_left("a", "b") == 0
