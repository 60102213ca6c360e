"""Staying reachable through relays: two if that many agree, renewed while they live, replaced when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.addresses import is_loopback, is_relayed, most_useful, split_peer, told_address
from swarm.network.reach.reachability import Reserved
from swarm.network.reach.relay_slots import RESERVED_S

WANTED = 2
"""One relay may die without cutting us off."""

RENEW_S = 10.0
"""How often reservations are renewed; a relay that is gone is replaced as soon."""

ASKED_AFTER_S = (1.0, 5.5)
"""A daemon is replaced within a second; anyone who dialled meanwhile is kept by libp2p from dialling again for 5 s."""
_ADDRESSES_PER_RELAY = 3
_TRIED_AT_ONCE = 4
_MAX_TRIED = 12
"""Peers asked in one go. Those who refused come last, the longest ago first: everybody has a turn."""


class _Renewals:
    """The times of renewals: the next is due after ``every_s``, at once when a relay is gone, and after some short
    pauses when one may be gone."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.after_s: Sequence[float] = ASKED_AFTER_S
        self._hurry, self._soon, self._shaken = asyncio.Event(), deque[float](), False

    @property
    def usual(self) -> bool:
        """Return whether nothing happened for which one is due sooner."""
        return not self._soon and not self._shaken

    async def due(self) -> bool:
        """Return when the time has come; False when there is only another pause to begin, of the short ones."""
        pause_s = self._soon.popleft() if self._soon else self._every_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()
        if self._shaken:
            self._shaken, self._soon = False, deque(self.after_s)
            return False
        return True

    def at_once(self) -> None:
        """A relay is gone."""
        self._shaken = False
        self._hurry.set()

    def soon(self) -> None:
        """A relay may be gone."""
        self._shaken = True
        self._hurry.set()


class RelayLease:
    """Our reservations. :meth:`renew` once to have them, then :meth:`keep` for as long as they are needed."""

    def __init__(
        self,
        me: PeerId,
        clock: Clock,
        candidates: Callable[[], Sequence[PeerId]],
        reserve: Callable[[PeerId], Awaitable[Reserved]],
        changed: Callable[[], None],
    ) -> None:
        """``candidates`` gives, at any time, the peers that may be asked, the best first; ``reserve`` asks one of them,
        and raises a PeerError. ``changed`` is called whenever others relay for us than before."""
        self._me, self._clock, self._candidates = me, clock, candidates
        self._reserve_with, self._changed = reserve, changed
        self._held: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self._refused: dict[PeerId, float] = {}
        self._gone: dict[PeerId, float] = {}
        self._turn, self._renewals = asyncio.Lock(), _Renewals(RENEW_S)
        self._returning: set[PeerId] = set()
        self.problem = "nobody to ask"

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The peers that relay for us now."""
        return tuple(self._held)

    @property
    def addresses(self) -> tuple[Multiaddr, ...]:
        """Under which others reach us through them, each with our ``/p2p`` part."""
        return tuple(address for held in self._held.values() for address in held)

    async def keep(self) -> None:
        """Renew for ever; to be cancelled."""
        while True:
            if self._renewals.usual:
                self._returning.clear()
            if await self._renewals.due():
                await self.renew()

    def withdrawn(self, relay: PeerId) -> None:
        """This peer says that it relays for us no longer. It is not asked again for a minute, so that it cannot make
        us busy; others are, at once. Without effect when it does not relay for us."""
        if self._held.pop(relay, None) is not None:
            self._gone[relay] = self._clock.monotonic() + RESERVED_S
            self._changed()
            self._renewals.at_once()

    def shaken(self, relay: PeerId) -> None:
        """A stream to this peer broke. If it relays for us, its connection with us may be gone and with it the way to
        us, so it is asked soon, and once more: its daemon may be starting anew. Without effect for others."""
        if relay in self._held:
            self._returning.add(relay)
            self._renewals.soon()

    async def fill(self) -> None:
        """As :meth:`renew`, and nothing at all when there are two."""
        if len(self._held) < WANTED:
            await self.renew()

    async def renew(self) -> None:
        """Renew what we hold, drop who is gone, and ask others until there are two: at most twelve, with a second for
        every four. Calls at one time take turns."""
        async with self._turn:
            before = self.relays
            await self._ask(self.relays)
            others = self._others() if len(self._held) < WANTED else []
            while others and len(self._held) < WANTED:
                await self._ask(others[:_TRIED_AT_ONCE])
                others = others[_TRIED_AT_ONCE:]
            if self.relays != before:
                self._changed()

    def _others(self) -> list[PeerId]:
        now = self._clock.monotonic()
        self._gone = {peer: until for peer, until in self._gone.items() if until > now}
        passed_over = {*self._held, *self._gone, self._me}
        found = [peer for peer in dict.fromkeys(self._candidates()) if peer not in passed_over]
        self._refused = {peer: self._refused[peer] for peer in found if peer in self._refused}
        found.sort(key=lambda peer: (peer not in self._returning, self._refused.get(peer, -math.inf)))
        return found[:_MAX_TRIED]

    async def _ask(self, peers: Sequence[PeerId]) -> None:
        for peer, addresses in zip(peers, await asyncio.gather(*map(self._reserve, peers)), strict=True):
            if not addresses:
                self._held.pop(peer, None)
                self._refused[peer] = self._clock.monotonic()
            elif peer in self._held or (len(self._held) < WANTED and peer not in self._gone):
                self._held[peer] = addresses

    async def _reserve(self, relay: PeerId) -> tuple[Multiaddr, ...]:
        """Our addresses through this relay; none when it does not relay for us."""
        try:
            given = await self._reserve_with(relay)
        except PeerError as error:
            self.problem = str(error)
            return ()
        addresses = circuits(relay, given.addresses, self._me)
        if not addresses:
            self.problem = f"{relay} relays, but tells no address of its own"
        return addresses


def circuits(relay: PeerId, told: Sequence[str], target: PeerId) -> tuple[Multiaddr, ...]:
    """The target's addresses through a relay that tells these addresses of its own.

    Those of the relay's own machine are used only when it tells no others. Addresses that cannot be dialled, name
    another peer or lead through a further relay are ignored.
    """
    usable = []
    for text in told:
        address = told_address(text)
        if address is not None and split_peer(address)[1] == relay and not is_relayed(address):
            usable.append(address)
    ranked = most_useful(usable)
    ranked = tuple(address for address in ranked if not is_loopback(address)) or ranked
    return tuple(Multiaddr(f"{address}/p2p-circuit/p2p/{target}") for address in ranked[:_ADDRESSES_PER_RELAY])
