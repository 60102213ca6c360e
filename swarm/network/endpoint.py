"""One peer's presence on the real network: its daemon, its streams, its directory.

Per ordered pair of peers there are two long-lived streams, so that no tensor delays a decision: *control* for calls
without payload, *tensors* for the others. Their protocol names carry the run, so peers of two runs cannot meet; only
public methods (the manifest) are served under a name without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import BugError, DeadlineMissed, Unreachable
from swarm.ids import PeerId, RunId
from swarm.network.addresses import LOOPBACK, split_peer
from swarm.network.attach import LINK_ERRORS, AttachedP2P
from swarm.network.daemon import Daemon, DaemonConfig
from swarm.network.dialling import Dialler
from swarm.network.directory import DHTDirectory, DirectoryConfig
from swarm.network.guard import install
from swarm.network.hints import Hints
from swarm.network.identity import StoredIdentity
from swarm.network.link import Meter, enlarge
from swarm.network.presence import Presence
from swarm.network.protocols import PUBLIC_PREFIX, LinkStatistics, Payload, ReplyT, Service
from swarm.network.reachability import LinkKind
from swarm.network.records import PeerRecord
from swarm.network.relay_seats import MayRelay
from swarm.network.rpc import CallerStream
from swarm.network.rundir import RunDirectory
from swarm.network.serving import Desk, ServeLimits, ServerStream
from swarm.schema import Message, Record

logger = logging.getLogger(__name__)

PUBLIC_PROTOCOL = f"swarm/{PUBLIC_PREFIX.rstrip('/')}"
_STREAMS_PER_PEER = 4
_CLOSE_S = 0.5
_MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Where a peer listens, whom it knows, and what it allows.

    ``listen`` and ``announce`` addresses have no ``/p2p`` part, ``bootstrap`` addresses end in one. ``kinds`` are the
    record types of the directory. With ``relay`` "auto" it relays for others, and others relay for it when nobody can
    dial it; "off" does neither. ``behind_nat`` says that nobody can, so that it need not be found out. ``port_map``
    lets the daemon ask the router to forward a port.
    """

    run_dir: Path
    listen: Sequence[Multiaddr] = (Multiaddr(LOOPBACK),)
    announce: Sequence[Multiaddr] = ()
    bootstrap: Sequence[Multiaddr] = ()
    relay: Literal["auto", "off"] = "auto"
    behind_nat: bool = False
    port_map: bool = False
    startup_timeout_s: float = 15.0
    dial_timeout_s: float = 10.0
    limits: ServeLimits = field(default_factory=ServeLimits)
    kinds: Sequence[type[Record]] = (PeerRecord,)


