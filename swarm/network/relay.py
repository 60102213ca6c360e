"""Passing on connections for peers that nobody can dial.

libp2p's circuit relay, version 2, answered by us instead of by the daemon: the daemon's own relay cannot be given
other limits than 128 KiB and two minutes per connection (its start-up installs the default one over the configured
one), which no tensor survives. The two ends run their own encrypted connection through the circuit, so a relay sees
who talks to whom and how much, never what, and can change nothing unnoticed.

Who may be called is decided by :meth:`Relay.reserve`, which only members of the run reach; who calls is anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.errors import Busy, PeerError, Violation
from swarm.ids import PeerId
from swarm.network.attach import LINK_ERRORS, AttachedP2P, peer_bytes, peer_of_bytes
from swarm.network.circuit import (
    HOP,
    STOP,
    CircuitMessage,
    HopType,
    Status,
    StopType,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
    read_body,
)

logger = logging.getLogger(__name__)

RESERVED_S = 60.0
"""How long a reservation holds unless it is renewed."""

_SHAKE_S = 10.0
_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """``circuits`` in all and ``circuits_per_peer`` for each end; a pair of peers needs one. There is no limit of
    time or bytes."""

    reservations: int = 128
    circuits: int = 256
    circuits_per_peer: int = 64


class Relay:
    """One peer's service to others. Made, then :meth:`open`\\ ed once its daemon is there; ended by :meth:`close`."""

    def __init__(self, p2p: AttachedP2P, clock: Clock, limits: RelayLimits | None = None) -> None:
        self._p2p, self._clock = p2p, clock
        self._limits = limits or RelayLimits()
        self._reserved: dict[PeerId, float] = {}
        self._circuits: dict[asyncio.Task[None], tuple[PeerId, PeerId | None]] = {}
        self.relayed_bytes = 0

    async def open(self) -> None:
        """Answer the daemon's streams from now on. Raises Unreachable."""
        await self._p2p.serve_streams(HOP, self._accept)

    def reserve(self, peer: PeerId) -> None:
        """Let others reach ``peer`` through us for the next 60 s. Raises Busy when too many have asked."""
        now = self._clock.monotonic()
        self._reserved = {each: until for each, until in self._reserved.items() if until > now}
        if peer not in self._reserved and len(self._reserved) >= self._limits.reservations:
            raise Busy(f"this relay serves {len(self._reserved)} peers already")
        self._reserved[peer] = now + RESERVED_S

    @property
    def circuits(self) -> int:
        """How many connections are passed on now."""
        return len(self._circuits)

    async def close(self) -> None:
        """Cut every circuit. Idempotent."""
        for task in self._circuits:
            task.cancel()
        await asyncio.gather(*self._circuits, return_exceptions=True)

    async def _accept(self, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = self._serve(caller, reader, writer)
        task = asyncio.get_running_loop().create_task(serving, name="relay circuit")
        self._circuits[task] = (caller, None)
        task.add_done_callback(lambda done: self._circuits.pop(done))

    async def _serve(self, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SHAKE_S):
                there = await self._shake_hands(caller, reader, writer)
            if there is not None:
                try:
                    await self._splice((reader, writer), there)
                finally:
                    there[1].close()
        except (*LINK_ERRORS, PeerError) as error:
            logger.debug("a circuit of %s ended: %s", caller, error)
        finally:
            writer.close()

    async def _shake_hands(
        self, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The stream to whom the caller wants, once both have agreed; None when it was told no."""
        try:
            target, status = self._judge(caller, decode_hop(await read_body(reader)))
        except Violation:
            target, status = None, Status.MALFORMED_MESSAGE
        there = None
        if target is not None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - we run in one
            self._circuits[task] = (caller, target)
            try:
                there = await self._call(caller, target)
            except (*LINK_ERRORS, PeerError) as error:
                logger.debug("%s cannot be reached for %s: %s", target, caller, error)
                status = Status.CONNECTION_FAILED
        writer.write(encode_hop(CircuitMessage(HopType.STATUS, status=status)))
        await writer.drain()
        return there

    def _judge(self, caller: PeerId, asked: CircuitMessage) -> tuple[PeerId | None, Status]:
        """Whom to call for this message, or why not."""
        if asked.kind == HopType.RESERVE:
            return None, Status.RESERVATION_REFUSED
        if asked.kind != HopType.CONNECT or asked.peer is None:
            return None, Status.UNEXPECTED_MESSAGE
        target = peer_of_bytes(asked.peer)
        if target == caller:
            return None, Status.PERMISSION_DENIED
        if self._reserved.get(target, 0.0) <= self._clock.monotonic():
            return None, Status.NO_RESERVATION
        if len(self._circuits) > self._limits.circuits or any(
            sum(peer in ends for ends in self._circuits.values()) > self._limits.circuits_per_peer
            for peer in (caller, target)
        ):
            return None, Status.RESOURCE_LIMIT_EXCEEDED
        return target, Status.OK

    async def _call(self, caller: PeerId, target: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to the target over the connection that it keeps with us, with its consent."""
        reader, writer = await self._p2p.open_stream(target, STOP)
        try:
            writer.write(encode_stop(CircuitMessage(StopType.CONNECT, peer_bytes(caller))))
            answer = decode_stop(await read_body(reader))
            if answer.kind != StopType.STATUS or answer.status != Status.OK:
                raise Violation(f"it answered with status {answer.status}", peer=target)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _splice(
        self,
        here: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Pass bytes both ways until both directions have ended, or one of them breaks."""

        async def one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(_READ_BYTES):
                self.relayed_bytes += len(data)
                writer.write(data)
                await writer.drain()
            with contextlib.suppress(*LINK_ERRORS):
                writer.write_eof()

        await _first_failure(one_way(here[0], there[1]), one_way(there[0], here[1]))


async def _first_failure(*ways: Awaitable[None]) -> None:
    """Until all are done or one fails; none goes on afterwards."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
