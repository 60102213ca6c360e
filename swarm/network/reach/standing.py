"""A relay that belongs to no run: peers of any run, or of some, are reached through it from their first second on.

Within a run its members relay for each other (:mod:`swarm.network.reach.reach_service`), which takes one whom everybody
can dial. Where there is none yet, as for a founder behind NAT, one relay outside serves: it is asked under the public
protocol, reserves slots, dials back, and tells who else of the same run has a slot. It knows a run by a tag alone, made
of the run's id, which it can neither read back nor join with: it holds nothing of any run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Annotated

from multiaddr import Multiaddr
from pydantic import Field, StringConstraints

from swarm.errors import Busy, PeerError, Refused
from swarm.ids import PeerId, RunId
from swarm.network.addresses import is_relayed, split_peer
from swarm.network.protocols import RELAY_PREFIX, AnyMethod, Endpoint, Rpc
from swarm.network.reach.reach_service import ReachService
from swarm.network.reach.reachability import CLOSING, DIALBACK_FROM_OUTSIDE, RESERVE, AskReserve, Reserved
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import RelayLimits
from swarm.schema import Message, PeerIdField

MAX_GUESTS_TOLD = 16
ASK_S = 2.0
"""For one question to a relay: a first one takes four round trips."""

_MAX_ADDRESSES = 8

Tag = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class AskSlot(Message):
    """Let others of the run with this ``tag`` reach me through you."""

    tag: Tag


class AskGuests(Message):
    """Who of the run with this ``tag`` is reached through you?"""

    tag: Tag


class Guests(Message):
    """Some of them, those first who have renewed last."""

    peers: Annotated[tuple[PeerIdField, ...], Field(max_length=MAX_GUESTS_TOLD)]


SLOT = Rpc(f"{RELAY_PREFIX}slot", AskSlot, Reserved)
GUESTS = Rpc(f"{RELAY_PREFIX}guests", AskGuests, Guests)


def tag_of(run: RunId) -> str:
    """Return what a relay knows a run by."""
    return hashlib.sha256(f"swarm/relay/1/{run}".encode()).hexdigest()


# --- the side of a peer ----------------------------------------------------------------------------------------------


def relays_on_the_way(addresses: Collection[Multiaddr]) -> tuple[Multiaddr, ...]:
    """The relays through which these addresses lead, as they are dialled, each with its ``/p2p`` part: they may relay
    for us, too. Addresses that name no host of the relay tell none."""
    found: dict[str, Multiaddr] = {}
    for address in filter(is_relayed, addresses):
        text = str(address).partition("/p2p-circuit")[0]
        with contextlib.suppress(ValueError, LookupError):
            relay = Multiaddr(text)
            split_peer(relay)
            if not text.startswith("/p2p/"):
                found[text] = relay
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class KnownRelays:
    """The relays that this peer was told of, with the addresses at which they were given: those that it dials."""

    at: Mapping[PeerId, tuple[str, ...]] = field(default_factory=dict)

    async def reserve(self, endpoint: Endpoint, relay: PeerId, run: RunId | None) -> Reserved:
        """Ask a relay, or a member of our run, for a slot. Raises a PeerError.

        Addresses at which the relay was given come first: behind a router that forwards its port it does not know them
        itself. One that turns out to be a member of the run is asked as such.
        """
        at = self.at.get(relay, ())
        if not at or run is None:
            given, _ = await endpoint.call(relay, RESERVE, AskReserve(), timeout_s=ASK_S / 2)
            return given
        try:
            given, _ = await endpoint.call(relay, SLOT, AskSlot(tag=tag_of(run)), timeout_s=ASK_S)
        except Refused as refused:
            with contextlib.suppress(PeerError):
                given, _ = await endpoint.call(relay, RESERVE, AskReserve(), timeout_s=ASK_S / 2)
                return given
            raise refused from None
        own = tuple(dict.fromkeys((*at, *given.addresses)))[:_MAX_ADDRESSES]
        return Reserved(seconds=given.seconds, addresses=own)

    async def guests(self, endpoint: Endpoint, run: RunId) -> list[Multiaddr]:
        """The peers of a run that have slots with any of them, as addresses through it; none where none answers."""
        found = []
        for relay, at in self.at.items():
            with contextlib.suppress(PeerError):
                told, _ = await endpoint.call(relay, GUESTS, AskGuests(tag=tag_of(run)), timeout_s=ASK_S)
                found += [Multiaddr(f"{way}/p2p-circuit/p2p/{peer}") for peer in told.peers for way in at]
        return found


# --- the side of the relay -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingLimits:
    """The ``slots`` of a relay, how many slots one host may have (an IPv4 address, or a /64 of IPv6), since anybody can
    make up identities, and the ``runs`` that it serves: none stands for all."""

    slots: RelayLimits = RelayLimits()
    slots_per_host: int = 32
    runs: frozenset[RunId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayFigures:
    """What a relay does now, and did since its start: peers with a slot, runs that they are of, circuits; bytes passed
    on, requests refused."""

    slots: int
    runs: int
    circuits: int
    relayed_bytes: int
    refused: int


class StandingRelay:
    """Answers the public questions to a relay. Anyone who has a slot is one of its own: strangers are those without."""

    def __init__(self, reach: ReachService, relay: Relay, limits: StandingLimits) -> None:
        self._reach, self._relay, self._limits = reach, relay, limits
        self._served = frozenset(map(tag_of, limits.runs))
        self._seated: dict[PeerId, tuple[str, str]] = {}
        self._refused = 0
        relay.allow(lambda peer: peer in relay.holders)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            SLOT.handled(self._slot),
            DIALBACK_FROM_OUTSIDE.handled(self._reach.dial_back),
            GUESTS.handled(self._guests),
        ]

    def figures(self) -> RelayFigures:
        """Return what it does now."""
        seated, relay = self._present(), self._relay
        return RelayFigures(
            slots=len(seated),
            runs=len({tag for tag, _ in seated.values()}),
            circuits=relay.circuits,
            relayed_bytes=relay.relayed_bytes,
            refused=self._refused + relay.refused,
        )

    async def close(self, endpoint: Endpoint) -> None:
        """Give no more slots, and tell those who have one. Takes a second at most; never raises a PeerError."""
        await self._relay.dismiss(endpoint, CLOSING)

    async def _slot(self, caller: PeerId, body: AskSlot) -> Reserved:
        if self._served and body.tag not in self._served:
            self._refused += 1
            raise Refused("this relay does not serve that run: it was started for others")
        host = min((_host(ip) for ip in await self._reach.observed(caller)), default="")
        seated = self._present()
        mine = sum(each == host for peer, (_, each) in seated.items() if peer != caller)
        if mine >= self._limits.slots_per_host:
            self._refused += 1
            raise Busy(f"this relay serves {mine} peers of your address already")
        given = await self._reach.reserve(caller)
        self._seated = {**{peer: what for peer, what in seated.items() if peer != caller}, caller: (body.tag, host)}
        return given

    async def _guests(self, caller: PeerId, body: AskGuests) -> Guests:
        found = [peer for peer, (tag, _) in self._present().items() if tag == body.tag and peer != caller]
        return Guests(peers=tuple(reversed(found))[:MAX_GUESTS_TOLD])

    def _present(self) -> dict[PeerId, tuple[str, str]]:
        """Return who has a slot now: run and host, the last to renew last."""
        holders = frozenset(self._relay.holders)
        return {peer: what for peer, what in self._seated.items() if peer in holders}


def _host(ip: IPv4Address | IPv6Address) -> str:
    return str(ip) if isinstance(ip, IPv4Address) else str(ip_network((ip, 64), strict=False))
