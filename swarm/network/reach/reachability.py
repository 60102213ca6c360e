"""Can others dial this peer? It asks those that it came to the run through, and if not, is called through a relay.

Every peer answers two questions of the other members of its run, *dial me back* and *relay for me*
(:mod:`swarm.network.reach.reach_service`). The daemon's own AutoNAT is not used for this: it looks at public addresses
only and needs a quarter of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

from multiaddr import Multiaddr
from pydantic import Field

from swarm.clock import Clock
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.addresses import ip_of, is_loopback, is_relayed, split_peer, tcp_port_of, told_address
from swarm.network.discovery.records import AddressText
from swarm.network.protocols import RELAY_PREFIX, Endpoint, Rpc
from swarm.schema import Message

How = Literal["direct", "relayed", "local", "near", "outgoing", "unknown"]
LinkKind = Literal["direct", "relayed", "unknown"]

BUDGET_S = 3.0
"""How long :func:`reachability` takes at most."""

_ASK_S = 2.0
_MAX_ASKED = 3
_MAX_BELIEVED = 2
"""Addresses that one contact may tell us of: one for each family of the internet protocol."""

Addresses = Annotated[tuple[AddressText, ...], Field(max_length=8)]


class AskDialback(Message):
    """Try to connect to me. ``addresses`` are where the caller listens; only those of the address it calls from
    count."""

    addresses: Addresses


class Dialback(Message):
    """``observed`` are the IP addresses that the caller was seen to call from, ``answered`` where it could be
    reached. ``beside``: it called from this very machine, and what can be dialled from here need not be from others."""

    observed: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=8)]
    answered: Addresses
    beside: bool = False


class AskReserve(Message):
    """Let others reach me through you."""


class Reserved(Message):
    """It holds for ``seconds``; ``addresses`` are the relay's."""

    seconds: Annotated[float, Field(gt=0, le=3600)]
    addresses: Addresses


class Withdrawn(Message):
    """I relay for you no longer than until I leave, which is soon: find another relay."""


DIALBACK = Rpc("reach/1/dialback", AskDialback, Dialback)
RESERVE = Rpc("reach/1/reserve", AskReserve, Reserved)
WITHDRAWN = Rpc("reach/1/withdrawn", Withdrawn, Withdrawn)
DIALBACK_FROM_OUTSIDE = Rpc(f"{RELAY_PREFIX}dialback", AskDialback, Dialback)
CLOSING = Rpc(f"{RELAY_PREFIX}closing", Withdrawn, Withdrawn)
"""As the first and the last, of a relay that belongs to no run (:mod:`swarm.network.reach.standing`)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one contact, or ``error`` when it could not be asked. A contact reached through a relay has
    ``observed`` nothing and cannot tell; nor can one ``beside`` us, on our machine."""

    asked: PeerId
    observed: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    beside: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """The way in which others reach this peer, the reason for believing it, and the addresses to tell them.

    ``direct``: somebody on another machine dialled it. ``relayed``: through another peer. ``local``: from this machine
    only. ``near``: from this machine, and nobody elsewhere has tried. ``outgoing``: not at all, it can only call
    others. ``unknown``: nobody could tell.
    """

    how: How
    detail: str
    addresses: tuple[str, ...]

    @property
    def nobody_can_call(self) -> bool:
        """True if, by all findings, this peer can only call others: it is not dialled and has no relay. Also
        of the first peer of a run, whom nobody has tried yet."""
        return self.how in ("outgoing", "unknown")


