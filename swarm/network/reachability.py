"""Can others dial this peer? It asks those that it came to the run through, and if not, is called through a relay.

Every peer answers two questions of the other members of its run: *dial me back* (only at the address that the caller
is seen to call from, so that nobody can be made to knock at a third party's door) and *relay for me*. The daemon's own
AutoNAT is not used for this: it looks at public addresses only and needs a quarter of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Literal, Protocol

import multiaddr
from multiaddr import Multiaddr
from pydantic import Field

from swarm.clock import Clock
from swarm.errors import Busy, PeerError, Refused
from swarm.ids import PeerId
from swarm.network.addresses import ip_of, is_loopback, is_relayed, split_peer, tcp_port_of
from swarm.network.attach import AttachedP2P
from swarm.network.protocols import Answer, Endpoint, Method, Request
from swarm.network.records import AddressText
from swarm.network.relay import RESERVED_S, Relay
from swarm.schema import Message

DIALBACK = "reach/1/dialback"
RESERVE = "reach/1/reserve"

How = Literal["direct", "relayed", "local", "outgoing", "unknown"]
LinkKind = Literal["direct", "relayed", "unknown"]

BUDGET_S = 3.0
"""How long :func:`reachability` takes at most."""

_ASK_S = 2.0
_DIAL_S = 0.8
_MAX_ASKED = 3
_MAX_DIALS = 4
_MAX_CALLERS = 8
_GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first; other services on that port do not."""

Addresses = Annotated[tuple[AddressText, ...], Field(max_length=8)]
_Ip = IPv4Address | IPv6Address


class AskDialback(Message):
    """Try to connect to me. ``addresses`` are where the caller listens; only those of the address it calls from
    count."""

    addresses: Addresses


class Dialback(Message):
    """``observed`` are the IP addresses that the caller was seen to call from, ``answered`` where it could be
    reached."""

    observed: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=8)]
    answered: Addresses


class AskReserve(Message):
    """Let others reach me through you."""


class Reserved(Message):
    """It holds for ``seconds``; ``addresses`` are the relay's."""

    seconds: Annotated[float, Field(gt=0, le=3600)]
    addresses: Addresses


@dataclass(frozen=True, slots=True)
class Finding:
    """What one peer that was asked found; ``error`` instead when it could not be asked. One that itself came through
    a relay has ``observed`` nothing, and cannot tell."""

    asked: PeerId
    observed: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """How others reach this peer, why we believe so, and the addresses to tell them.

    ``direct``: somebody dialled it. ``relayed``: through another peer. ``local``: from this machine only.
    ``outgoing``: not at all, it can only call others. ``unknown``: nobody could tell.
    """

    how: How
    detail: str
    addresses: tuple[str, ...]


class Reachable(Endpoint, Protocol):
    """What is needed of an endpoint to find out and to change how it is reached."""

    @property
    def behind_nat(self) -> bool:
        """Whether it is known that nobody can dial it."""

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Through whom it is reached now."""

    def also_at(self, addresses: Sequence[str]) -> None:
        """Announce addresses of our own that the daemon does not know of."""

    async def take_relay(self, candidates: Sequence[PeerId]) -> str:
        """Be reached through some of these from now on, and keep it so; what went wrong, "" when nothing did."""


class ReachService:
    """Answers both questions. ``relay`` is None for a peer that relays for nobody."""

    def __init__(self, p2p: AttachedP2P, relay: Relay | None, own: Callable[[], Sequence[str]]) -> None:
        """``own`` gives the addresses that this peer announces now."""
        self._p2p, self._relay, self._own = p2p, relay, own
        self._asking: set[PeerId] = set()

    def methods(self) -> Sequence[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name=DIALBACK, request=AskDialback, handle=self._dialback),
            Method(name=RESERVE, request=AskReserve, handle=self._reserve),
        ]

    async def _dialback(self, request: Request) -> Answer:
        """At most 4 connections for one caller and 8 callers at a time, 0.8 s each."""
        if request.caller in self._asking or len(self._asking) >= _MAX_CALLERS:
            raise Busy("other peers are being dialled back")
        self._asking.add(request.caller)
        try:
            observed = await self._observed(request.caller)
            ours = {ip for text in self._own() if (ip := ip_of(Multiaddr(text))) is not None}
            places = dialback_places(request.caller, request.body.addresses, observed, ours)
            found = await asyncio.gather(*(_greets(ip, port) for ip, port, _ in places))
        finally:
            self._asking.discard(request.caller)
        answered = tuple(text for (_, _, text), good in zip(places, found, strict=True) if good)
        return Answer(Dialback(observed=tuple(sorted(map(str, observed)))[:8], answered=answered))

    async def _reserve(self, request: Request) -> Answer:
        own = [text for text in self._own() if not is_relayed(Multiaddr(text))]
        if self._relay is None:
            raise Refused("this peer relays for nobody")
        if len(own) < len(self._own()):
            raise Refused("this peer is reached through a relay itself")
        if not await self._observed(request.caller):
            raise Refused("a relay needs a direct connection with whom it relays for")
        self._relay.reserve(request.caller)
        return Answer(Reserved(seconds=RESERVED_S, addresses=tuple(own)))

    async def _observed(self, caller: PeerId) -> set[_Ip]:
        """Where the caller's direct connections come from."""
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
        with contextlib.suppress(ValueError, LookupError, multiaddr.exceptions.Error):
            address, named = split_peer(Multiaddr(text))
            ip, port = ip_of(address), tcp_port_of(address)
            if named == caller and ip is not None and port:
                ports.append(port)
                if ip in allowed:
                    places[str(ip), port] = _written(ip, port, caller)
    for ip in sorted(observed, key=str):
        for port in ports:
            if not ip.is_loopback:
                places.setdefault((str(ip), port), _written(ip, port, caller))
    # Loopback proves least: such a place is tried last.
    ranked = sorted(places.items(), key=lambda place: place[0][0].startswith(("127.", "::1")))
    return [(host, port, text) for (host, port), text in ranked[:_MAX_DIALS]]


