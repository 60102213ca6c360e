"""Keep one endpoint reachable: its addresses, its relays, its service to others.

:class:`Upgrades` moves calls to direct connections; :class:`Recovery` restores all of it after the libp2p daemon has
been replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import BugError, Unreachable
from swarm.events import EventSink, LinkUpgraded
from swarm.ids import PeerId
from swarm.network.addresses import MAX_ADDRESSES, is_loopback, is_relayed, most_useful, virtual_ips
from swarm.network.discovery.records import PeerRecord
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.libp2p.dialling import Dialler, Hints
from swarm.network.protocols import Endpoint
from swarm.network.reach.leases import RelayLease
from swarm.network.reach.reach_service import ReachService
from swarm.network.reach.reachability import WITHDRAWN, LinkKind, Reserved
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import MayRelay
from swarm.network.reach.standing import KnownRelays, StandingLimits, StandingRelay
from swarm.waiting import ended

_MAX_FOUND = 2
_MAX_CANDIDATES = 64


class Presence:
    """Made once the daemon is there; ended by :meth:`close`."""

    def __init__(
        self, p2p: AttachedP2P, own: Sequence[str], clock: Clock, relay: Relay | None, known: KnownRelays
    ) -> None:
        """``own`` are the addresses that the daemon tells. With a ``relay`` it relays, and is relayed for; ``known``
        are the relays of no run that it was told of."""
        self._p2p, self._clock = p2p, clock
        self._own = tuple(Multiaddr(text) for text in own)
        self._found: tuple[Multiaddr, ...] = ()
        self._virtual = virtual_ips()
        self._relay, self.known = relay, known
        self._lease: RelayLease | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._named: tuple[PeerId, ...] = ()
        self.on_relays: Callable[[], None] = lambda: None
        """Called whenever others relay for us than before."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """At most 8, the most useful first, each with our ``/p2p`` part; other ones when relays change. Those that
        others found are told where there is room, after what we know ourselves and before this machine's own."""
        through = self._lease.addresses if self._lease is not None else ()
        known = most_useful((*through, *self._own), self._virtual)
        found = most_useful(self._found)[: MAX_ADDRESSES - len(known)]
        near = [address for address in known if is_loopback(address) and not is_relayed(address)]
        far = [address for address in known if address not in near]
        return tuple(map(str, (*far, *found, *near)))

    async def tell_own(self) -> None:
        """Tell the addresses that the daemon tells now: another one serves. Raises Unreachable."""
        self._own = tuple(Multiaddr(text) for text in await self._p2p.addresses())

    async def renew(self) -> None:
        """Have our relays' reservations made good at once: a relay serves who is connected with it. Those that others
        have with us hold. Never raises a PeerError."""
        if self._lease is not None:
            await self._lease.renew()

    def stream_lost(self, peer: PeerId) -> None:
        """A stream of ours to this peer broke."""
        if self._lease is not None:
            self._lease.shaken(peer)

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The peers that relay for us now."""
        return self._lease.relays if self._lease is not None else ()

    async def serve(self) -> ReachService:
        """Relay for others from now on, and what they ask for it with. Raises Unreachable."""
        if self._relay is not None:
            await self._relay.open()
        return self._service()

    async def stand(self, limits: StandingLimits) -> StandingRelay:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.stand`."""
        if self._relay is None:
            raise BugError("relays are switched off")
        await self._relay.open()
        return StandingRelay(self._service(), self._relay, limits)

    def _service(self) -> ReachService:
        own, hidden = lambda: self.addresses, lambda: self._lease is not None
        return ReachService(self._p2p, self._relay, self._clock, own, self.withdrawn, hidden)

    def allow_relay(self, may: MayRelay) -> None:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.allow_relay`."""
        if self._relay is not None:
            self._relay.allow(may)

    async def retire_relay(self, endpoint: Endpoint) -> None:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.retire_relay`."""
        if self._relay is not None:
            await self._relay.dismiss(endpoint, WITHDRAWN)

    def also_at(self, addresses: Sequence[str]) -> None:
        """Announce these as well: at most two that we did not know, the first told."""
        known = set(map(str, self._own))
        new = [Multiaddr(text) for text in addresses if text not in known]
        self._found = tuple({str(address): address for address in (*self._found, *new)}.values())[:_MAX_FOUND]

    async def take_relay(
        self,
        me: PeerId,
        candidates: Sequence[PeerId],
        others: Callable[[], Sequence[PeerId]],
        reserve: Callable[[PeerId], Awaitable[Reserved]],
    ) -> str:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.take_relay`. ``others`` gives, at any time, peers that may
        be asked after the ``candidates``; ``reserve`` asks one, and raises a PeerError."""
        self._named = tuple(dict.fromkeys((*candidates, *self._named)))[:_MAX_CANDIDATES]
        if self._relay is None:
            return "relays are switched off"
        if self._lease is None:
            self._lease = RelayLease(
                me, self._clock, lambda: (*self._named, *others()), reserve, lambda: self.on_relays()
            )
            self._keeping.append(asyncio.get_running_loop().create_task(self._lease.keep(), name="relay lease"))
        await self._lease.fill()
        return "" if self._lease.relays else self._lease.problem

    @property
    def problem(self) -> str:
        """Return what went wrong with the last relay that was asked."""
        return self._lease.problem if self._lease is not None else ""

    def withdrawn(self, relay: PeerId) -> None:
        """This peer says that it relays for us no longer."""
        if self._lease is not None:
            self._lease.withdrawn(relay)

    def watch_links(self, renew: Callable[[PeerId], bool], events: EventSink) -> None:
        """From now on have calls leave relays where there is a direct connection too: ``renew`` has those to a peer
        take new streams."""
        upgrades = Upgrades(self._p2p.connections, renew, events, self._clock)
        self._keeping.append(asyncio.get_running_loop().create_task(upgrades.keep(), name="link upgrades"))

    async def links(self) -> Mapping[PeerId, LinkKind]:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.links`."""
        found: dict[PeerId, LinkKind] = {}
        for peer, address in await self._p2p.connections():
            if found.get(peer) != "direct":
                found[peer] = "relayed" if is_relayed(address) else "direct"
        return found

    async def close(self) -> None:
        """Relay and be relayed no longer. Idempotent."""
        await ended(self._keeping)
        if self._relay is not None:
            await self._relay.close()


# --- recovery --------------------------------------------------------------------------------------------------------
# Run after a daemon was replaced, so that others find this peer where it was.


_DIALS_AT_ONCE = 16
_DIAL_S = 10.0


class Recovery:
    """Made once for an endpoint; :meth:`run` after every replacement."""

    def __init__(
        self,
        presence: Presence,
        hints: Hints,
        dialler: Dialler,
        peers: Callable[[], Sequence[PeerId]],
        announce: Callable[[], Awaitable[Mapping[PeerId, PeerRecord]]],
    ) -> None:
        """``peers`` gives those we dealt with lately. ``announce`` enters our records into the directory again, and
        gives those of others, as far as it can; it does not raise a PeerError."""
        self._presence, self._hints, self._dialler = presence, hints, dialler
        self._peers, self._announce = peers, announce
        self._turns = asyncio.Semaphore(_DIALS_AT_ONCE)

    async def run(self) -> None:
        """Connect with the peers we dealt with, be reached through our relays, be in the directory. Each as far as it
        goes: never raises a PeerError. Takes as long as the slowest dial, at most 10 s for every 16 peers that do
        not answer; cancel it when this daemon dies as well.

        We connect although they would: who dialled us while nobody listened is kept by libp2p from dialling
        again for 5 s. Anyone who called us and never told us its address is looked up.
        """
        with contextlib.suppress(Unreachable):
            await self._presence.tell_own()
        peers = self._peers()
        known = [peer for peer in peers if self._hints.of(peer)]
        await asyncio.gather(self._connect(known), self._presence.renew(), self._find(set(peers).difference(known)))

    async def _find(self, strangers: set[PeerId]) -> None:
        for peer, record in (await self._announce()).items():
            if peer in strangers:
                self._hints.learn(peer, record.addresses)
        await self._connect(strangers)

    async def _connect(self, peers: Iterable[PeerId]) -> None:
        async def connect(peer: PeerId) -> None:
            async with self._turns:
                with contextlib.suppress(Unreachable, TimeoutError):
                    async with asyncio.timeout(_DIAL_S):
                        await self._dialler.connect(peer)

        await asyncio.gather(*map(connect, peers))


LOOK_EVERY_S = 5.0
"""A question to our own daemon, over a local socket. A punch takes some round trips, or 5 s where the daemon tries in
vain to dial first."""

TELL_EVERY_S = 300.0
"""Connections that come and go move the calls each time, and are told of once in so long a peer."""

_Connections = Callable[[], Awaitable[Sequence[tuple[PeerId, Multiaddr]]]]


class Upgrades:
    """Move one endpoint's calls from a relay to a direct connection once there is one: a hole was punched, or the other
    side dialled us.

    The daemon punches holes when a relayed connection begins, and opens new streams on a direct connection where it has
    one. A stream stays on the connection on which it began, and ours live as long as the two peers: without this the
    first calls, which made the relayed connection, would keep all later ones on it. The calls to a peer with whom we
    have both kinds of connection are moved once, and again when it has had only a relayed one meanwhile.
    """

    def __init__(
        self, connections: _Connections, renew: Callable[[PeerId], bool], events: EventSink, clock: Clock
    ) -> None:
        """``connections`` tells with whom we are connected, at what address, and may raise Unreachable; ``renew`` has
        the next calls to a peer take new streams, and tells whether there were any: only then there is an event."""
        self._connections, self._renew, self._events, self._clock = connections, renew, events, clock
        self._moved: frozenset[PeerId] = frozenset()
        self._told: dict[PeerId, float] = {}

    async def keep(self) -> None:
        """Look every five seconds, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            with contextlib.suppress(Unreachable):  # another daemon is about to serve
                await self.look()

    async def look(self) -> None:
        """Move the calls of those who have both kinds of connection since the last look. Raises Unreachable."""
        connections = await self._connections()
        relayed = {peer for peer, address in connections if is_relayed(address)}
        direct = {peer: address for peer, address in connections if not is_relayed(address)}
        both = relayed & direct.keys()
        now = self._clock.monotonic()
        self._told = {peer: at for peer, at in self._told.items() if now < at + TELL_EVERY_S}
        for peer in sorted(both - self._moved):
            if self._renew(peer) and peer not in self._told:
                self._told[peer] = now
                self._events.emit(LinkUpgraded(target=peer, address=str(direct[peer])))
        self._moved = frozenset((self._moved | both) & direct.keys())
