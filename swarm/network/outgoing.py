"""Our streams to other peers: one for each peer and protocol, dialled when it is first needed or was lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.dialling import Dialler
from swarm.network.incoming import Incoming
from swarm.network.link import Meter, enlarge
from swarm.network.rpc import CallerStream
from swarm.network.supervisor import Supervisor

_Key = tuple[PeerId, str]


class Outgoing:
    """Gives streams until :meth:`close`. A call on a live stream meets nothing of this but one look into a table."""

    def __init__(
        self, me: PeerId, dialler: Dialler, supervisor: Supervisor, incoming: Incoming, meter: Meter, timeout_s: float
    ) -> None:
        """A dial takes ``timeout_s`` at most. What we call ourselves goes straight to ``incoming``. Whoever sets
        ``on_lost`` is told of the peer to whom a stream broke."""
        self._me, self._dialler, self._supervisor = me, dialler, supervisor
        self._incoming, self._meter, self._timeout_s = incoming, meter, timeout_s
        self._callers: dict[_Key, CallerStream] = {}
        self._dials: dict[_Key, asyncio.Task[CallerStream]] = {}
        self._closed = False
        self.on_lost: Callable[[PeerId], None] | None = None

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Whom we have, or had until lately, a stream to."""
        return tuple(dict.fromkeys(peer for peer, _ in self._callers if peer != self._me))

    @property
    def alive(self) -> tuple[_Key, ...]:
        """The streams that can be called on now, by peer and protocol."""
        return tuple(key for key, stream in self._callers.items() if stream.alive)

    async def stream(self, target: PeerId, protocol: str) -> CallerStream:
        """The pair's stream, dialled when there is none; concurrent calls share one dial, which outlives a caller that
        gives up. While our daemon is being replaced a dial waits for the next one. Raises Unreachable."""
        if self._closed:
            raise Unreachable("this endpoint is closed", peer=target)
        key = (target, protocol)
        stream = self._callers.get(key)
        if stream is not None and stream.alive:
            return stream
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = asyncio.get_running_loop().create_task(self._dial(target, protocol), name="dial")
            dial.add_done_callback(lambda done: self._dialled(key, done))
        try:
            return await asyncio.shield(dial)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if dial.cancelled() and (task is None or not task.cancelling()):
                # :meth:`close` ended the dial; nobody has cancelled whoever waits for it.
                raise Unreachable("this endpoint is closed", peer=target) from None
            raise

    async def connect_any(self, peers: Collection[PeerId]) -> None:
        """Connect with all of these, us left out. Raises Unreachable when there are some and none can be dialled."""
        others = sorted(set(peers) - {self._me})
        dials = await asyncio.gather(*map(self._connect, others), return_exceptions=True)
        failures = [error for error in dials if error is not None]
        if failures and len(failures) == len(others):
            raise Unreachable(f"none of {len(others)} bootstrap peers can be dialled: {failures[0]}")

    async def _connect(self, peer: PeerId) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._supervisor.through(lambda: self._dialler.connect(peer))
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._timeout_s:g} s", peer=peer) from error

    async def close(self) -> None:
        """End every stream and every dial; calls fail with Unreachable. Idempotent."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        for caller in self._callers.values():
            caller.close()
        await asyncio.gather(*dials, return_exceptions=True)

    def _dialled(self, key: _Key, dial: asyncio.Task[CallerStream]) -> None:
        del self._dials[key]
        if not dial.cancelled() and dial.exception() is None:
            # Streams to peers that are long gone would add up over a long run.
            self._callers = {each: stream for each, stream in self._callers.items() if stream.alive}
            self._callers[key] = dial.result()

    async def _dial(self, target: PeerId, protocol: str) -> CallerStream:
        if target == self._me:
            return await self._dial_self(protocol)
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await self._supervisor.through(lambda: self._dialler.open_stream(target, protocol))
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._timeout_s:g} s", peer=target) from error
        enlarge(writer)
        return await CallerStream.over(target, self._meter, reader, writer, lost=self.on_lost)

    async def _dial_self(self, protocol: str) -> CallerStream:
        ours, theirs = socket.socketpair()
        self._incoming.accept(self._me, protocol, *await asyncio.open_connection(sock=theirs))
        return await CallerStream.over(self._me, self._meter, *await asyncio.open_connection(sock=ours))
