"""One peer's presence on the real network: its daemon, its streams, its directory.

Per ordered pair of peers there are two long-lived streams, so that no tensor delays a decision: *control* for calls
without payload, *tensors* for the others. Their protocol names carry the run, so peers of two runs cannot meet; only
public methods (the manifest, what relays of no run are asked) are served under a name without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import BugError, DeadlineMissed, Unreachable
from swarm.events import EventSink, NullSink
from swarm.ids import PeerId, RunId
from swarm.network.addresses import LOOPBACK, by_peer, split_peer
from swarm.network.discovery.directory import DHTDirectory, DirectoryConfig
from swarm.network.discovery.records import PeerRecord
from swarm.network.libp2p.attach import LINK_ERRORS, AttachedP2P
from swarm.network.libp2p.daemon import DaemonConfig
from swarm.network.libp2p.dialling import Dialler, Hints
from swarm.network.libp2p.guard import install
from swarm.network.libp2p.identity import StoredIdentity
from swarm.network.libp2p.rundir import SocketDirectory
from swarm.network.libp2p.streams import Outgoing, StreamServer
from swarm.network.libp2p.supervisor import AttachedDaemon, Mending, RestartLimits, Supervisor
from swarm.network.protocols import PUBLIC_PREFIX, LinkStatistics, May, Payload, ReplyT, RequestT, Rpc, Service
from swarm.network.reach.presence import Presence, Recovery
from swarm.network.reach.probe import ProbeService
from swarm.network.reach.reachability import LinkKind
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import MayRelay, RelayLimits
from swarm.network.reach.standing import KnownRelays, StandingLimits, StandingRelay
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.introduction import Introduction
from swarm.network.rpc.meter import ByteMeter, RateLimits
from swarm.schema import Record
from swarm.security.signing import PrivateIdentity

PUBLIC_PROTOCOL = f"swarm/{PUBLIC_PREFIX.rstrip('/')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Settings of an endpoint: where it listens, the peers it knows, its limits.

    ``listen`` and ``announce`` addresses have no ``/p2p`` part, ``bootstrap`` and ``relays`` end in one: the latter are
    relays that belong to no run. ``kinds`` are the record types of the directory. With ``relay`` "auto" it relays for
    others, within the bounds of ``slots``, and others relay for it when nobody can dial it; "off" does neither.
    ``behind_nat`` says that nobody can, so that it need not be found out. ``port_map`` lets the daemon ask the router
    to forward a port. ``restarts`` says how often a daemon that dies is replaced. ``rates`` bound the bytes of all
    calls together; the daemon's own traffic (the directory, dials, what it relays) is not in them.
    """

    run_dir: Path
    listen: Sequence[Multiaddr] = (Multiaddr(LOOPBACK),)
    announce: Sequence[Multiaddr] = ()
    bootstrap: Sequence[Multiaddr] = ()
    relays: Sequence[Multiaddr] = ()
    relay: Literal["auto", "off"] = "auto"
    slots: RelayLimits = field(default_factory=RelayLimits)
    behind_nat: bool = False
    port_map: bool = False
    startup_timeout_s: float = 60.0
    dial_timeout_s: float = 10.0
    limits: ServeLimits = field(default_factory=ServeLimits)
    kinds: Sequence[type[Record]] = (PeerRecord,)
    restarts: RestartLimits = field(default_factory=RestartLimits)
    rates: RateLimits = RateLimits()


