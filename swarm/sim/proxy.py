"""Described links for real processes: a TCP proxy in front of each peer, announced as the peer's address.

Anyone who dials a peer reaches its proxy, which finds out who is calling and lets bytes pass in both directions as
:class:`swarm.sim.links.Traffic` says: late, slowly, not at all, or with a reset. In user space, without privileges.

    proxy = LinkProxy(Traffic(links), clock, who)
    port = await proxy.expose("host-1", "127.0.0.1", 4001)       # the peer announces this port
    proxy.traffic.cut(("host-1",), ("host-2",)); proxy.changed()

Given up: latency is added to what the kernel lets through, so rates are right only while the proxy's own processor
keeps up (some hundred MB a second); a cut holds bytes back instead of dropping packets, which TCP shows alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.clock import Clock
from swarm.errors import BugError
from swarm.sim.links import Traffic

PIECE_BYTES = 32 << 10
HELD_BYTES = 4 << 20
"""How much of one direction may be under way: with a window of that size TCP would stop the sender."""

Who = Callable[[int], str]
"""The name of the peer behind a connection, by the caller's own port; "" when it is not known."""


@dataclass(frozen=True, slots=True)
class _Piece:
    data: bytes
    due: float


@dataclass(eq=False)
class _Way:
    """One direction of one connection."""

    source: str
    target: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pieces: asyncio.Queue[_Piece | None] = field(default_factory=asyncio.Queue)
    held: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)


class _Reset(Exception):
    """The description breaks this connection here."""


class LinkProxy:
    """Proxies of any number of peers in one loop. ``passed`` counts bytes by (from, to)."""

    def __init__(self, traffic: Traffic, clock: Clock, who: Who) -> None:
        self.traffic, self._clock, self._who = traffic, clock, who
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self.passed: dict[tuple[str, str], int] = {}
        self.resets = 0
        self._corrupt: dict[tuple[str, str], int] = {}

    async def expose(self, name: str, host: str, port: int, *, listen: int = 0) -> int:
        """Stand in front of a peer that listens, now or later, on ``host``:``port``; returns the proxy's own port on
        127.0.0.1, any free one unless ``listen`` says which. Raises OSError when that is taken, BugError for a name
        that has a proxy."""
        if name in self._servers:
            raise BugError(f"{name} has a proxy already")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(name, (host, port), reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", listen, limit=2 * PIECE_BYTES)
        self._servers[name] = server
        return int(server.sockets[0].getsockname()[1])

    def changed(self) -> None:
        """Tell what waits that :attr:`traffic` has been given a command."""
        self._change.set()
        self._change = asyncio.Event()

    def corrupt(self, source: str, target: str, pieces: int = 1) -> None:
        """The next pieces in this direction pass with a bit flipped, which an authenticated stream must notice."""
        self._corrupt[source, target] = self._corrupt.get((source, target), 0) + pieces

    def corrupt_left(self, source: str, target: str) -> int:
        """Return how many are still to be corrupted."""
        return self._corrupt.get((source, target), 0)

    async def close(self) -> None:
        """Close every proxy and break every connection. Idempotent."""
        for server in self._servers.values():
            server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for server in self._servers.values():
            await server.wait_closed()
        self._servers.clear()

    async def _serve(
        self, name: str, to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - start_server made one
        self._connections.add(task)
        try:
            caller = self._who(int(writer.get_extra_info("peername")[1]))
            back, forth = await asyncio.open_connection(*to, limit=2 * PIECE_BYTES)
            try:
                await self._join(_Way(caller, name, reader, forth), _Way(name, caller, back, writer))
            finally:
                await _break(forth)
        except (OSError, asyncio.CancelledError):
            pass  # the peer is not there, or we close: the caller sees its connection break
        finally:
            self._connections.discard(task)
            await _break(writer)

    async def _join(self, there: _Way, back: _Way) -> None:
        """Both directions, until one breaks or both have ended."""
        try:
            async with asyncio.TaskGroup() as group:
                for way in (there, back):
                    group.create_task(self._take(way))
                    group.create_task(self._give(way))
        except* (_Reset, OSError):
            pass

    async def _take(self, way: _Way) -> None:
        """Read, and find out when each piece may go on."""
        last = 0.0
        while data := await way.reader.read(PIECE_BYTES):
            now = self._clock.monotonic()
            fate = self.traffic.fate(way.source, way.target, len(data), now, in_line=True)
            if fate.reset:
                self.resets += 1
                raise _Reset
            last = max(last, now + fate.seconds)  # a stream keeps its order
            way.pieces.put_nowait(_Piece(self._received(way, data), last))
            way.held += len(data)
            while way.held > HELD_BYTES:
                way.room.clear()
                await way.room.wait()
        way.pieces.put_nowait(None)

    def _received(self, way: _Way, data: bytes) -> bytes:
        left = self._corrupt.get((way.source, way.target), 0)
        if not left:
            return data
        self._corrupt[way.source, way.target] = left - 1
        at = len(data) // 2
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    async def _give(self, way: _Way) -> None:
        while (piece := await way.pieces.get()) is not None:
            if (wait := piece.due - self._clock.monotonic()) > 0:
                await self._clock.sleep(wait)
            while self.traffic.is_cut(way.source, way.target):
                await self._change.wait()
            way.writer.write(piece.data)
            await way.writer.drain()
            way.held -= len(piece.data)
            way.room.set()
            pair = (way.source, way.target)
            self.passed[pair] = self.passed.get(pair, 0) + len(piece.data)
        if way.writer.can_write_eof():
            way.writer.write_eof()


async def _break(writer: asyncio.StreamWriter) -> None:
    """Close at once, what is not yet sent is lost."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
