"""Move calls from a relay to a direct connection once there is one: a hole was punched, or the other side dialled us.

The daemon punches holes when a relayed connection begins, and opens new streams on a direct connection where it has
one. A stream stays on the connection on which it began, and ours live as long as the two peers: without this the first
calls, which made the relayed connection, would keep all later ones on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import Unreachable
from swarm.events import EventSink, LinkUpgraded
from swarm.ids import PeerId
from swarm.network.addresses import is_relayed

LOOK_EVERY_S = 5.0
"""A question to our own daemon, over a local socket. A punch takes some round trips, or 5 s where the daemon tries in
vain to dial first."""

TELL_EVERY_S = 300.0
"""Connections that come and go move the calls each time, and are told of once in so long a peer."""

_Connections = Callable[[], Awaitable[Sequence[tuple[PeerId, Multiaddr]]]]


class Upgrades:
    """Made for one endpoint. The calls to a peer with whom we have both kinds of connection are moved once, and again
    when it has had only a relayed one meanwhile."""

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