class Reachable(Endpoint, Protocol):
    """The interface of an endpoint for testing and changing its reachability."""

    @property
    def behind_nat(self) -> bool:
        """True if it is known that nobody can dial it."""

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Through whom it is reached now."""

    @property
    def standing(self) -> tuple[PeerId, ...]:
        """The relays that it was told of, which belong to no run."""

    @property
    def relay_problem(self) -> str:
        """Return what the last relay said that would not serve; "" where none did."""

    def also_at(self, addresses: Sequence[str]) -> None:
        """Announce addresses of our own that the daemon does not know of."""

    async def take_relay(self, candidates: Sequence[PeerId]) -> str:
        """Be reached through some of these from now on, and keep it so; what went wrong, "" when nothing did."""


def judge(own: Sequence[str], findings: Sequence[Finding]) -> tuple[How, str]:
    """Return the way in which a peer with these addresses is reached, by others' findings, and why; ignores relays.

    A peer of this machine is no witness. One that dialled it at an address of a private network shows that for this
    network only: who could not from elsewhere goes first.
    """
    if all(is_loopback(Multiaddr(text)) for text in own):
        return "local", "it listens on this machine only"
    witnesses = [finding for finding in findings if not finding.beside]
    dialled = {finding: _outward(finding.answered) for finding in witnesses if _outward(finding.answered)}
    refuted = [finding for finding in witnesses if finding.observed and finding not in dialled]
    public = [finding for finding, places in dialled.items() if (ip := ip_of(Multiaddr(places[0]))) and ip.is_global]
    if public or (dialled and not refuted):
        best = (public or list(dialled))[0]
        return "direct", f"{best.asked} dialled it at {dialled[best][0].partition('/p2p/')[0]}"
    if refuted:
        seen = ", ".join(refuted[0].observed)
        return "outgoing", f"{refuted[0].asked} sees it at {seen} and cannot connect to it there"
    if beside := [finding.asked for finding in findings if finding.beside and finding.answered]:
        return "near", f"{', '.join(beside)} dialled it, from this same machine; nobody on another has tried"
    if findings:
        return "unknown", f"nobody could tell: {findings[0].error or f'{findings[0].asked} is not connected directly'}"
    return "unknown", "there is nobody to ask yet"


def _outward(addresses: Sequence[str]) -> list[str]:
    """Those of other than this machine, of public networks first."""
    found = [text for text in addresses if not is_loopback(Multiaddr(text))]
    return sorted(found, key=lambda text: not ((ip := ip_of(Multiaddr(text))) and ip.is_global))


async def reachability(endpoint: Reachable, contacts: Sequence[PeerId], clock: Clock) -> Reach:
    """Find out how this peer is reached, and take a relay when that is the only way. Ends within 3 s.

    To be called once, after entering the run; ``contacts`` are the peers of the invite. A relay that was taken is
    kept, or replaced, until the endpoint closes, so the endpoint's ``addresses`` may change: announce them from
    there. Never raises a PeerError.
    """
    ends = clock.monotonic() + BUDGET_S
    asked = [peer for peer in (*endpoint.standing, *contacts) if peer != endpoint.peer][:_MAX_ASKED]
    own = [text for text in endpoint.addresses if not is_relayed(Multiaddr(text))]
    how, detail = judge(own, ())
    if endpoint.behind_nat:
        how, detail = "outgoing", "it was told that nobody can dial it"
    elif how != "local" and asked:
        findings = await asyncio.gather(*(ask_how_reached(endpoint, peer, own) for peer in asked))
        how, detail = judge(own, findings)
        endpoint.also_at([text for finding in findings for text in finding.answered])
    reach = Reach(how, detail, endpoint.addresses)
    if how == "unknown" and not asked:
        return reach
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(ends - clock.monotonic(), 0.1)):
            return await find_relay(endpoint, reach, tuple(dict.fromkeys((*endpoint.standing, *asked))))
    return _with_relays(endpoint, reach, "it did not answer in time")


async def find_relay(endpoint: Reachable, reach: Reach, candidates: Sequence[PeerId]) -> Reach:
    """Ask these peers too to relay, if nobody can call this peer otherwise, and return how it is reached then.

    For later than :func:`reachability`, when more peers are known; the best candidates first. May be called as often
    as one likes: it asks nobody when there is no need, else 12 peers at most, with a second for every four. A relay
    that was found meanwhile counts as well. Never raises a PeerError.
    """
    if not reach.nobody_can_call:
        return reach
    return _with_relays(endpoint, reach, await endpoint.take_relay(candidates))


def with_other_relays(endpoint: Reachable, reach: Reach) -> Reach:
    """Return how a peer is reached whose relays have changed since ``reach``: through those of now, or not at all. Then
    relays are asked again every 10 s."""
    if reach.how not in ("relayed", "outgoing", "unknown"):
        return reach
    how: How = "outgoing" if reach.how == "relayed" else reach.how
    cause = reach.detail.partition(": ")[2] if reach.how == "relayed" else reach.detail
    return _with_relays(endpoint, Reach(how, cause, reach.addresses), f"{endpoint.relay_problem}; asked again")


def _with_relays(endpoint: Reachable, reach: Reach, problem: str) -> Reach:
    cause = reach.detail.partition("; no relay: ")[0]
    if endpoint.relays:
        return Reach("relayed", f"through {', '.join(endpoint.relays)}: {cause}", endpoint.addresses)
    return replace(reach, detail=f"{cause}; no relay: {problem}", addresses=endpoint.addresses)


async def ask_how_reached(endpoint: Reachable, peer: PeerId, own: Sequence[str]) -> Finding:
    """Have one peer, or relay, dial this one back at its ``own`` addresses. Takes 2 s at most; never raises a
    PeerError."""
    rpc = DIALBACK_FROM_OUTSIDE if peer in endpoint.standing else DIALBACK
    try:
        found, _ = await endpoint.call(peer, rpc, AskDialback(addresses=tuple(own)), timeout_s=_ASK_S)
    except PeerError as error:
        return Finding(peer, error=str(error))
    return Finding(peer, found.observed, believed(endpoint.peer, own, found), beside=found.beside)


def believed(me: PeerId, own: Sequence[str], found: Dialback) -> tuple[str, ...]:
    """Return the addresses of an answer that may be ours: those that we told, and at most two more, at our ports and at
    IP addresses from which we were seen to call. That these two are not made up cannot be known."""
    ports = {tcp_port_of(Multiaddr(text)) for text in own} - {None}
    ours = [text for text in found.answered if text in own]
    others: list[str] = []
    for text in found.answered:
        if (told := told_address(text)) is not None:
            address, named = split_peer(told)
            seen = str(ip_of(address)) in found.observed
            if named == me and seen and tcp_port_of(address) in ports and text not in (*own, *others):
                others.append(text)
    return (*dict.fromkeys(ours), *others[:_MAX_BELIEVED])
