"""What a peer believes of what others tell it about itself, and how often it lets them ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from swarm.clock import SystemClock
from swarm.ids import PeerId
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.reach.presence import Presence
from swarm.network.reach.reach_service import Turns
from swarm.network.reach.reachability import Dialback, Reach, Reachable, believed, find_relay
from swarm.network.reach.standing import KnownRelays
from swarm.security.signing import PrivateIdentity

ME, OTHER = PrivateIdentity.generate().peer, PrivateIdentity.generate().peer
NOBODY = cast(AttachedP2P, None)


def at(place: str, peer: PeerId = ME) -> str:
    host, _, port = place.rpartition(":")
    return f"/ip4/{host}/tcp/{port}/p2p/{peer}"


OWN = (at("10.0.0.7:4000"), at("127.0.0.1:4000"))


def told(*answered: str, seen: Sequence[str] = ()) -> tuple[str, ...]:
    return believed(ME, OWN, Dialback(observed=tuple(seen), answered=answered))


def test_addresses_found_by_others_are_believed_where_we_were_seen_and_only_two() -> None:
    assert told(at("203.0.113.9:4000"), seen=["203.0.113.9"]) == (at("203.0.113.9:4000"),)
    assert told(at("203.0.113.9:4000"), seen=["10.0.0.7"]) == ()
    assert told(at("203.0.113.9:80"), at("203.0.113.9:4000", OTHER), "/nonsense", seen=["203.0.113.9"]) == ()
    made_up = [at(f"198.51.100.{n}:4000") for n in range(1, 9)]
    assert told(*made_up, seen=[f"198.51.100.{n}" for n in range(1, 9)]) == tuple(made_up[:2])
    assert told(OWN[0], OWN[0], *made_up[:1]) == OWN[:1], "our own, wherever it saw us"


def presence_of(*own: str) -> Presence:
    made = Presence(NOBODY, own, SystemClock(), None, KnownRelays())
    made._virtual = frozenset()
    return made


def test_addresses_found_by_others_never_displace_our_own() -> None:
    presence = presence_of(*OWN)
    presence.also_at([OWN[0], at("203.0.113.9:4000"), at("203.0.113.9:4000")])
    assert presence.addresses == (OWN[0], at("203.0.113.9:4000"), OWN[1])
    presence.also_at([at(f"198.51.100.{n}:4000") for n in range(1, 9)])
    assert presence.addresses == (OWN[0], at("203.0.113.9:4000"), at("198.51.100.1:4000"), OWN[1])

    own = [*(at(f"10.0.0.{n}:4000") for n in range(1, 8)), OWN[1]]
    full = presence_of(*own)
    full.also_at([at("203.0.113.9:4000")])
    assert full.addresses == tuple(own)


def test_turns_are_a_few_a_minute_for_each_peer() -> None:
    turns = Turns(times=3, within_s=60, peers=2)
    assert [turns.take(ME, now) for now in (0, 10, 20, 30, 59)] == [True, True, True, False, False]
    assert turns.take(OTHER, 59)
    assert [turns.take(ME, now) for now in (61, 62, 71)] == [True, False, True]
    third = PrivateIdentity.generate().peer
    assert not turns.take(third, 72), "it remembers two"
    assert turns.take(third, 72 + 60)
    assert len(turns._asked) == 1


class _Endpoint:
    """``found`` is the relay it will have when it looks for one."""

    def __init__(self, *found: PeerId) -> None:
        self.relays: tuple[PeerId, ...] = ()
        self.addresses, self.asked = OWN, list[Any]()
        self._found = found

    async def take_relay(self, candidates: Sequence[PeerId]) -> str:
        """See Reachable."""
        self.asked.append(candidates)
        self.relays = self._found
        return "" if self._found else "all are busy"


@pytest.mark.parametrize("how", ["outgoing", "unknown"])
async def test_peer_that_nobody_can_call_finds_a_relay_among_those_it_learned_of(how: Any) -> None:
    endpoint = _Endpoint()
    reach = await find_relay(cast(Reachable, endpoint), Reach(how, "why", ()), [OTHER])
    again = await find_relay(cast(Reachable, endpoint), reach, [OTHER])
    assert again == reach == Reach(how, "why; no relay: all are busy", OWN)
    assert again.nobody_can_call
    endpoint._found = (OTHER,)
    found = await find_relay(cast(Reachable, endpoint), again, [OTHER])
    assert (found.how, found.detail, found.nobody_can_call) == ("relayed", f"through {OTHER}: why", False)


@pytest.mark.parametrize("how", ["direct", "relayed", "local"])
async def test_peer_that_can_be_called_asks_nobody_to_relay(how: Any) -> None:
    endpoint, reach = _Endpoint(OTHER), Reach(how, "why", OWN)
    assert await find_relay(cast(Reachable, endpoint), reach, [OTHER]) is reach
    assert not endpoint.asked
