"""The network in memory: endpoints and directories as real ones are, in one loop, without threads or sockets.

Bodies are encoded and decoded, requests admitted, handlers run, errors translated and records checked by the very
code the real endpoint uses; bytes are counted as its frames would be. Time is the given clock's, so a virtual one
makes a virtual network. A handler runs in the context of the peer that mounted it, so a loop that tells peers apart
by context (:mod:`swarm.sim.loop`) can stop one. Given up: a violation does not close the pair's other calls, and
chunks are not simulated one by one (links see whole messages).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.clock import Clock
from swarm.errors import BugError, DeadlineMissed, PeerError, Unreachable, Violation
from swarm.ids import PeerId, RunId
from swarm.network.discovery.records import (
    LONGEST_S,
    PeerRecord,
    decode_record,
    encode_record,
    expiry_of,
    key_name,
    lifetime_problem,
)
from swarm.network.protocols import (
    MAX_BODY_BYTES,
    PUBLIC_PREFIX,
    RELAY_PREFIX,
    Incoming,
    LinkStatistics,
    May,
    Payload,
    RecordT,
    ReplyT,
    RequestT,
    Rpc,
    Service,
)
from swarm.network.rpc.bodies import decode, pack_error, pack_request, unpack, unpack_error, unpack_request
from swarm.network.rpc.dispatcher import Admitted, Dispatcher, ServeLimits, handle
from swarm.network.rpc.framing import wire_bytes
from swarm.network.rpc.introduction import Introduction
from swarm.network.rpc.link import ByteMeter
from swarm.schema import Record
from swarm.sim.links import Traffic
from swarm.sim.wires import Delay, Wires


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored record. ``signer`` stands for the signature: who really made it."""

    signer: PeerId
    expiry: float
    body: bytes