class LibP2PEndpoint:
    """Implements :class:`~swarm.network.protocols.Endpoint`. Made by :meth:`open`, closed by :meth:`close`."""

    def __init__(self, config: EndpointConfig, identity: StoredIdentity, clock: Clock) -> None:
        self._config, self._identity, self._clock = config, identity, clock
        self._dispatcher = Dispatcher(config.limits)
        self._hints = Hints(identity.peer)
        self._incoming = StreamServer(self._dispatcher, clock, ByteMeter(config.rates, identity.peer), PUBLIC_PROTOCOL)
        self._incoming.known = lambda peer: peer == identity.peer
        self._run: RunId | None = None
        self._directory = EnteredDirectory(lambda: self.addresses)
        self._closing: asyncio.Task[None] | None = None
        self._daemon: AttachedDaemon
        self._outgoing: Outgoing
        self._presence: Presence

    @classmethod
    async def open(
        cls, config: EndpointConfig, identity: StoredIdentity, clock: Clock, events: EventSink | None = None
    ) -> LibP2PEndpoint:
        """Start a daemon and attach to it; public methods can be called and served from then on. From then on a daemon
        that dies is replaced, and ``events`` gets a DaemonLost and a DaemonRestarted.

        Raises ConfigError (a directory in use, an address that cannot be listened on), Unreachable when the daemon
        does not come up. Whatever happens, nothing is left behind.
        """
        install()
        self = cls(config, identity, clock)
        self.learn_addresses((*config.bootstrap, *config.relays))
        files = SocketDirectory(config.run_dir)
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(files.close)
            supervisor = await Supervisor.start(self._daemon_config(files.control), clock, config.restarts)
            undo.push_async_callback(supervisor.close)
            files.note_daemon(supervisor.pid)
            try:
                async with asyncio.timeout(config.startup_timeout_s):
                    p2p = await AttachedP2P.attach(files.control, files.client)
                    undo.push_async_callback(p2p.detach)
                    self._daemon = AttachedDaemon(files, supervisor, p2p)
                    await self._come_up()
            except TimeoutError as error:
                raise Unreachable(f"the libp2p daemon did not answer in {config.startup_timeout_s:g} s") from error
            await supervisor.watch(p2p, self._mending(), events or NullSink())
            self._presence.watch_links(self._outgoing.renew, events or NullSink())
            undo.pop_all()
        return self

    def _daemon_config(self, control: Path) -> DaemonConfig:
        config = self._config
        return DaemonConfig(
            key_file=self._identity.path.absolute(),
            control=control,
            listen=config.listen,
            announce=config.announce,
            bootstrap=(*config.bootstrap, *config.relays),
            port_map=config.port_map,
            startup_timeout_s=config.startup_timeout_s,
        )

    async def _come_up(self) -> None:
        """Start everything that needs the daemon, once there is a client of it."""
        config, p2p = self._config, self._daemon.p2p
        p2p.questions = self._incoming.questions
        dialler = Dialler(p2p, self._hints, self._directory.look_up)
        relay = Relay(p2p, self._clock, config.slots) if config.relay == "auto" else None
        known = KnownRelays({peer: tuple(at) for peer, at in by_peer(config.relays).items()})
        self._presence = Presence(p2p, await p2p.addresses(), self._clock, relay, known)
        self._outgoing = Outgoing(self.peer, dialler, self._daemon.supervisor, self._incoming, config.dial_timeout_s)
        self._outgoing.on_lost = self._presence.stream_lost
        self._outgoing.introduction = Introduction(self._call)
        await self._incoming.serve(p2p, PUBLIC_PROTOCOL)

    def _mending(self) -> Mending:
        dialler, announce = self._outgoing.dialler, self._directory.announce_again
        recovery = Recovery(self._presence, self._hints, dialler, self._dealt_with, announce)
        return Mending(lost=self._directory.lose, started=self._daemon.files.note_daemon, restored=recovery.run)

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
        """True if it is known, from the configuration, that nobody can dial this peer."""
        return self._config.behind_nat

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Through whom others reach this peer now; empty when they dial it."""
        return self._presence.relays

    @property
    def standing(self) -> tuple[PeerId, ...]:
        """The relays that it was told of, which belong to no run."""
        return tuple(self._presence.known.at)

    @property
    def relay_problem(self) -> str:
        """Return what the last relay said that would not serve; "" where none did."""
        return self._presence.problem

    def when_relays_change(self, then: Callable[[], None]) -> None:
        """From now on ``then`` is called whenever others relay for this peer than before, or nobody."""
        self._presence.on_relays = then

    async def guests(self, run: RunId) -> Sequence[Multiaddr]:
        """Peers of a run with a slot at the relays that this peer was told of. Takes 2 s for each; no PeerError."""
        return await self._presence.known.guests(self, run)

    async def stand(self, limits: StandingLimits) -> StandingRelay:
        """Relay for peers of any run, or of those that ``limits`` name, without entering one. Raises Unreachable."""
        self.expect(self._config.slots.reservations)
        self.mount(standing := await self._presence.stand(limits))
        return standing

    @property
    def directory(self) -> DHTDirectory:
        """The run's directory. Raises BugError before :meth:`enter`."""
        return self._directory.dht

    @property
    def daemon_pid(self) -> int:
        """The process id of the daemon that runs, or ran last: a new one after each restart."""
        return self._daemon.supervisor.pid

    async def enter(self, run: RunId) -> None:
        """Serve and call under this run's protocols, and join its directory. Once per endpoint.

        Raises Unreachable when bootstrap peers are configured and none can be dialled.
        """
        if self._run is not None:
            raise BugError("an endpoint enters one run")
        self._run = run
        await self._daemon.supervisor.serving()
        self._daemon.p2p.namespace = f"swarm/directory/1/{run[:32]}/"
        await self._outgoing.connect_any({split_peer(address)[1] for address in self._config.bootstrap})
        self.mount(await self._presence.serve())
        if self._config.rates.any:
            await self.retire_relay()  # what is relayed goes past us, from daemon to daemon: nobody would count it
        self.mount(ProbeService(self._clock))
        for name in ("control", "tensors"):
            await self._incoming.serve(self._daemon.p2p, f"swarm/{name}/1/{run[:32]}")
        config = DirectoryConfig(run=run, kinds=self._config.kinds, bootstrap=self._config.bootstrap)
        await self._directory.enter(self._daemon.p2p, config, self._identity.private, self._clock)

    def mount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._dispatcher.mount(service)

    def unmount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._dispatcher.unmount(service)

    def meet(self, other: LibP2PEndpoint) -> None:
        """Call another endpoint of this process without the network from now on, and be called so, until one of them
        closes."""
        self._outgoing.here[other.peer], other._outgoing.here[self.peer] = other._incoming, self._incoming

    def part(self, other: LibP2PEndpoint) -> None:
        """Undo :meth:`meet`."""
        self._outgoing.here.pop(other.peer, None)
        other._outgoing.here.pop(self.peer, None)

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

        Returns what went wrong, "" when at least one relays for us; in either case they are asked again every 10 s. The
        last 64 named are remembered. Takes 4 s at most; cancelled, it goes on in the background.
        """
        ask = functools.partial(self._presence.known.reserve, self, run=self._run)
        return await self._presence.take_relay(self.peer, candidates, self._hints.dialable, ask)

    def allow_relay(self, may: MayRelay) -> None:
        """Relay without limits for the peers of which ``may(peer)`` is true, the run's members. It is asked again at
        every use, so it must be cheap and not raise. All others, and everybody before this is called, share small
        bounds (``RelayLimits``), so that who joins can be reached, too; so do their
        streams to us, and what they send on them (``swarm.network.rpc.strangers``)."""
        self._presence.allow_relay(may)
        self._incoming.bound_strangers(lambda peer: peer == self.peer or may(peer))

    def allow_questions(self, known: MayRelay) -> None:
        """Let the peers of which ``known(peer)`` is true ask our directory as much as they like; all others, from now
        on, share a budget (:class:`~swarm.network.rpc.strangers.QuestionBudget`). Asked at every question, so it must
        be cheap and not raise. Until it is called nobody is bounded."""
        self._incoming.questions.known = lambda peer: peer == self.peer or known(peer)

    def allow_calls(self, may: May) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._dispatcher.may = may

    def introduce(self, rpc: Rpc[RequestT, Any], body: RequestT) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._outgoing.introduction.prepare(rpc, body)

    def cut(self, peer: PeerId) -> None:
        """End what a peer's streams to us carry: handlers too. It may open others, and is asked for its right to."""
        self._incoming.cut(peer)

    def expect(self, peers: int) -> None:
        """So many are to come that :meth:`allow_relay` does not name yet: four streams of each have room beside those
        of strangers, with some calls. Counts until it is called again."""
        self._incoming.expect(peers)

    async def retire_relay(self) -> None:
        """Relay for nobody anew, and tell those who are reached through us, who find others within seconds.
        Connections stay until :meth:`close`. Takes 1 s at most, never raises a PeerError, idempotent."""
        await self._presence.retire_relay(self)

    async def links(self) -> Mapping[PeerId, LinkKind]:
        """Return the kind of every peer's connection with us now, by one question to the daemon. Where a
        direct one comes up beside a relayed one, calls begin to take it within 5 s. Raises Unreachable."""
        return await self._presence.links()

    async def link_kind(self, peer: PeerId) -> LinkKind:
        """Return the kind of one peer's connection; "unknown" when there is none. Raises Unreachable."""
        return (await self.links()).get(peer, "unknown")

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
        """See :class:`~swarm.network.protocols.Endpoint`. A peer may call itself: same path, no daemon. So it is with
        those that it met (:meth:`meet`)."""
        return await self._outgoing.introduction.call(target, rpc, body, timeout_s, payload, max_reply_bytes)

    async def _call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        timeout_s: float,
        payload: Payload,
        max_reply_bytes: int,
    ) -> tuple[ReplyT, memoryview]:
        large = memoryview(payload).nbytes > 0 or max_reply_bytes > 0
        protocol = self._protocol(rpc, large)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                stream = await self._outgoing.stream(target, protocol)
                return await stream.call(rpc, body, deadline=deadline, payload=payload, max_reply_bytes=max_reply_bytes)
        except TimeoutError as error:
            raise DeadlineMissed(f"no answer to {rpc.name} in {timeout_s:g} s", peer=target) from error

    async def notify(self, target: PeerId, rpc: Rpc[RequestT, Any], body: RequestT, *, timeout_s: float) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                stream = await self._outgoing.stream(target, self._protocol(rpc, False))
                await stream.notify(rpc, body, deadline=deadline)
        except TimeoutError as error:
            raise DeadlineMissed(f"{rpc.name} could not be sent in {timeout_s:g} s", peer=target) from error

    def statistics(self) -> LinkStatistics:
        """See :class:`~swarm.network.protocols.Endpoint`. The directory's own traffic is not counted."""
        return self._incoming.meter.statistics()

    async def wait_daemon(self) -> str:
        """Until there is no daemon any more and will be none: why it was not started again, "" after :meth:`close`."""
        return await self._daemon.supervisor.wait_over()

    async def close(self) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`. Ends within 2 s; finished even when cancelled."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="endpoint close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._daemon.supervisor.halt()
        await asyncio.gather(self._outgoing.close(), self._incoming.close())
        await self._presence.close()
        await self._directory.leave()
        await self._daemon.p2p.detach()
        await self._directory.ended()
        await self._daemon.end()

    def _dealt_with(self) -> tuple[PeerId, ...]:
        """Bootstrap peers, relays, and those with whom there are, or lately were, streams."""
        bootstrap = (split_peer(address)[1] for address in (*self._config.bootstrap, *self._config.relays))
        peers = dict.fromkeys((*bootstrap, *self._outgoing.peers, *self._incoming.recent))
        return tuple(peer for peer in peers if peer != self.peer)

    def _protocol(self, rpc: Rpc[Any, Any], large: bool) -> str:
        if rpc.public:
            return PUBLIC_PROTOCOL
        if self._run is None:
            raise BugError(f"{rpc.name} was called before the endpoint entered a run")
        return f"swarm/{'tensors' if large else 'control'}/1/{self._run[:32]}"


_CLOSE_S = 0.5


class EnteredDirectory:
    """The directory of the run that an endpoint has entered, over all daemons that serve it; before that, none.

    Its records are what the endpoint knows of peers that it never met: where they are, and after a new daemon who is
    there. ``addresses`` gives where the endpoint is reached now, for its own record.
    """

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._dht: DHTDirectory | None = None
        self._of_peers = False

    @property
    def dht(self) -> DHTDirectory:
        """The run's directory. Raises BugError before :meth:`enter`."""
        if self._dht is None:
            raise BugError("the endpoint has not entered a run")
        return self._dht

    async def enter(self, p2p: AttachedP2P, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock) -> None:
        """Join the directory of a run. Raises Unreachable when our daemon dies over it."""
        self._of_peers = PeerRecord in config.kinds
        self._dht = await DHTDirectory.open(p2p, config, identity, clock)

    def lose(self) -> None:
        """The daemon is gone: what hivemind waits for must be failed by hand."""
        if self._dht is not None:
            self._dht.lose()

    async def announce_again(self) -> Mapping[PeerId, PeerRecord]:
        """Enter our records at a new daemon, with the addresses of now; return those of others."""
        if self._dht is None:
            return {}
        await self._dht.resume(self._refreshed)
        return await self.records()

    def _refreshed(self, record: Record) -> Record:
        return record.model_copy(update={"addresses": self._addresses()}) if isinstance(record, PeerRecord) else record

    async def look_up(self, target: PeerId) -> tuple[str, ...]:
        """The addresses in a peer's record; none when the directory has no record of it, or no records of peers."""
        record = (await self.records()).get(target)
        return record.addresses if record is not None else ()

    async def records(self) -> Mapping[PeerId, PeerRecord]:
        """The records of all peers; none where there are none of peers, or the directory cannot be asked."""
        if self._dht is not None and self._of_peers:
            with contextlib.suppress(Unreachable):
                return await self._dht.lookup(PeerRecord)
        return {}

    async def leave(self) -> None:
        """Leave it; what waits fails. Takes half a second at most."""
        if self._dht is not None:
            self._dht.lose()
            with contextlib.suppress(*LINK_ERRORS):
                async with asyncio.timeout(_CLOSE_S):
                    await self._dht.close()

    async def ended(self) -> None:
        """Until nothing of it runs any more, moments after the client of the daemon was detached: half a second at
        most."""
        if self._dht is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._dht.ended()
