"""Which of its addresses a peer tells others, and in which order."""

from __future__ import annotations

from typing import get_args

import pytest
from multiaddr import Multiaddr

from swarm.errors import ConfigError
from swarm.network.addresses import (
    Use,
    most_useful,
    parse_address,
    told_address,
)
from swarm.network.libp2p.dialling import Hints
from swarm.network.reach.leases import circuits
from swarm.security.signing import PrivateIdentity

ME, RELAY = (PrivateIdentity(bytes([n]) * 32).peer for n in (7, 8))
GLOBAL, LAN, LOOPBACK = "/ip4/8.8.4.4/tcp/5", "/ip4/192.168.1.2/tcp/5", "/ip4/127.0.0.1/tcp/5"
LAN6, DOCKER, QUIC = "/ip6/fd00::1/tcp/5", "/ip4/172.17.0.1/tcp/5", "/ip4/8.8.4.4/udp/5/quic-v1"
NAME = "/dns4/peer.example/tcp/5"
RELAYED = f"/ip4/8.8.4.4/tcp/6/p2p/{RELAY}/p2p-circuit"


def ordered(*texts: str) -> list[str]:
    return [str(address) for address in most_useful(map(Multiaddr, texts), frozenset({"172.17.0.1"}))]


def test_addresses_are_told_with_the_most_useful_first() -> None:
    expected = [RELAYED, GLOBAL, NAME, QUIC, LAN, LAN6, DOCKER, LOOPBACK]
    assert ordered(*reversed(expected)) == [RELAYED, NAME, GLOBAL, QUIC, LAN, LAN6, DOCKER, LOOPBACK]


def test_addresses_are_told_once_and_eight_at_most_with_one_for_the_same_machine() -> None:
    many = [f"/ip4/10.0.0.{number}/tcp/5" for number in range(1, 20)]
    told = ordered(LOOPBACK, "/ip4/127.0.0.2/tcp/5", *many, *many)
    assert told == [*many[:7], LOOPBACK]
    assert ordered() == []


def test_circuits_go_through_what_the_relay_tells_of_itself_only() -> None:
    other = PrivateIdentity.generate().peer
    told = (
        "nonsense",
        LAN,  # names no peer
        f"{LAN}/p2p/{other}",
        f"{RELAYED}/p2p/{RELAY}",
        f"{LOOPBACK}/p2p/{RELAY}",
        f"{LAN}/p2p/{RELAY}",
        f"{GLOBAL}/p2p/{RELAY}",
    )
    expected = [f"{GLOBAL}/p2p/{RELAY}/p2p-circuit/p2p/{ME}", f"{LAN}/p2p/{RELAY}/p2p-circuit/p2p/{ME}"]
    assert [str(address) for address in circuits(RELAY, told, ME)] == expected
    local = circuits(RELAY, told[:5], ME)
    assert [str(address) for address in local] == [f"{LOOPBACK}/p2p/{RELAY}/p2p-circuit/p2p/{ME}"]


