"""The network in memory: endpoints and directories with the real ones' semantics, in one loop, without threads or
sockets.

Bodies are encoded and decoded, requests admitted, handlers run, errors translated and records checked by the very
code the real endpoint uses; bytes are counted as its frames would be. Time is the given clock's, so a virtual one
makes a virtual network. Given up: a violation does not close the pair's other calls, and chunks are not simulated one
by one (``delay`` sees whole messages).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.clock import Clock
from swarm.errors import BugError, DeadlineMissed, PeerError, Unreachable, Violation
from swarm.ids import PeerId, RunId
from swarm.network.bodies import decode, pack_error, pack_request, unpack, unpack_error, unpack_request
from swarm.network.framing import wire_bytes
from swarm.network.link import Meter
from swarm.network.protocols import PUBLIC_PREFIX, LinkStatistics, Payload, RecordT, ReplyT, Request, Service
from swarm.network.records import (
    MAX_TTL_S,
    PeerRecord,
    decode_record,
    encode_record,
    key_name,
    lifetime_problem,
)
from swarm.network.serving import Admitted, Desk, ServeLimits, handle
from swarm.schema import Message, Record

Delay = Callable[[PeerId, PeerId, int], float]
"""(from, to, bytes) -> seconds that a message takes."""


def _no_delay(source: PeerId, target: PeerId, size: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored record. ``signer`` stands for the signature: who really made it."""

    signer: PeerId
    expiry: float
    body: bytes