class LibP2PEndpoint:
    """Implements :class:`~swarm.network.protocols.Endpoint`. Made by :meth:`open`, closed by :meth:`close`."""

    def __init__(self, config: EndpointConfig, identity: StoredIdentity, clock: Clock) -> None:
        self._config, self._identity, self._clock = config, identity, clock
        self._meter = Meter()
        self._desk = Desk(config.limits)
        self._hints = Hints(identity.peer)
        self._candidates: tuple[PeerId, ...] = ()
        self._callers: dict[tuple[PeerId, str], CallerStream] = {}
        self._dials: dict[tuple[PeerId, str], asyncio.Task[CallerStream]] = {}
        self._serving: dict[asyncio.Task[None], tuple[PeerId, str]] = {}
        self._run: RunId | None = None
        self._directory: DHTDirectory | None = None
        self._closing: asyncio.Task[None] | None = None
        self._daemon: Daemon
        self._p2p: AttachedP2P
        self._presence: Presence
        self._dialler: Dialler
        self._watch: asyncio.Task[None]
        self._directory_files: RunDirectory

    @classmethod
    async def open(cls, config: EndpointConfig, identity: StoredIdentity, clock: Clock) -> LibP2PEndpoint:
        """Start a daemon and attach to it; public methods can be called and served from then on.

        Raises ConfigError (a directory in use, an address that cannot be listened on), Unreachable when the daemon
        does not come up. Whatever happens, nothing is left behind.
        """
        install()
        self = cls(config, identity, clock)
        self.learn_addresses(config.bootstrap)
        self._directory_files = files = RunDirectory(config.run_dir)
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(files.close)
            self._daemon = await Daemon.start(
                DaemonConfig(
                    key_file=identity.path.absolute(),
                    control=files.control,
                    listen=config.listen,
                    announce=config.announce,
                    bootstrap=config.bootstrap,
                    port_map=config.port_map,
                    startup_timeout_s=config.startup_timeout_s,
                )
            )
            undo.push_async_callback(self._daemon.stop)
            try:
                async with asyncio.timeout(config.startup_timeout_s):
                    self._p2p = await AttachedP2P.attach(files.control, files.client)
                    undo.push_async_callback(self._p2p.detach)
                    own, relaying = await self._p2p.addresses(), config.relay == "auto"
                    self._dialler = Dialler(self._p2p, self._hints, self._look_up)
                    self._presence = Presence(self._p2p, own, clock, relaying=relaying)
                    await self._serve(PUBLIC_PROTOCOL)
            except TimeoutError as error:
                raise Unreachable(f"the libp2p daemon did not answer in {config.startup_timeout_s:g} s") from error
            undo.pop_all()
        self._watch = asyncio.get_running_loop().create_task(self._watch_daemon(), name="p2pd watch")
        return self

    @property
    def peer(self) -> PeerId:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        return self._identity.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """See :class:`~swarm.network.protocols.Endpoint`. At most 8, the most useful first; they change when a relay
        is taken or lost."""
        return self._presence.addresses

    @property
    def behind_nat(self) -> bool:
        """Whether it is known, from the configuration, that nobody can dial this peer."""
        return self._config.behind_nat

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Through whom others reach this peer now; empty when they dial it."""
        return self._presence.relays

    @property
    def directory(self) -> DHTDirectory:
        """The run's directory. Raises BugError before :meth:`enter`."""
        if self._directory is None:
            raise BugError("the endpoint has not entered a run")
        return self._directory

    @property
    def daemon_pid(self) -> int:
        """The daemon's process id."""
        return self._daemon.pid

    async def enter(self, run: RunId) -> None:
        """Serve and call under this run's protocols, and join its directory. Once per endpoint.

        Raises Unreachable when bootstrap peers are configured and none can be dialled.
        """
        if self._run is not None:
            raise BugError("an endpoint enters one run")
        self._run = run
        self._p2p.namespace = f"swarm/directory/1/{run[:32]}/"
        await self._dial_bootstrap()
        self.mount(await self._presence.serve())
        for name in ("control", "tensors"):
            await self._serve(f"swarm/{name}/1/{run[:32]}")
        config = DirectoryConfig(run=run, kinds=self._config.kinds, bootstrap=self._config.bootstrap)
        self._directory = await DHTDirectory.open(self._p2p, config, self._identity.private, self._clock)

    def mount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._desk.mount(service)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. Addresses that cannot be read or name another peer are
        ignored: they come from other peers."""
        self._hints.learn(peer, addresses)

    def learn_addresses(self, addresses: Sequence[Multiaddr]) -> None:
        """As :meth:`learn`, from addresses that name their peer."""
        for peer in {split_peer(address)[1] for address in addresses}:
            self.learn(peer, [str(address) for address in addresses])

    def also_at(self, addresses: Sequence[str]) -> None:
        """Announce these as well, where there is room: addresses of ours that others found and the daemon does not
        know of. The first two ever told count."""
        self._presence.also_at(addresses)

    async def take_relay(self, candidates: Sequence[PeerId]) -> str:
        """Be reached through two of these, or of the peers met later, until the endpoint closes.

        Returns what went wrong, "" when at least one relays for us; in either case they are asked again every 10 s.
        May be called again, to name others: the last 64 named are remembered, and nobody is asked while two relay.
        Takes 4 s at most; cancelled, it goes on in the background.
        """
        self._candidates = tuple(dict.fromkeys((*candidates, *self._candidates)))[:_MAX_CANDIDATES]
        return await self._presence.take_relay(self, lambda: (*self._candidates, *self._hints.dialable()))

    def allow_relay(self, may: MayRelay) -> None:
        """Relay without limits for the peers of which ``may(peer)`` is true, the run's members. It is asked again at
        every use, so it must be cheap and not raise. All others, and everybody before this is called, share small
        bounds (:class:`~swarm.network.relay_seats.RelayLimits`), so that who joins can be reached, too."""
        self._presence.allow_relay(may)

    async def retire_relay(self) -> None:
        """Relay for nobody anew from now on, and tell those who are reached through us, who find others within
        seconds. Connections passed on now stay until :meth:`close`. For a peer that is about to leave; takes 1 s at
        most, never raises a PeerError, idempotent."""
        await self._presence.retire_relay(self)

    async def links(self) -> Mapping[PeerId, LinkKind]:
        """How every peer that we have a connection with is connected now: one question to the daemon. Streams that
        began on a relayed connection stay there when a direct one comes up. Raises Unreachable."""
        return await self._presence.links()

    async def link_kind(self, peer: PeerId) -> LinkKind:
        """How one peer is connected; "unknown" when it is not. Raises Unreachable."""
        return (await self.links()).get(peer, "unknown")

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
        """See :class:`~swarm.network.protocols.Endpoint`. A peer may call itself: same path, no daemon."""
        large = memoryview(payload).nbytes > 0 or max_reply_bytes > 0
        protocol = self._protocol(method, large)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                stream = await self._stream(target, protocol)
                return await stream.call(
                    method, body, reply, deadline=deadline, payload=payload, max_reply_bytes=max_reply_bytes
                )
        except TimeoutError as error:
            raise DeadlineMissed(f"no answer to {method} in {timeout_s:g} s", peer=target) from error

    async def notify(self, target: PeerId, method: str, body: Message, *, timeout_s: float) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                stream = await self._stream(target, self._protocol(method, False))
                await stream.notify(method, body, deadline=deadline)
        except TimeoutError as error:
            raise DeadlineMissed(f"{method} could not be sent in {timeout_s:g} s", peer=target) from error

    def statistics(self) -> LinkStatistics:
        """See :class:`~swarm.network.protocols.Endpoint`. The directory's own traffic is not counted."""
        return self._meter.statistics()

    async def wait_daemon(self) -> int:
        """Until the daemon has ended, by itself or in :meth:`close`: its exit code."""
        return await self._daemon.wait()

    async def close(self) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. Ends within 2 s; finished even when cancelled."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="endpoint close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._watch.cancel()
        tasks = [self._watch, *self._serving, *self._dials.values()]
        for task in tasks:
            task.cancel()
        for caller in self._callers.values():
            caller.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._presence.close()
        if self._directory is not None:
            self._directory.lose()
            with contextlib.suppress(*LINK_ERRORS):
                async with asyncio.timeout(_CLOSE_S):
                    await self._directory.close()
        await self._p2p.detach()
        await self._daemon.stop()
        self._directory_files.close()

    async def _watch_daemon(self) -> None:
        """A daemon that dies takes its streams with it at once; what hivemind waits for must be failed by hand."""
        await self._daemon.wait()
        if self._directory is not None:
            self._directory.lose()
        self._p2p.fail_pending()

    def _protocol(self, method: str, large: bool) -> str:
        if method.startswith(PUBLIC_PREFIX):
            return PUBLIC_PROTOCOL
        if self._run is None:
            raise BugError(f"{method} was called before the endpoint entered a run")
        return f"swarm/{'tensors' if large else 'control'}/1/{self._run[:32]}"

    async def _stream(self, target: PeerId, protocol: str) -> CallerStream:
        """The pair's stream, dialled when there is none; concurrent calls share one dial, which outlives a caller that
        gives up."""
        if self._closing is not None:
            raise Unreachable("this endpoint is closed", peer=target)
        key = (target, protocol)
        stream = self._callers.get(key)
        if stream is not None and stream.alive:
            return stream
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = asyncio.get_running_loop().create_task(self._dial(target, protocol), name="dial")
            dial.add_done_callback(lambda done: self._dialled(key, done))
        return await asyncio.shield(dial)

    def _dialled(self, key: tuple[PeerId, str], dial: asyncio.Task[CallerStream]) -> None:
        del self._dials[key]
        if not dial.cancelled() and dial.exception() is None:
            # Streams to peers that are long gone would add up over a long run.
            self._callers = {each: stream for each, stream in self._callers.items() if stream.alive}
            self._callers[key] = dial.result()

    async def _dial(self, target: PeerId, protocol: str) -> CallerStream:
        if target == self.peer:
            return await self._dial_self(protocol)
        try:
            async with asyncio.timeout(self._config.dial_timeout_s):
                reader, writer = await self._dialler.open_stream(target, protocol)
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._config.dial_timeout_s:g} s", peer=target) from error
        enlarge(writer)
        return await CallerStream.over(target, self._meter, reader, writer)

    async def _look_up(self, target: PeerId) -> tuple[str, ...]:
        """The addresses in a peer's record; none when the directory has no record of it, or no records of peers."""
        if self._directory is None or PeerRecord not in self._config.kinds:
            return ()
        with contextlib.suppress(Unreachable):
            record = (await self._directory.lookup(PeerRecord)).get(target)
            return record.addresses if record is not None else ()
        return ()

    async def _dial_self(self, protocol: str) -> CallerStream:
        ours, theirs = socket.socketpair()
        self._accept(self.peer, protocol, *await asyncio.open_connection(sock=theirs))
        return await CallerStream.over(self.peer, self._meter, *await asyncio.open_connection(sock=ours))

    async def _dial_bootstrap(self) -> None:
        peers = {split_peer(address)[1] for address in self._config.bootstrap} - {self.peer}
        if not peers:
            return
        dials = [self._dial_hints(peer) for peer in sorted(peers)]
        failures = [error for error in await asyncio.gather(*dials, return_exceptions=True) if error is not None]
        if len(failures) == len(peers):
            raise Unreachable(f"none of {len(peers)} bootstrap peers can be dialled: {failures[0]}")

    async def _dial_hints(self, peer: PeerId) -> None:
        try:
            async with asyncio.timeout(self._config.dial_timeout_s):
                await self._p2p.connect(peer, self._hints.of(peer))
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._config.dial_timeout_s:g} s", peer=peer) from error

    async def _serve(self, protocol: str) -> None:
        async def accept(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            enlarge(writer)
            self._accept(peer, protocol, reader, writer)

        await self._p2p.serve_streams(protocol, accept)

    def _accept(self, peer: PeerId, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a stream. A peer has few of each kind: the oldest gives way, it is what a dial after a break left."""
        same = [task for task, key in self._serving.items() if key == (peer, protocol)]
        if len(same) >= _STREAMS_PER_PEER:
            same[0].cancel()
        stream = ServerStream(peer, self._desk, self._clock, self._meter, protocol == PUBLIC_PROTOCOL)
        task = asyncio.get_running_loop().create_task(stream.serve(reader, writer), name=f"serve {protocol[:16]}")
        self._serving[task] = (peer, protocol)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        del self._serving[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a stream ended with a bug", exc_info=error)
