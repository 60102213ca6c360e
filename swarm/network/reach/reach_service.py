"""Help other peers to be reached: dial back on request, relay for peers that need it, announce the end of relaying.

Nobody can be made to probe a third party's door: a caller is dialled back only at the addresses from which it is
seen to call, a few times a minute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import Busy, Refused
from swarm.ids import PeerId
from swarm.network.addresses import GREETING, ip_of, is_relayed, machine_ips, split_peer, tcp_port_of, told_address
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.protocols import AnyMethod
from swarm.network.reach.reachability import (
    CLOSING,
    DIALBACK,
    RESERVE,
    WITHDRAWN,
    AskDialback,
    Dialback,
    Reserved,
    Withdrawn,
)
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import RESERVED_S

_DIAL_S = 0.8
_MAX_DIALS = 4
_MAX_CALLERS = 8

_Ip = IPv4Address | IPv6Address


class Turns:
    """A limit on each peer's requests: ``times`` in any ``within_s`` seconds. Remembers ``peers`` at most, and refuses
    others while it is full."""

    def __init__(self, *, times: int = 3, within_s: float = 60.0, peers: int = 1024) -> None:
        self._times, self._within_s, self._peers = times, within_s, peers
        self._asked: dict[PeerId, deque[float]] = {}

    def take(self, peer: PeerId, now: float) -> bool:
        """Return whether it is this peer's turn; if so, it is taken."""
        if peer not in self._asked and len(self._asked) >= self._peers:
            since = now - self._within_s
            self._asked = {each: asked for each, asked in self._asked.items() if asked[-1] > since}
            if len(self._asked) >= self._peers:
                return False
        asked = self._asked.setdefault(peer, deque(maxlen=self._times))
        if len(asked) == self._times and asked[0] > now - self._within_s:
            return False
        asked.append(now)
        return True


class ReachService:
    """Answers the questions of :mod:`swarm.network.reach.reachability`."""

    def __init__(
        self,
        p2p: AttachedP2P,
        relay: Relay | None,
        clock: Clock,
        own: Callable[[], Sequence[str]],
        withdrawn: Callable[[PeerId], None],
        hidden: Callable[[], bool],
    ) -> None:
        """``relay`` is None for a peer that relays for nobody. ``own`` gives the addresses that this peer announces
        now; ``withdrawn`` is told of each peer that says it relays for us no longer, true or not; ``hidden`` says
        whether this peer can be reached through relays alone, also while it has none."""
        self._p2p, self._relay, self._clock, self._own, self._withdrawn = p2p, relay, clock, own, withdrawn
        self._hidden = hidden
        self._asking: set[PeerId] = set()
        self._turns = Turns()

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            DIALBACK.handled(self.dial_back),
            RESERVE.handled(lambda caller, body: self.reserve(caller)),
            WITHDRAWN.handled(self._withdraw),
            CLOSING.handled(self._withdraw),
        ]

    async def dial_back(self, caller: PeerId, body: AskDialback) -> Dialback:
        """At most 4 connections for one caller and 8 callers at a time, 0.8 s each; three times a minute."""
        if caller in self._asking or len(self._asking) >= _MAX_CALLERS:
            raise Busy("other peers are being dialled back")
        if not self._turns.take(caller, self._clock.monotonic()):
            raise Busy("this peer was dialled back a moment ago")
        self._asking.add(caller)
        try:
            observed = await self.observed(caller)
            ours = {ip for text in self._own() if (ip := ip_of(Multiaddr(text))) is not None}
            places = dialback_places(caller, body.addresses, observed, ours)
            found = await asyncio.gather(*(_greets(ip, port) for ip, port, _ in places))
        finally:
            self._asking.discard(caller)
        answered = tuple(text for (_, _, text), good in zip(places, found, strict=True) if good)
        ours_too = any(ip.is_loopback or str(ip) in machine_ips() for ip in observed)
        return Dialback(observed=tuple(sorted(map(str, observed)))[:8], answered=answered, beside=ours_too)

    async def reserve(self, caller: PeerId) -> Reserved:
        """Relay for the caller from now on. Raises Refused, or Busy when too many have asked."""
        if self._relay is None:
            raise Refused("this peer relays for nobody")
        if self._hidden():
            raise Refused("this peer is reached through relays alone itself")
        if not await self.observed(caller):
            raise Refused("a relay needs a direct connection with whom it relays for")
        self._relay.reserve(caller)
        return Reserved(seconds=RESERVED_S, addresses=tuple(self._own()))

    async def _withdraw(self, caller: PeerId, body: Withdrawn) -> Withdrawn:
        self._withdrawn(caller)
        return Withdrawn()

    async def observed(self, caller: PeerId) -> set[_Ip]:
        """Return the addresses of the caller's direct connections."""
        return {
            ip
            for peer, address in await self._p2p.connections()
            if peer == caller and not is_relayed(address) and (ip := ip_of(address)) is not None
        }


def dialback_places(
    caller: PeerId, claims: Sequence[str], observed: set[_Ip], ours: set[_Ip]
) -> list[tuple[str, int, str]]:
    """(host, port, address) of what may be dialled for a caller: never another machine than the one that calls.

    That is each claim with an IP address that the caller was seen with, and the claimed ports at those addresses (a
    router may forward one). A caller on our own machine may also claim this machine's other addresses, ``ours``.
    """
    allowed = observed | (ours if any(ip.is_loopback for ip in observed) else set())
    ports: list[int] = []
    places: dict[tuple[str, int], str] = {}
    for text in claims:
        if (told := told_address(text)) is not None:
            address, named = split_peer(told)
            ip, port = ip_of(address), tcp_port_of(address)
            if named == caller and port:
                ports.append(port)  # also of a name, which is never looked up for who says it
                if ip is not None and ip in allowed:
                    places[str(ip), port] = _written(ip, port, caller)
    for ip in sorted(observed, key=str):
        for port in ports:
            if not ip.is_loopback:
                places.setdefault((str(ip), port), _written(ip, port, caller))
    # Loopback proves least: such a place is tried last.
    ranked = sorted(places.items(), key=lambda place: place[0][0].startswith(("127.", "::1")))
    return [(host, port, text) for (host, port), text in ranked[:_MAX_DIALS]]


async def _greets(host: str, port: int) -> bool:
    """Return whether a libp2p listener answers there within 0.8 s. Sends nothing."""
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.close()
    except (OSError, EOFError):
        return False


def _written(ip: _Ip, port: int, peer: PeerId) -> str:
    return f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer}"