def judge(own: Sequence[str], findings: Sequence[Finding]) -> tuple[How, str]:
    """How a peer with these addresses is reached as far as others found, and why; no relay is considered."""
    if all(is_loopback(Multiaddr(text)) for text in own):
        return "local", "it listens on this machine only"
    for finding in findings:
        if outside := [text for text in finding.answered if not is_loopback(Multiaddr(text))]:
            place = f"dialled it at {outside[0].partition('/p2p/')[0]}"
            same = all(host.startswith(("127.", "::1")) for host in finding.observed)
            return "direct", f"{finding.asked} {place}{', from this same machine' if same else ''}"
    refuted = [finding for finding in findings if finding.observed]
    if refuted:
        seen = ", ".join(refuted[0].observed)
        return "outgoing", f"{refuted[0].asked} sees it at {seen} and cannot connect to it there"
    if findings:
        return "unknown", f"nobody could tell: {findings[0].error or f'{findings[0].asked} is not connected directly'}"
    return "unknown", "there is nobody to ask yet"


async def reachability(endpoint: Reachable, contacts: Sequence[PeerId], clock: Clock) -> Reach:
    """Find out how this peer is reached, and take a relay when that is the only way. Ends within 3 s.

    To be called once, after entering the run; ``contacts`` are the peers of the invite. A relay that was taken is
    kept, or replaced, until the endpoint closes, so the endpoint's ``addresses`` may change: announce them from
    there. Never raises a PeerError.
    """
    ends = clock.monotonic() + BUDGET_S
    asked = [peer for peer in contacts if peer != endpoint.peer][:_MAX_ASKED]
    own = [text for text in endpoint.addresses if not is_relayed(Multiaddr(text))]
    how, detail = judge(own, ())
    if endpoint.behind_nat:
        how, detail = "outgoing", "it was told that nobody can dial it"
    elif how != "local" and asked:
        findings = await asyncio.gather(*(_ask(endpoint, peer, own) for peer in asked))
        how, detail = judge(own, findings)
        endpoint.also_at([text for finding in findings for text in finding.answered])
    if how == "outgoing" or (how == "unknown" and asked):
        problem = "it did not answer in time"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(ends - clock.monotonic(), 0.1)):
                problem = await endpoint.take_relay(asked)
        if endpoint.relays:
            how, detail = "relayed", f"through {', '.join(endpoint.relays)}: {detail}"
        else:
            detail = f"{detail}; no relay: {problem}"
    return Reach(how, detail, endpoint.addresses)


async def _ask(endpoint: Endpoint, peer: PeerId, own: Sequence[str]) -> Finding:
    try:
        found, _ = await endpoint.call(peer, DIALBACK, AskDialback(addresses=tuple(own)), Dialback, timeout_s=_ASK_S)
    except PeerError as error:
        return Finding(peer, error=str(error))
    # It names our own addresses: what it made up is not ours to announce.
    ports = {tcp_port_of(Multiaddr(text)) for text in own}
    believed = [text for text in found.answered if _is_ours(text, endpoint.peer, ports)]
    return Finding(peer, found.observed, tuple(believed))


def _is_ours(text: str, me: PeerId, ports: set[int | None]) -> bool:
    try:
        address, named = split_peer(Multiaddr(text))
    except (ValueError, LookupError, multiaddr.exceptions.Error):
        return False
    port = tcp_port_of(address)
    return named == me and port is not None and port in ports


async def _greets(host: str, port: int) -> bool:
    """Whether a libp2p listener answers there within 0.8 s. Sends nothing."""
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(_GREETING)) == _GREETING
            finally:
                writer.close()
    except (OSError, EOFError):
        return False


def _written(ip: _Ip, port: int, peer: PeerId) -> str:
    return f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer}"
