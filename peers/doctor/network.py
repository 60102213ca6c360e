"""What ``swarm doctor`` asks of a run: as a guest, with an identity made for this, announced nowhere, gone afterwards.

Nothing here judges; :mod:`peers.doctor.judge` does. Imports hivemind: seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from statistics import median
from typing import Any

from multiaddr import Multiaddr

from peers.invites.invite import Contacts
from peers.invites.showing import show
from peers.manifest_file import manifest_sent
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.consensus.records import CloseRecord
from swarm.errors import PeerError, Unreachable
from swarm.ids import PeerId
from swarm.membership.contact import NO_CONTACT, ask_standing, cannot_reach, find_run
from swarm.network.addresses import by_peer, ip_of, is_loopback, is_relayed, parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.reach.probe import ProbedLink, probe_link
from swarm.network.reach.reachability import Reach, find_relay, reachability
from swarm.step.observe_messages import STANDING, START, RunStanding, StandingRequest, StartRequest

CALL_S = 3.0
TRIPS = 7
"""Calls of which the median is the round trip."""
WATCH_EVERY_S, ENOUGH_STEPS = 0.2, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """A run, as its ``contact`` sees it: the newest record is its ``head``, None before the run has begun."""

    manifest: Manifest
    contact: PeerId
    standing: RunStanding
    head: CloseRecord | None

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Return who takes part, the contact first; the contact alone before there is a roster."""
        known = () if self.head is None else self.head.members.peers
        return tuple(dict.fromkeys((self.contact, *known)))


class RunGuest:
    """Asks through a guest's endpoint. Get it from :func:`guest_of`."""

    def __init__(self, endpoint: LibP2PEndpoint, clock: Clock, seen: RunSeen, told: Contacts) -> None:
        self.endpoint, self.seen, self.told = endpoint, seen, told
        self._clock = clock

    async def round_trip(self) -> float:
        """Return the median of the seconds of some calls to the contact. Raises a PeerError when it does not answer."""
        took = []
        for _ in range(TRIPS):
            began = self._clock.monotonic()
            await self.endpoint.call(self.seen.contact, STANDING, StandingRequest(), timeout_s=CALL_S)
            took.append(self._clock.monotonic() - began)
        return median(took)

    async def link(self, within_s: float) -> ProbedLink:
        """Measure the link with the contact."""
        return await probe_link(self.endpoint, self.seen.contact, self._clock, within_s=within_s)

    async def reach(self) -> Reach:
        """Return how others reach this machine, as :func:`~swarm.network.reach.reachability.reachability` finds out
        for a peer that joins. Takes some seconds."""
        members = self.seen.members
        found = await reachability(self.endpoint, members[:3], self._clock)
        return await find_relay(self.endpoint, found, members[3:])

    async def way_to_contact(self) -> str:
        """Return how the contact is called: "direct", "relayed", "hole-punched" (directly, and all that was known of
        it were addresses of relays), or "unknown"."""
        try:
            kind = await self.endpoint.link_kind(self.seen.contact)
        except PeerError:
            return "unknown"
        known = [a for a in self.told.addresses if a.endswith(self.seen.contact)]
        through = known and all(is_relayed(Multiaddr(address)) for address in known)
        return "hole-punched" if kind == "direct" and through else kind

    def all_near(self) -> bool:
        """Return whether, by their addresses, the contact and all members are on this machine."""
        here = {ip_address(one.address.partition("%")[0]) for one in _interfaces()}
        told = [self.told.addresses]
        if self.seen.head is not None:
            told += [member.addresses for member in self.seen.head.roster]
        return all(_is_near(addresses, here) for addresses in told)

    async def watch_steps(self, until: float) -> list[tuple[float, int]]:
        """Return when, by our steady clock, which step was seen closed; the first is where it stood. Ends ``until``
        then at the latest, or when it has seen some steps, or at once where the run has not begun."""
        seen: list[tuple[float, int]] = []
        while self.seen.head is not None and len(seen) < ENOUGH_STEPS and self._clock.monotonic() < until:
            with contextlib.suppress(PeerError):
                standing, _ = await self.endpoint.call(
                    self.seen.contact, STANDING, StandingRequest(), timeout_s=WATCH_EVERY_S * 5
                )
                if standing.closed is not None and (not seen or standing.closed > seen[-1][1]):
                    seen.append((self._clock.monotonic(), standing.closed))
            await self._clock.sleep(WATCH_EVERY_S)
        return seen


def _interfaces() -> Iterator[Any]:
    """The IP addresses of this machine's interfaces."""
    import psutil

    for addresses in psutil.net_if_addrs().values():
        yield from (one for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))


def _is_near(addresses: Sequence[str], here: Set[IPv4Address | IPv6Address]) -> bool:
    outward = [address for text in addresses if not is_loopback(address := Multiaddr(text))]
    return not outward or any(ip_of(address) in here for address in outward)


@contextlib.asynccontextmanager
async def guest_of(
    contacts: Contacts, reached: Sequence[str], listen: Sequence[str], clock: Clock, *, startup_s: float
) -> AsyncIterator[RunGuest]:
    """Be a guest of a run.

    Args:
        contacts: Those of the invite, and the run that it names.
        reached: The addresses of them that are dialled.
        listen: Where to listen meanwhile: what others are to reach.
        clock: Ours.
        startup_s: For the daemon to come up, at most.

    Raises:
        RunEnded: No contact answers, is of that run, or of this version.
        Incompatible: The manifest is none for this version.
        PeerError: The contact is gone again.
        ConfigError: It cannot be listened there.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-doctor-") as scratch:
        at = tuple(parse_address(text, key="INVITE") for text in reached)
        endpoint = await _open(Path(scratch), at, listen, clock, startup_s)
        try:
            contact, manifest, _ = await find_run(endpoint, by_peer(at), contacts.run, manifest_sent)
            show(endpoint, contacts)
            await endpoint.enter(manifest.run_id)
            seen = await _look(endpoint, clock, contact, manifest)
            yield RunGuest(endpoint, clock, seen, contacts)
        finally:
            await asyncio.shield(endpoint.close())


async def _open(
    scratch: Path, at: Sequence[Multiaddr], listen: Sequence[str], clock: Clock, startup_s: float
) -> LibP2PEndpoint:
    config = EndpointConfig(
        run_dir=scratch,
        listen=tuple(parse_address(text, key="--listen", use="listen") for text in listen),
        bootstrap=tuple(at),
        startup_timeout_s=startup_s,
    )
    try:
        return await LibP2PEndpoint.open(config, load_or_create(scratch / "identity.key"), clock)
    except Unreachable as error:
        if NO_CONTACT in error.reason:
            raise cannot_reach([str(address) for address in at]) from error
        raise


async def _look(endpoint: LibP2PEndpoint, clock: Clock, contact: PeerId, manifest: Manifest) -> RunSeen:
    """Ask where the run stands and who takes part, whose addresses are known from then on."""
    standing = await ask_standing(endpoint, clock, contact)
    head: CloseRecord | None = None
    if standing.closed is not None:
        answer, _ = await endpoint.call(contact, START, StartRequest(part=None), timeout_s=CALL_S)
        head = answer.record
        for member in head.roster:
            endpoint.learn(PeerId(member.peer), member.addresses)
    return RunSeen(manifest=manifest, contact=contact, standing=standing, head=head)
