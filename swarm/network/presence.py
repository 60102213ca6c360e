"""Where one endpoint can be reached, and what it does for that: its addresses, its relays, its service to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.ids import PeerId
from swarm.network.addresses import is_relayed, most_useful, virtual_ips
from swarm.network.attach import AttachedP2P
from swarm.network.protocols import Endpoint
from swarm.network.reachability import LinkKind, ReachService
from swarm.network.relay import Relay
from swarm.network.relay_lease import RelayLease


class Presence:
    """Made once the daemon is there; ended by :meth:`close`."""

    def __init__(self, p2p: AttachedP2P, own: Sequence[str], clock: Clock, *, relaying: bool) -> None:
        """``own`` are the addresses that the daemon tells; with ``relaying`` it relays, and is relayed for."""
        self._p2p, self._clock = p2p, clock
        self._own = tuple(Multiaddr(text) for text in own)
        self._virtual = virtual_ips()
        self._relay = Relay(p2p, clock) if relaying else None
        self._lease: RelayLease | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """At most 8, the most useful first, each with our ``/p2p`` part; other ones when relays change."""
        through = self._lease.addresses if self._lease is not None else ()
        return tuple(str(address) for address in most_useful((*through, *self._own), self._virtual))

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Who relays for us now."""
        return self._lease.relays if self._lease is not None else ()

    async def serve(self) -> ReachService:
        """Relay for others from now on, and what they ask for it with. Raises Unreachable."""
        if self._relay is not None:
            await self._relay.open()
        return ReachService(self._p2p, self._relay, lambda: self.addresses)

    def also_at(self, addresses: Sequence[str]) -> None:
        """Announce these as well."""
        self._own = (*self._own, *(Multiaddr(text) for text in addresses))

    async def take_relay(self, endpoint: Endpoint, candidates: Callable[[], Sequence[PeerId]]) -> str:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.take_relay`."""
        if self._relay is None:
            return "relays are switched off"
        if self._lease is None:
            self._lease = RelayLease(endpoint, self._clock, candidates)
            self._keeping = asyncio.get_running_loop().create_task(self._lease.keep(), name="relay lease")
        await self._lease.renew()
        return "" if self._lease.relays else self._lease.problem

    async def links(self) -> Mapping[PeerId, LinkKind]:
        """See :meth:`~swarm.network.endpoint.LibP2PEndpoint.links`."""
        found: dict[PeerId, LinkKind] = {}
        for peer, address in await self._p2p.connections():
            if found.get(peer) != "direct":
                found[peer] = "relayed" if is_relayed(address) else "direct"
        return found

    async def close(self) -> None:
        """Relay and be relayed no longer. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
