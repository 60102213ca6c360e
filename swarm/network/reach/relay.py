"""Passing on connections for peers that nobody can dial.

libp2p's circuit relay, version 2, answered by us instead of by the daemon: the daemon's own relay cannot be given
other limits than 128 KiB and two minutes per connection (its start-up installs the default one over the configured
one), which no tensor survives. The two ends run their own encrypted connection through the circuit, so a relay sees
who talks to whom and how much, never what, and can change nothing unnoticed.

Anyone who has entered the run, which the public manifest suffices for, may ask to be called through us, and anybody may
call. Members of the run, as :meth:`Relay.allow` says who they are, are served without limits of time and bytes; all
others share the small bounds of :mod:`swarm.network.reach.relay_slots`. A relay that belongs to no run
(:mod:`swarm.network.reach.standing`) knows those who have a reservation instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from swarm.clock import Clock
from swarm.errors import Busy, PeerError, Refused, Violation
from swarm.ids import PeerId
from swarm.network.libp2p.attach import LINK_ERRORS, AttachedP2P, peer_bytes, peer_of_bytes
from swarm.network.libp2p.splice import RateLimiter, Splice, SpliceLimits, Streams
from swarm.network.protocols import Endpoint, Rpc
from swarm.network.reach.circuit import (
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
from swarm.network.reach.reachability import Withdrawn
from swarm.network.reach.relay_slots import MayRelay, RelayLimits, RelaySlot, RelaySlots
from swarm.waiting import ended

logger = logging.getLogger(__name__)

_SHAKE_S = 10.0
_TELL_S = 1.0


class Relay:
    """One peer's service to others. Made, then :meth:`open`\\ ed once its daemon is there; ended by :meth:`close`."""

    def __init__(self, p2p: AttachedP2P, clock: Clock, limits: RelayLimits | None = None) -> None:
        self._p2p, self._clock = p2p, clock
        self._slots = RelaySlots(limits or RelayLimits())
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired = self._closed = False
        self.relayed_bytes = self.refused = 0
        bytes_per_s = self._slots.limits.bytes_per_s
        self._pace = None if bytes_per_s is None else RateLimiter(bytes_per_s, clock.monotonic())
        self._paces: dict[PeerId, RateLimiter] = {}

    async def open(self) -> None:
        """Answer the daemon's streams from now on. Raises Unreachable."""
        await self._p2p.serve_streams(HOP, self._accept)

    def allow(self, may: MayRelay) -> None:
        """From now on these peers are members; asked again at every use, so it must be cheap. None are before."""
        self._slots.may = may

    def reserve(self, peer: PeerId) -> None:
        """Let others reach ``peer`` through us for the next 60 s. Raises Busy when too many have asked, Refused once
        we are about to leave."""
        if self._retired:
            raise Refused("this peer is about to leave")
        try:
            self._slots.reserve(peer, self._clock.monotonic())
        except Busy:
            self.refused += 1
            raise

    async def dismiss(self, endpoint: Endpoint, rpc: Rpc[Withdrawn, Withdrawn]) -> None:
        """Take no more reservations, and tell those who have one by ``rpc``; circuits go on, and new ones to them.
        Takes a second at most; never raises a PeerError."""
        self._retired = True

        async def tell(holder: PeerId) -> None:
            with contextlib.suppress(PeerError):
                await endpoint.notify(holder, rpc, Withdrawn(), timeout_s=_TELL_S)

        await asyncio.gather(*map(tell, self.holders))

    @property
    def circuits(self) -> int:
        """The number of connections relayed now."""
        return self._slots.circuits

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """Those whom others reach through us now."""
        return self._slots.holders(self._clock.monotonic())

    @property
    def limits(self) -> RelayLimits:
        """Return what it grants."""
        return self._slots.limits

    async def close(self) -> None:
        """Cut every circuit. Idempotent."""
        self._closed = True
        await ended(self._tasks)

    async def _accept(self, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slot = None if self._closed else self._slots.sit(caller)
        if slot is None:
            self.refused += 1
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(slot, (reader, writer)), name="relay circuit")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(done, slot, writer))

    def _forget(self, task: asyncio.Task[None], slot: RelaySlot, writer: asyncio.StreamWriter) -> None:
        """Here rather than in the task, whose body never runs when it is cancelled before its first step."""
        self._tasks.discard(task)
        self._slots.leave(slot)
        writer.close()

    async def _serve(self, slot: RelaySlot, here: Streams) -> None:
        opened: list[Streams] = []
        try:
            async with asyncio.timeout(_SHAKE_S):
                target = await self._shake_hands(slot, here, opened)
            if target is not None:
                slot.shaking = False
                await self._splice(slot.caller, target).run(here, opened[0])
        except (*LINK_ERRORS, PeerError) as error:
            logger.debug("a circuit of %s ended: %s", slot.caller, error)
        finally:
            for _, writer in opened:
                writer.close()

    def _splice(self, caller: PeerId, target: PeerId) -> Splice:
        limits = self._slots.limits
        bounds = SpliceLimits(
            bounded=lambda: self._slots.bounded(caller, target),
            bytes_per_s=limits.stranger_bytes_per_s,
            idle_s=limits.stranger_idle_s,
            shared=self._shared(caller, target),
        )
        return Splice(bounds, self._clock, self._count)

    def _shared(self, *ends: PeerId) -> list[RateLimiter]:
        """The buckets of a circuit: that of all, and those of its two ends, which go when their last circuit does."""
        shared = [] if self._pace is None else [self._pace]
        if (bytes_per_s := self._slots.limits.bytes_per_s_of_peer) is None:
            return shared
        busy = self._slots.ends
        self._paces = {peer: pace for peer, pace in self._paces.items() if peer in busy}
        now = self._clock.monotonic()
        return shared + [self._paces.setdefault(peer, RateLimiter(bytes_per_s, now)) for peer in ends]

    def _count(self, size: int) -> None:
        self.relayed_bytes += size

    async def _shake_hands(self, slot: RelaySlot, here: Streams, opened: list[Streams]) -> PeerId | None:
        """Return the caller's target, once both have agreed; None after a refusal. The stream there is in ``opened``
        as soon as there is one, to be closed whatever happens."""
        reader, writer = here
        try:
            target, status = self._judge(slot, decode_hop(await read_body(reader)))
        except (Violation, ValueError):
            target, status = None, Status.MALFORMED_MESSAGE
        if target is not None:
            try:
                await self._call(slot.caller, target, opened)
            except (*LINK_ERRORS, PeerError) as error:
                logger.debug("%s cannot be reached for %s: %s", target, slot.caller, error)
                target, status = None, Status.CONNECTION_FAILED
        writer.write(encode_hop(CircuitMessage(HopType.STATUS, status=status)))
        await writer.drain()
        return target

    def _judge(self, slot: RelaySlot, asked: CircuitMessage) -> tuple[PeerId | None, Status]:
        """Return the peer to call for this message, or the reason of a refusal. Raises ValueError for what is no peer's
        id."""
        if asked.kind == HopType.RESERVE:
            return None, Status.RESERVATION_REFUSED
        if asked.kind != HopType.CONNECT or asked.peer is None:
            return None, Status.UNEXPECTED_MESSAGE
        target = peer_of_bytes(asked.peer)
        if target == slot.caller:
            return None, Status.PERMISSION_DENIED
        if not self._slots.holds(target, self._clock.monotonic()):
            return None, Status.NO_RESERVATION
        if not self._slots.aim(slot, target):
            self.refused += 1
            return None, Status.RESOURCE_LIMIT_EXCEEDED
        return target, Status.OK

    async def _call(self, caller: PeerId, target: PeerId, opened: list[Streams]) -> None:
        """A stream to the target over the connection that it keeps with us, with its consent."""
        reader, writer = await self._p2p.open_stream(target, STOP)
        opened.append((reader, writer))
        writer.write(encode_stop(CircuitMessage(StopType.CONNECT, peer_bytes(caller))))
        answer = decode_stop(await read_body(reader))
        if answer.kind != StopType.STATUS or answer.status != Status.OK:
            raise Violation(f"it answered with status {answer.status}", peer=target)
