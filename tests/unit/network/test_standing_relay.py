"""A relay of no run: whom it gives a slot, what it tells of others, how it bounds bytes; and how a peer asks it."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, cast

import pytest
from multiaddr import Multiaddr

from swarm.errors import Busy, PeerError, Refused
from swarm.ids import PeerId, RunId
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.libp2p.splice import RateLimiter, Splice, SpliceLimits
from swarm.network.protocols import Endpoint, Rpc
from swarm.network.reach.reach_service import ReachService
from swarm.network.reach.reachability import CLOSING, RESERVE, Reserved
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import RESERVED_S, RelayLimits
from swarm.network.reach.standing import (
    GUESTS,
    SLOT,
    AskGuests,
    AskSlot,
    Guests,
    KnownRelays,
    StandingLimits,
    StandingRelay,
    relays_on_the_way,
    tag_of,
)
from swarm.security.signing import PrivateIdentity
from tests.harness.rigs.network import DialClock

R, *PEERS = [PrivateIdentity.generate().peer for _ in range(8)]
RUN, OTHER = RunId("ab" * 32), RunId("cd" * 32)
AT = f"/dns4/relay.example.org/tcp/4001/p2p/{R}"


class _Reach(ReachService):
    """One that sees each peer call from where the test says."""

    def __init__(self, relay: Relay, clock: DialClock, seen: dict[PeerId, str]) -> None:
        super().__init__(cast(AttachedP2P, None), relay, clock, lambda: (AT,), lambda peer: None, lambda: False)
        self._seen = seen

    async def observed(self, caller: PeerId) -> set[IPv4Address | IPv6Address]:
        """Its one address."""
        return {ip_address(self._seen.get(caller, "192.0.2.1"))}


class Played:
    """A relay without a daemon."""

    def __init__(self, *, runs: Sequence[RunId] = (), slots: int = 4, per_host: int = 4, **seen: str) -> None:
        self.clock = DialClock(100.0)
        limits = RelayLimits(reservations=slots, stranger_reservations=slots)
        self.relay = Relay(cast(AttachedP2P, None), self.clock, limits)
        places = {PEERS[int(name[1:])]: ip for name, ip in seen.items()}
        reach = _Reach(self.relay, self.clock, places)
        standing = StandingLimits(slots=limits, slots_per_host=per_host, runs=frozenset(runs))
        self.standing = StandingRelay(reach, self.relay, standing)
        self.methods = {method.rpc: method for method in self.standing.methods()}

    async def slot(self, peer: PeerId, run: RunId = RUN) -> Reserved:
        """Ask for one."""
        answer = await self.methods[SLOT].handle(peer, AskSlot(tag=tag_of(run)), cast(Any, None))
        assert isinstance(answer.body, Reserved)
        return answer.body

    async def guests(self, peer: PeerId, run: RunId = RUN) -> tuple[str, ...]:
        """Who else is there."""
        answer = await self.methods[GUESTS].handle(peer, AskGuests(tag=tag_of(run)), cast(Any, None))
        assert isinstance(answer.body, Guests)
        return answer.body.peers


async def test_relay_tells_the_peers_of_a_run_of_each_other_and_of_no_other_run() -> None:
    played = Played()
    assert (await played.slot(PEERS[0])).addresses == (AT,)
    await played.slot(PEERS[1])
    await played.slot(PEERS[2], OTHER)
    await played.slot(PEERS[0])
    assert await played.guests(PEERS[3]) == (PEERS[0], PEERS[1]), "who renewed last comes first"
    assert await played.guests(PEERS[1]) == (PEERS[0],)
    assert await played.guests(PEERS[3], OTHER) == (PEERS[2],)
    assert RUN not in tag_of(RUN)
    figures = played.standing.figures()
    assert (figures.slots, figures.runs, figures.circuits) == (3, 2, 0)
    played.clock.now += RESERVED_S + 1
    assert await played.guests(PEERS[3]) == ()
    assert played.standing.figures().slots == 0


async def test_relay_of_some_runs_refuses_others_and_counts_it() -> None:
    played = Played(runs=[RUN])
    await played.slot(PEERS[0])
    with pytest.raises(Refused, match="does not serve that run: it was started for others"):
        await played.slot(PEERS[1], OTHER)
    assert played.standing.figures().refused == 1


async def test_relay_is_full_for_all_or_for_one_address_and_who_has_a_slot_keeps_it() -> None:
    played = Played(slots=3, per_host=2, p2="198.51.100.7", p3="198.51.100.8", p4="2001:db8::1", p5="2001:db8::2")
    for peer in PEERS[:2]:
        await played.slot(peer)
    await played.slot(PEERS[0])
    with pytest.raises(Busy, match="2 peers of your address already"):
        await played.slot(PEERS[6])
    await played.slot(PEERS[2])
    with pytest.raises(Busy, match="serves 3 peers already"):
        await played.slot(PEERS[3])
    await played.slot(PEERS[2])
    assert played.standing.figures().refused == 2
    sixes = Played(per_host=1, p4="2001:db8::1", p5="2001:db8::2")
    await sixes.slot(PEERS[4])
    with pytest.raises(Busy, match="of your address"):
        await sixes.slot(PEERS[5])  # one network of IPv6 is one host: it has 2^64 addresses to choose from


async def test_relay_that_closes_tells_those_with_a_slot_and_gives_no_more() -> None:
    played, told = Played(), list[PeerId]()

    class _Teller:
        async def notify(self, target: PeerId, rpc: Rpc[Any, Any], body: object, *, timeout_s: float) -> None:
            assert rpc is CLOSING
            told.append(target)
            raise PeerError("gone")

    await played.slot(PEERS[0])
    await played.standing.close(cast(Endpoint, _Teller()))
    assert told == [PEERS[0]]
    with pytest.raises(Refused, match="about to leave"):
        await played.slot(PEERS[1])


async def test_circuits_share_the_rate_of_all_and_that_of_a_peer() -> None:
    clock = DialClock(100.0)
    limits = RelayLimits(bytes_per_s=1000.0, bytes_per_s_of_peer=500.0)
    relay = Relay(cast(AttachedP2P, None), clock, limits)
    first, second = relay._shared(PEERS[0], PEERS[1]), relay._shared(PEERS[0], PEERS[2])
    assert first[0] is second[0], "one bucket for all"
    assert len({id(pace) for pace in (*first[1:], *second[1:])}) == 4, "no circuit is there any more: made anew"
    bounds = SpliceLimits(bounded=lambda: False, bytes_per_s=1.0, idle_s=1.0, shared=[RateLimiter(500.0, 100.0)])
    splice = Splice(bounds, clock, lambda size: None)
    assert splice._wait_s(1000) == 0.0, "two seconds are saved up"
    assert splice._wait_s(1000) == 2.0


def test_relays_on_the_way_are_those_of_circuits_with_their_host() -> None:
    circuit = f"{AT}/p2p-circuit/p2p/{PEERS[0]}"
    through_a_name_alone = f"/p2p/{R}/p2p-circuit/p2p/{PEERS[0]}"
    direct = f"/ip6/2001:db8::1/tcp/4001/p2p/{PEERS[1]}"
    assert relays_on_the_way([Multiaddr(text) for text in (circuit, circuit, through_a_name_alone, direct)]) == (
        Multiaddr(AT),
    )


class _Asked:
    """An endpoint whose calls answer as the test says: an answer, or an error, by method."""

    peer = PEERS[0]

    def __init__(self, answers: dict[Rpc[Any, Any], Any]) -> None:
        self.answers, self.asked = answers, list[Rpc[Any, Any]]()

    async def call(self, target: PeerId, rpc: Rpc[Any, Any], body: object, *, timeout_s: float) -> Any:
        """The answer to that method."""
        self.asked.append(rpc)
        answer = self.answers[rpc]
        if isinstance(answer, Exception):
            raise answer
        return answer, memoryview(b"")


async def test_relay_is_asked_under_the_public_protocol_and_a_member_of_the_run_under_the_runs() -> None:
    inside = f"/ip4/10.0.0.5/tcp/4001/p2p/{R}"
    given = Reserved(seconds=RESERVED_S, addresses=(inside,))
    known = KnownRelays({R: (AT,)})
    endpoint = _Asked({SLOT: given, RESERVE: given})
    found = await known.reserve(cast(Endpoint, endpoint), R, RUN)
    assert found.addresses == (AT, inside), "where it was dialled comes first: it may not know its own public address"
    assert endpoint.asked == [SLOT]
    await known.reserve(cast(Endpoint, endpoint), PEERS[1], RUN)
    assert endpoint.asked == [SLOT, RESERVE]


async def test_relay_that_is_a_member_of_the_run_is_asked_as_one_and_a_refusal_is_told_as_it_was() -> None:
    given = Reserved(seconds=RESERVED_S, addresses=(AT,))
    known = KnownRelays({R: (AT,)})
    member = _Asked({SLOT: Refused("no method 'relay/1/slot' here"), RESERVE: given})
    assert await known.reserve(cast(Endpoint, member), R, RUN) == given
    closed = _Asked({SLOT: Refused("this relay does not serve that run"), RESERVE: PeerError("no such protocol")})
    with pytest.raises(Refused, match="does not serve that run"):
        await known.reserve(cast(Endpoint, closed), R, RUN)


async def test_guests_of_a_run_are_told_as_circuits_and_a_silent_relay_costs_nothing() -> None:
    known = KnownRelays({R: (AT,), PEERS[3]: (f"/ip4/192.0.2.3/tcp/1/p2p/{PEERS[3]}",)})
    endpoint = _Asked({GUESTS: Guests(peers=(PEERS[1],))})
    found = await known.guests(cast(Endpoint, endpoint), RUN)
    assert str(found[0]) == f"{AT}/p2p-circuit/p2p/{PEERS[1]}"
    assert len(found) == 2
    assert await known.guests(cast(Endpoint, _Asked({GUESTS: PeerError("gone")})), RUN) == []