def test_hints_name_as_dialable_only_who_could_relay() -> None:
    hints = Hints(ME)
    peers = [PrivateIdentity.generate().peer for _ in range(3)]
    for peer, texts in zip(peers, [(LAN, LOOPBACK), (LOOPBACK,), (RELAYED, LAN)], strict=True):
        hints.learn(peer, [f"{text}/p2p/{peer}" for text in texts])
    hints.learn(ME, [f"{LAN}/p2p/{ME}"])
    assert hints.dialable() == peers[:1]
    assert hints.of(ME) == ()
    assert [str(address) for address in hints.of(peers[2])] == [RELAYED, LAN]


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("4001", "/ip4/0.0.0.0/tcp/4001"),
        (":4001", "/ip4/0.0.0.0/tcp/4001"),
        ("127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001"),
        ("[::1]:4001", "/ip6/::1/tcp/4001"),
        ("host:4001", "/ip4/0.0.0.0/tcp/4001"),
    ],
)
def test_example_of_an_address_to_listen_on_is_one(text: str, example: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(text, key="--listen", use="listen")
    assert refused.value.allowed == f"a multiaddr such as {example}"
    parse_address(example, key="--listen", use="listen")


USES: tuple[Use, ...] = get_args(Use)
PEER = f"/p2p/{RELAY}"
TRANSPORTS = ("/tcp/4001", "/udp/4001/quic-v1")
PLACES = tuple(
    f"/{host}{transport}"
    for host in ("ip4/192.0.2.7", "ip6/2001:db8::7", "dns/a.example", "dns4/a.example", "dns6/a.example")
    for transport in TRANSPORTS
)
BEHIND = ("/tls", "/noise", "/http", "/tcp/4002", "/quic-v1", "/udp/4001", "/ip4/192.0.2.8", "/ip4/192.0.2.8/tcp/4002")


def usable(text: str, use: Use) -> bool:
    try:
        parse_address(text, use=use)
    except ConfigError:
        return False
    return True


def test_only_these_sequences_are_of_use_and_each_for_its_own() -> None:
    for place in (*PLACES, "/dnsaddr/a.example"):
        through = f"{place}{PEER}/p2p-circuit/p2p/{ME}"
        assert [usable(place, use) for use in USES] == [False, place != "/dnsaddr/a.example", True]
        for address in (place + PEER, through):
            assert [usable(address, use) for use in USES] == [True, False, False]
        for more in BEHIND:
            assert not any(usable(place + more + end, use) for use in USES for end in ("", PEER)), place + more
        assert not any(usable(f"{through}/p2p-circuit/p2p/{ME}", use) for use in USES)
    for text in (PEER, f"{PEER}/p2p-circuit/p2p/{ME}", "/tcp/4001", "/ip4/192.0.2.7", "/ip4/192.0.2.7/udp/4001/quic"):
        assert not any(usable(text + end, use) for use in USES for end in ("", PEER)), text


@pytest.mark.parametrize(
    ("host", "listened"),
    [
        ("ip4/0.0.0.0", True),
        ("ip6/::", True),
        ("ip6/::ffff:0.0.0.0", True),
        ("ip4/255.255.255.255", False),
        ("ip4/224.0.0.1", False),
        ("ip4/240.0.0.1", False),
        ("ip6/ff02::1", False),
    ],
)
def test_host_that_is_no_single_machine_is_listened_on_at_most(host: str, listened: bool) -> None:
    text = f"/{host}/tcp/4001"
    assert (usable(text, "listen"), usable(text, "announce"), usable(text + PEER, "dial")) == (listened, False, False)


def test_address_that_a_peer_tells_and_nobody_can_dial_is_let_go() -> None:
    hints, peer = Hints(ME), PrivateIdentity.generate().peer
    good = f"{LAN}/p2p/{peer}"
    hints.learn(
        peer, [f"{LAN}/tls/p2p/{peer}", f"/ip4/0.0.0.0/tcp/1/p2p/{peer}", f"/ip4/224.0.0.1/tcp/1/p2p/{peer}", good]
    )
    assert [str(address) for address in hints.of(peer)] == [LAN]
    assert told_address(f"{LAN}/tls/p2p/{peer}") is None
    assert told_address(f"/ip4/10.0.0.1/quic-v1/p2p/{peer}") is None
    assert circuits(RELAY, [f"{LAN}/noise/p2p/{RELAY}", f"/ip4/255.255.255.255/tcp/1/p2p/{RELAY}"], ME) == ()


@pytest.mark.parametrize("host", ["ip6/fe80::1", "ip6zone/eth0/ip6/fe80::1"])
def test_link_local_addresses_are_refused_with_what_to_give_in_their_place(host: str) -> None:
    with pytest.raises(ConfigError, match=r"of one link alone.*ip -6 address show scope global"):
        parse_address(f"/{host}/tcp/4001", use="announce")