class SimNetwork(Wires):
    """All peers of one simulated world, the links between them and the directory they share."""

    def __init__(
        self,
        clock: Clock,
        *,
        delay: Delay | None = None,
        traffic: Traffic | None = None,
        limits: ServeLimits | None = None,
        kinds: Sequence[type[Record]] = (PeerRecord,),
    ) -> None:
        super().__init__(clock, traffic, *([delay] if delay else []))
        self.kinds = {kind.kind: kind for kind in kinds}
        limits = limits or ServeLimits()
        self._limits = dataclasses.replace(limits, body_bytes_on_loop=MAX_BODY_BYTES)  # no thread in virtual time
        self._peers: dict[PeerId, SimEndpoint] = {}
        self._twins: set[SimEndpoint] = set()
        self._records: dict[str, dict[PeerId, _Entry]] = {}

    def endpoint(self, name: str, *, twin: bool = False) -> SimEndpoint:
        """A new peer. A name may be used again after its peer has closed (the same identity restarted); as a ``twin``
        also before: calls to the peer then reach the newer of the two, and both may call."""
        peer = PeerId(name)
        older = self._peers.get(peer)
        if older is not None and not twin:
            raise BugError(f"{name} is on this network already")
        if older is not None:
            self._twins.add(older)
        endpoint = self._peers[peer] = SimEndpoint(peer, self, Dispatcher(self._limits))
        return endpoint

    def kill(self, peer: PeerId) -> None:
        """The peer is gone without a word: its calls and the calls to it fail at once with Unreachable. Of twins the
        newer one dies."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.die()

    def leave(self, endpoint: SimEndpoint) -> None:
        """This very endpoint is gone, and only it: of twins the older is called again."""
        if self._peers.get(endpoint.peer) is endpoint:
            self.kill(endpoint.peer)
            for older in [twin for twin in self._twins if twin.peer == endpoint.peer]:
                self._twins.discard(older)
                self._peers[older.peer] = older
        elif endpoint in self._twins:
            self._twins.discard(endpoint)
            endpoint.die()

    def is_open(self, endpoint: SimEndpoint) -> bool:
        """Return whether it may still call."""
        return self._peers.get(endpoint.peer) is endpoint or endpoint in self._twins

    def find(self, peer: PeerId) -> SimEndpoint | None:
        """The living peer of that name, the newer of twins."""
        return self._peers.get(peer)

    def store(self, key: str, owner: PeerId, signer: PeerId, expiry: float, body: bytes) -> bool:
        """Return what a directory node does with a record: kept only when it is right and not older than what it has,
        unless that one lives longer than is believed since the clock was set back.

        Tests call this as a hostile peer would, with a ``signer`` that is not the owner or an ``expiry`` for ever."""
        now = self.clock.wall()
        old = self._records.get(key, {}).get(owner)
        newer = old is not None and expiry <= old.expiry <= now + LONGEST_S
        if signer != owner or lifetime_problem(expiry, now) or newer:
            return False
        with contextlib.suppress(Violation):
            decode_record(self.kinds[key.split("/")[1]], body)
            self._records.setdefault(key, {})[owner] = _Entry(signer, expiry, body)
            return True
        return False

    def records(self, key: str) -> dict[PeerId, _Entry]:
        """Return what the directory holds under a key, the expired dropped."""
        now = self.clock.wall()
        alive = {owner: entry for owner, entry in self._records.get(key, {}).items() if entry.expiry > now}
        self._records[key] = alive
        return alive


@dataclass(eq=False)
class SimEndpoint:
    """Implements :class:`~swarm.network.protocols.Endpoint`. Made by :meth:`SimNetwork.endpoint`.

    ``stopped`` is set while no code of this peer runs: the one who cancels one of its handlers does not wait for it.
    ``skew_s`` is how far this peer's wall clock is ahead of everybody's: it shows in the records it announces.
    """

    peer: PeerId
    network: SimNetwork
    dispatcher: Dispatcher
    run: RunId | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    meter: ByteMeter = field(default_factory=ByteMeter)
    skew_s: float = 0.0
    _asked: dict[asyncio.Task[tuple[bytes, Payload]], None] = field(default_factory=dict)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _directory: SimDirectory | None = None
    _introduction: Introduction = field(init=False)

    def __post_init__(self) -> None:
        self._introduction = Introduction(self._call)

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
        self._directory = SimDirectory(self, run)

    def mount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._context = contextvars.copy_context()
        self.dispatcher.mount(service)

    def unmount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self.dispatcher.unmount(service)

    def allow_calls(self, may: May) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self.dispatcher.may = may

    def introduce(self, rpc: Rpc[RequestT, Any], body: RequestT) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._introduction.prepare(rpc, body)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. In memory everyone can be dialled."""

    async def call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        *,
        timeout_s: float,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> tuple[ReplyT, memoryview]:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        return await self._introduction.call(target, rpc, body, timeout_s, payload, max_reply_bytes)

    async def _call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        timeout_s: float,
        payload: Payload,
        max_reply_bytes: int,
    ) -> tuple[ReplyT, memoryview]:
        server = self._server(target, rpc)
        deadline = self.network.clock.monotonic() + timeout_s
        request = b"".join(pack_request(rpc.name, timeout_s, max_reply_bytes, body))
        exchange = self._exchange(server, request, payload, deadline)
        content, received = await self._until(exchange, server, timeout_s, rpc.name)
        if len(received) > max_reply_bytes:
            raise Violation(f"an answer with {len(received)} bytes, asked for {max_reply_bytes}", peer=target)
        try:
            return decode(rpc.reply, unpack(content)), memoryview(received)
        except Violation as violation:
            raise Violation(f"malformed answer: {violation.reason}", peer=target) from violation

    async def notify(self, target: PeerId, rpc: Rpc[RequestT, Any], body: RequestT, *, timeout_s: float) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. Here the handler has ended when it returns."""
        server = self._server(target, rpc)
        deadline = self.network.clock.monotonic() + timeout_s
        exchange = self._exchange(server, b"".join(pack_request(rpc.name, timeout_s, 0, body)), b"", deadline)
        with contextlib.suppress(PeerError):
            await self._until(exchange, server, timeout_s, rpc.name)

    def _server(self, target: PeerId, rpc: Rpc[Any, Any]) -> SimEndpoint:
        server = self.network.find(target)
        if not self.network.is_open(self):
            raise Unreachable("this endpoint is closed", peer=target)
        if not rpc.public and self.run is None:
            raise BugError(f"{rpc.name} was called before the endpoint entered a run")
        if server is None or (not rpc.public and server.run != self.run):
            raise Unreachable("no such peer in this run", peer=target)
        return server

    def statistics(self) -> LinkStatistics:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        return self.meter.statistics()

    async def close(self) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self.network.leave(self)

    def die(self) -> None:
        """Wake every call that waits for us, and end those that run for us elsewhere."""
        self.gone.set()
        for serving in tuple(self._asked):
            serving.cancel()

    async def _until(
        self, exchange: Coroutine[Any, Any, tuple[bytes, bytearray]], server: SimEndpoint, timeout_s: float, method: str
    ) -> tuple[bytes, bytearray]:
        """The exchange's outcome, or the first thing that ends it: deadline, death of either side, our caller."""
        create = asyncio.get_running_loop().create_task
        running = create(exchange)
        timer = create(self.network.clock.sleep(timeout_s))
        deaths = [create(side.gone.wait()) for side in dict.fromkeys((self, server))]
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
        """Request there, answer or error back. From its admission on the request is the server's: it is on its way
        whatever becomes of us, ends with us when we die, and a stopped server does not hold up who gives it up."""
        size = memoryview(payload).nbytes
        try:
            admitted = server._context.copy().run(server._admit, self.peer, request, size)
        except PeerError as error:
            await self._travel(self, server, wire_bytes(len(request)), "")  # a refused payload stays where it is
            raise await self._fail(server, error) from error
        create = asyncio.get_running_loop().create_task
        copy = self.network.received(self.peer, server.peer, payload)
        wire = wire_bytes(len(request), size) + self.network.added_weight(admitted.method.rpc.name, self.peer, size)
        work = server._serve(self, admitted, (wire, copy, deadline))
        serving = create(work, context=server._context.copy())
        self._asked[serving] = None
        release = functools.partial(server.dispatcher.release, self.peer, admitted)
        serving.add_done_callback(lambda _: release(), context=server._context)  # also when it never began
        serving.add_done_callback(self._answered)
        try:
            await asyncio.wait([serving])
            body, answer = serving.result()
            return body, self.network.received(server.peer, self.peer, answer)
        finally:
            if serving.cancel():
                stopped = create(server.stopped.wait())
                try:
                    await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()

    def _answered(self, serving: asyncio.Task[tuple[bytes, Payload]]) -> None:
        self._asked.pop(serving, None)
        if not serving.cancelled():
            serving.exception()  # its caller has it, or is gone

    async def _serve(
        self, caller: SimEndpoint, admitted: Admitted, sent: tuple[int, bytearray, float]
    ) -> tuple[bytes, Payload]:
        """Run a handler as this peer, no matter who called."""
        wire, payload, deadline = sent
        try:
            await self._travel(caller, self, wire, admitted.method.rpc.name)
            body, answer = await handle(admitted, caller.peer, Incoming(memoryview(payload), deadline))
            size = memoryview(answer.payload).nbytes
            more = self.network.added_weight(admitted.method.rpc.name, self.peer, size)
            await self._travel(self, caller, wire_bytes(len(body), size) + more, admitted.method.rpc.name)
            return body, answer.payload
        except PeerError as error:
            raise await caller._fail(self, error) from error

    def _admit(self, caller: PeerId, request: bytes, payload_bytes: int) -> Admitted:
        """Return what a server does with a request's first frame, as itself, no matter who called."""
        envelope = unpack_request(request)
        public = envelope.method.startswith((PUBLIC_PREFIX, RELAY_PREFIX))
        return self.dispatcher.admit(caller, envelope, payload_bytes, public=public)

    async def _fail(self, server: SimEndpoint, error: PeerError) -> PeerError:
        content = pack_error(error)
        await self._travel(server, self, wire_bytes(len(content)), "")
        return unpack_error(content, server.peer)

    async def _travel(self, source: SimEndpoint, target: SimEndpoint, size: int, method: str) -> None:
        source.meter.sends_bytes(target.peer, size, method)
        await self.network.carry(source.peer, target.peer, size)
        target.meter.received[source.peer] += size


class SimDirectory:
    """Implements :class:`~swarm.network.protocols.Directory` for one peer in one run."""

    def __init__(self, endpoint: SimEndpoint, run: RunId) -> None:
        self._network, self._owner, self._run = endpoint.network, endpoint.peer, run
        self._endpoint = endpoint
        self._expiry: dict[str, float] = {}

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`."""
        key = self._key(type(record))
        expiry = expiry_of(self._network.clock.wall() + self._endpoint.skew_s, ttl_s, self._expiry.get(key, 0.0))
        if not self._network.store(key, self._owner, self._owner, expiry, encode_record(record)):
            raise Unreachable("no node of the directory stored our record")
        self._expiry[key] = expiry

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`."""
        entries = self._network.records(self._key(kind))
        return {owner: decode_record(kind, entry.body) for owner, entry in entries.items()}

    def _key(self, kind: type[Record]) -> str:
        if not self._network.is_open(self._endpoint):
            raise Unreachable("this endpoint is closed")
        if self._network.kinds.get(kind.kind) is not kind:
            raise BugError(f"{kind.__name__} is not a record of this run's directory")
        return key_name(self._run, kind)