class SimNetwork:
    """All peers of one simulated world, the links between them and the directory they share."""

    def __init__(
        self,
        clock: Clock,
        *,
        delay: Delay = _no_delay,
        limits: ServeLimits | None = None,
        kinds: Sequence[type[Record]] = (PeerRecord,),
    ) -> None:
        self.clock = clock
        self.kinds = {kind.kind: kind for kind in kinds}
        self.delay = delay
        self._limits = limits or ServeLimits()
        self._peers: dict[PeerId, SimEndpoint] = {}
        self._cut: set[tuple[PeerId, PeerId]] = set()
        self._records: dict[str, dict[PeerId, _Entry]] = {}

    def endpoint(self, name: str) -> SimEndpoint:
        """A new peer. A name may be used again after its peer has closed (the same identity restarted)."""
        peer = PeerId(name)
        if peer in self._peers:
            raise BugError(f"{name} is on this network already")
        endpoint = self._peers[peer] = SimEndpoint(peer, self, Desk(self._limits))
        return endpoint

    def kill(self, peer: PeerId) -> None:
        """The peer is gone without a word: its calls and the calls to it fail at once with Unreachable."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.die()

    def cut(self, source: PeerId, target: PeerId) -> None:
        """From now on nothing from ``source`` reaches ``target``: calls over that way, also those that wait for their
        answer, run into their deadline, as when packets are dropped. One direction; call twice for both."""
        self._cut.add((source, target))

    def mend(self, source: PeerId, target: PeerId) -> None:
        """Undo :meth:`cut`."""
        self._cut.discard((source, target))

    async def carry(self, source: PeerId, target: PeerId, size: int) -> None:
        """Let a message travel. Never returns over a cut link: the deadline ends it."""
        seconds = self.delay(source, target, size)
        if seconds > 0:
            await self.clock.sleep(seconds)
        if (source, target) in self._cut:
            await asyncio.get_running_loop().create_future()

    def find(self, peer: PeerId) -> SimEndpoint | None:
        """The living peer of that name."""
        return self._peers.get(peer)

    def store(self, key: str, owner: PeerId, signer: PeerId, expiry: float, body: bytes) -> bool:
        """What a directory node does with a record: kept only when it is right and not older than what it has.

        Tests call this as a hostile peer would, with a ``signer`` that is not the owner or an ``expiry`` for ever."""
        old = self._records.get(key, {}).get(owner)
        if signer != owner or lifetime_problem(expiry, self.clock.wall()) or (old is not None and old.expiry >= expiry):
            return False
        with contextlib.suppress(Violation):
            decode_record(self.kinds[key.split("/")[1]], body)
            self._records.setdefault(key, {})[owner] = _Entry(signer, expiry, body)
            return True
        return False

    def records(self, key: str) -> dict[PeerId, _Entry]:
        """What the directory holds under a key, the expired dropped."""
        now = self.clock.wall()
        alive = {owner: entry for owner, entry in self._records.get(key, {}).items() if entry.expiry > now}
        self._records[key] = alive
        return alive


class SimDirectory:
    """Implements :class:`~swarm.network.protocols.Directory` for one peer in one run."""

    def __init__(self, network: SimNetwork, owner: PeerId, run: RunId) -> None:
        self._network, self._owner, self._run = network, owner, run
        self._expiry: dict[str, float] = {}

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`."""
        key = self._key(type(record))
        if not 0 < ttl_s <= MAX_TTL_S:
            raise BugError(f"a record's ttl_s is within (0, {MAX_TTL_S:g}], not {ttl_s!r}")
        expiry = max(self._network.clock.wall() + ttl_s, self._expiry.get(key, 0.0) + 1e-3)
        if not self._network.store(key, self._owner, self._owner, expiry, encode_record(record)):
            raise Unreachable("no node of the directory stored our record")
        self._expiry[key] = expiry

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`."""
        entries = self._network.records(self._key(kind))
        return {owner: decode_record(kind, entry.body) for owner, entry in entries.items()}

    def _key(self, kind: type[Record]) -> str:
        if self._network.find(self._owner) is None:
            raise Unreachable("this endpoint is closed")
        if self._network.kinds.get(kind.kind) is not kind:
            raise BugError(f"{kind.__name__} is not a record of this run's directory")
        return key_name(self._run, kind)


@dataclass(eq=False)
class SimEndpoint:
    """Implements :class:`~swarm.network.protocols.Endpoint`. Made by :meth:`SimNetwork.endpoint`."""

    peer: PeerId
    network: SimNetwork
    desk: Desk
    run: RunId | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    meter: Meter = field(default_factory=Meter)
    _directory: SimDirectory | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """See :class:`~swarm.network.protocols.Endpoint`. Nothing dials them."""
        return (f"/memory/{self.peer}/p2p/{self.peer}",)

    @property
    def directory(self) -> SimDirectory:
        """The run's directory. Raises BugError before :meth:`enter`."""
        if self._directory is None:
            raise BugError("the endpoint has not entered a run")
        return self._directory

    async def enter(self, run: RunId) -> None:
        """Serve and call within a run. Once per endpoint."""
        if self.run is not None:
            raise BugError("an endpoint enters one run")
        self.run = run
        self._directory = SimDirectory(self.network, self.peer, run)

    def mount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self.desk.mount(service)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. In memory everyone can be dialled."""

    async def call(  # noqa: PLR0913 - the protocol's signature
        self,
        target: PeerId,
        method: str,
        body: Message,
        reply: type[ReplyT],
        *,
        timeout_s: float,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> tuple[ReplyT, memoryview]:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        server = self._server(target, method)
        deadline = self.network.clock.monotonic() + timeout_s
        request = pack_request(method, timeout_s, max_reply_bytes, body)
        exchange = self._exchange(server, request, payload, deadline)
        content, received = await self._until(exchange, server, timeout_s, method)
        if len(received) > max_reply_bytes:
            raise Violation(f"an answer with {len(received)} bytes, asked for {max_reply_bytes}", peer=target)
        try:
            return decode(reply, unpack(content)), memoryview(received)
        except Violation as violation:
            raise Violation(f"malformed answer: {violation.reason}", peer=target) from violation

    async def notify(self, target: PeerId, method: str, body: Message, *, timeout_s: float) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. Here the handler has ended when it returns."""
        server = self._server(target, method)
        deadline = self.network.clock.monotonic() + timeout_s
        exchange = self._exchange(server, pack_request(method, timeout_s, 0, body), b"", deadline)
        with contextlib.suppress(PeerError):
            await self._until(exchange, server, timeout_s, method)

    def _server(self, target: PeerId, method: str) -> SimEndpoint:
        server = self.network.find(target)
        if self.network.find(self.peer) is not self:
            raise Unreachable("this endpoint is closed", peer=target)
        public = method.startswith(PUBLIC_PREFIX)
        if not public and self.run is None:
            raise BugError(f"{method} was called before the endpoint entered a run")
        if server is None or (not public and server.run != self.run):
            raise Unreachable("no such peer in this run", peer=target)
        return server

    def statistics(self) -> LinkStatistics:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        return self.meter.statistics()

    async def close(self) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        if self.network.find(self.peer) is self:
            self.network.kill(self.peer)

    def die(self) -> None:
        """Wake every call that runs here or waits for us."""
        self.gone.set()

    async def _until(
        self, exchange: Coroutine[Any, Any, tuple[bytes, bytearray]], server: SimEndpoint, timeout_s: float, method: str
    ) -> tuple[bytes, bytearray]:
        """The exchange's outcome, or the first thing that ends it: deadline, death of either side, our caller."""
        create = asyncio.get_running_loop().create_task
        running = create(exchange)
        timer = create(self.network.clock.sleep(timeout_s))
        deaths = [create(side.gone.wait()) for side in {self, server}]
        others = [timer, *deaths]
        try:
            await asyncio.wait([running, *others], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if any(death.done() for death in deaths):
                raise Unreachable("the stream broke", peer=server.peer)
            raise DeadlineMissed(f"no answer to {method} in {timeout_s:g} s", peer=server.peer)
        finally:
            for task in (running, *others):
                task.cancel()
            await asyncio.gather(running, *others, return_exceptions=True)

    async def _exchange(
        self, server: SimEndpoint, request: bytes, payload: Payload, deadline: float
    ) -> tuple[bytes, bytearray]:
        """Request there, answer or error back."""
        size = memoryview(payload).nbytes
        try:
            admitted = server._admit(self.peer, request, size)
        except PeerError as error:
            await self._travel(self, server, wire_bytes(len(request)))  # a refused payload stays where it is
            raise await self._fail(server, error) from error
        try:
            await self._travel(self, server, wire_bytes(len(request), size))
            copy = memoryview(bytearray(payload))
            body, answer = await handle(admitted, Request(self.peer, admitted.body, copy, deadline))
            await self._travel(server, self, wire_bytes(len(body), memoryview(answer.payload).nbytes))
            return body, bytearray(answer.payload)
        except PeerError as error:
            raise await self._fail(server, error) from error
        finally:
            server.desk.release(self.peer, admitted)

    def _admit(self, caller: PeerId, request: bytes, payload_bytes: int) -> Admitted:
        """What a server does with a request's first frame."""
        envelope = unpack_request(request)
        public = envelope.method.startswith(PUBLIC_PREFIX)
        return self.desk.admit(caller, envelope, payload_bytes, public=public)

    async def _fail(self, server: SimEndpoint, error: PeerError) -> PeerError:
        content = pack_error(error)
        await self._travel(server, self, wire_bytes(len(content)))
        return unpack_error(content, server.peer)

    async def _travel(self, source: SimEndpoint, target: SimEndpoint, size: int) -> None:
        source.meter.sent[target.peer] += size
        await self.network.carry(source.peer, target.peer, size)
        target.meter.received[source.peer] += size
