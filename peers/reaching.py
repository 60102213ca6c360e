"""How others reach one peer, from opening its endpoint on: the relays that it was told of, what is said of a change.

Part of :mod:`peers.node`, which calls it in this order: :func:`open_endpoint`, :meth:`OwnReach.find` once the run is
entered, :meth:`OwnReach.be_reachable` whenever others are about to count on this peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence

from multiaddr import Multiaddr

from peers.doctor.contacts import probe_addresses
from peers.settings import PeerSettings
from peers.sharing.limit_options import rate_given
from swarm.clock import Clock
from swarm.errors import Advice, Ending, RunEnded, Unreachable
from swarm.events import EventSink, Waiting
from swarm.ids import PeerId, RunId
from swarm.membership.contact import (
    AWAY_S,
    CONTACT_PAUSE_S,
    CONTACT_TRIES,
    GOES_ON,
    LONGEST_PAUSE_S,
    NO_CONTACT,
    cannot_reach,
)
from swarm.membership.status import PeerStatus
from swarm.network.addresses import by_peer, name_of, parse_address, some_of
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import StoredIdentity
from swarm.network.reach.leases import RENEW_S
from swarm.network.reach.reachability import Reach, find_relay, reachability, with_other_relays
from swarm.network.reach.standing import relays_on_the_way
from swarm.network.rpc.meter import RateLimits
from swarm.waiting import ExponentialBackoff

logger = logging.getLogger(__name__)
BACK_S = 900.0
"""How long who comes back to a run tries to find anybody of it."""


def endpoint_config(settings: PeerSettings) -> EndpointConfig:
    """Return how a peer with these settings is on the network. Raises ConfigError for an address that is none.

    Relays are those that it was told of, and those through which the addresses of its contacts lead. A founder that
    was told of some is behind NAT: nobody is asked to dial it, also when it comes back to its run.
    """
    options = settings.options
    bootstrap = tuple(parse_address(text, key="bootstrap") for text in settings.bootstrap)
    through = tuple(parse_address(text, key="through") for text in options.through)
    return EndpointConfig(
        run_dir=settings.home,
        listen=tuple(parse_address(a, key="listen", use="listen") for a in options.listen),
        announce=tuple(parse_address(a, key="announce", use="announce") for a in options.announce),
        bootstrap=bootstrap,
        relays=tuple(dict.fromkeys((*through, *relays_on_the_way(bootstrap)))),
        relay=options.relay,
        rates=RateLimits(
            upload=rate_given(options.max_upload),
            download=rate_given(options.max_download),
        ),
        behind_nat=settings.role == "bootstrap" and bool(through),
    )


class Tries:
    """How often the peers that a peer knows are asked before it is in the run: some times, and for BACK_S where it was
    in the run before, since what kept it away may keep them, too."""

    def __init__(self, settings: PeerSettings, clock: Clock, events: EventSink) -> None:
        self._returns, self._clock, self._events = settings.returns, clock, events
        self._left, self._until = CONTACT_TRIES - 1, clock.monotonic() + BACK_S
        self._pauses = ExponentialBackoff(CONTACT_PAUSE_S, LONGEST_PAUSE_S if settings.returns else CONTACT_PAUSE_S)

    async def again(self) -> bool:
        """Return whether to ask once more, after a pause that is said."""
        self._left -= 1
        if self._clock.monotonic() >= self._until if self._returns else self._left < 0:
            return False
        what = "one of the peers that it knows to answer"
        if self._returns:
            what += f", for {BACK_S / 60:.0f} minutes at most; next: swarm status, on their machines: do they run?"
        self._events.emit(Waiting(what=what))
        await self._clock.sleep(self._pauses.pause_s())
        return True


async def open_endpoint(
    settings: PeerSettings, identity: StoredIdentity, clock: Clock, events: EventSink
) -> LibP2PEndpoint:
    """Open it, and try again where no contact answers yet. Raises RunEnded when none does, and as
    :meth:`LibP2PEndpoint.open`."""
    config, left = endpoint_config(settings), Tries(settings, clock, events)
    while True:
        try:
            return await LibP2PEndpoint.open(config, identity, clock, events)
        except Unreachable as error:
            # The daemon dials them itself at its start, and gives up when none answers.
            if NO_CONTACT not in error.reason:
                raise
            logger.info("no contact answers: %s", error)
            if not await left.again():
                raise await nobody_answers(config) from error


async def nobody_answers(config: EndpointConfig) -> RunEnded:
    """The error for contacts and relays none of which answers: a name without an address is the cause, where there is
    one, since nothing else would be noticed of it."""
    addresses = tuple(dict.fromkeys(map(str, (*config.bootstrap, *config.relays))))
    unknown = await names_without_address((*config.bootstrap, *config.relays))
    if unknown:
        name, why = next(iter(unknown.items()))
        return RunEnded(
            f"cannot reach {some_of(addresses)}: the name {name} has no address ({why})",
            Ending.UNREACHABLE,
            check=f"getent hosts {name}; is the name spelled as it should be, and does this machine's resolver work?",
            remedy="The same command again once the name is known, or another address of that machine in its place.",
        )
    probes = await probe_addresses(addresses)
    if mistaken := next((probe for probe in probes if probe.found), None):
        place = mistaken.address.rpartition("/p2p/")[0]
        return RunEnded(
            f"cannot reach {some_of(addresses)}: who listens at {place} has another id, {mistaken.found}",
            Ending.UNREACHABLE,
            check="is it, to its end, an address that the peer prints? swarm status, on its machine",
            remedy=f"The same command, if that is the peer that you mean, with {mistaken.corrected}",
        )
    if config.bootstrap:
        return cannot_reach(addresses)
    return RunEnded(
        f"cannot reach {some_of(addresses)}: no relay answers under that peer id",
        Ending.UNREACHABLE,
        check="is it, to its end, an address that the relay prints? swarm status, on its machine",
        remedy=Advice.RELAY_THERE,
    )


async def names_without_address(addresses: Sequence[Multiaddr]) -> Mapping[str, str]:
    """The domain names among these that cannot be looked up, and what the resolver says. Takes as long as it does."""
    families = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
    loop, found = asyncio.get_running_loop(), dict[str, str]()
    for address in addresses:
        kind = next(iter(address.protocols())).name
        name = name_of(address)
        if name is None or kind == "dnsaddr" or name in found:
            continue
        try:
            await loop.getaddrinfo(name, None, family=families.get(kind, 0), type=socket.SOCK_STREAM)
        except OSError as error:
            found[name] = str(error.strerror or error)
    return found


class OwnReach:
    """How others reach this peer now, told to its status and its events whenever that changes."""

    def __init__(self, endpoint: LibP2PEndpoint, clock: Clock, contact: PeerId | None) -> None:
        self._endpoint, self._clock, self._contact = endpoint, clock, contact
        self._now: Reach | None = None
        self._relayed = self._asked = False
        self._situation: PeerStatus | None = None

    async def find(self) -> None:
        """Find it out, once the run is entered, and take a relay where that is the only way."""
        contacts = [self._contact] if self._contact else []
        self._now = await reachability(self._endpoint, contacts, self._clock)

    def tell(self, situation: PeerStatus) -> None:
        """Say it there from now on, and when relays change."""
        self._situation = situation
        if self._now is not None:
            self._is(self._now)
        self._endpoint.when_relays_change(self._changed)

    async def be_reachable(self, through: Sequence[PeerId]) -> str:
        """See :class:`swarm.membership.roles.PeerContext`. A founder has nobody to ask, and is called by anyone who
        comes; who was dialled from this machine only asks again once it knows others. Asked once more, a peer whose
        relays are away waits for them, AWAY_S at most."""
        reach = self._now
        if reach is not None and (reach.how == "near" or (self._contact is None and reach.nobody_can_call)):
            reach = await self._asked_of(through, reach)
        if reach is None or not reach.nobody_can_call or self._contact is None:
            return ""
        waits = self._asked and (self._relayed or bool(self._endpoint.standing))
        until, self._asked = self._clock.monotonic() + (AWAY_S if waits else 0.0), True
        while (found := await find_relay(self._endpoint, reach, through)).nobody_can_call:
            self._is(found)
            if self._clock.monotonic() >= until:
                return found.detail
            if self._situation is not None:
                self._situation.wait_for(f"a relay to be called through ({found.detail}); {GOES_ON}")
            await self._clock.sleep(RENEW_S)
        self._is(found)
        return ""

    async def _asked_of(self, others: Sequence[PeerId], reach: Reach) -> Reach:
        """Return how some of these find that this peer is reached, of which ``reach`` is known; that again where they
        cannot tell more."""
        asked = [peer for peer in others if peer not in (self._endpoint.peer, self._contact)][:3]
        found = await reachability(self._endpoint, asked, self._clock)
        if found.how == "unknown" and reach.how == "near":
            return reach
        self._is(found)
        return found

    def _changed(self) -> None:
        if self._now is not None:
            found = with_other_relays(self._endpoint, self._now)
            if found != self._now:
                self._is(found)

    def _is(self, reach: Reach) -> None:
        self._now, self._relayed = reach, self._relayed or reach.how == "relayed"
        if self._situation is not None:
            self._situation.reached(reach.how, reach.detail, reach.addresses)


async def contacts_of(settings: PeerSettings, endpoint: LibP2PEndpoint, run: RunId | None) -> dict[PeerId, list[str]]:
    """The peers through which a run is found: those of the invite and, of a run that it names, those that its relays
    know. So an invite stays good as long as one peer of the run is reached through a relay that it leads through."""
    addresses = [parse_address(text, key="bootstrap") for text in settings.bootstrap]
    if run is not None and endpoint.standing:
        guests = await endpoint.guests(run)
        endpoint.learn_addresses([each for each in guests if str(each) not in settings.bootstrap])
        addresses += guests
    return by_peer(addresses)
