"""How a peer is reached: the rules without a network, and relays on loopback. Machines apart: test_namespaces.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy, DeadlineMissed, Refused, Unreachable
from swarm.ids import PeerId
from swarm.network.addresses import parse_address
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import LibP2PEndpoint
from swarm.network.libp2p.attach import AttachedP2P, peer_bytes
from swarm.network.libp2p.daemon import DaemonConfig, _arguments
from swarm.network.reach.circuit import (
    HOP,
    CircuitMessage,
    HopType,
    Status,
    StopType,
    decode_hop,
    encode_hop,
    encode_stop,
    read_body,
)
from swarm.network.reach.reach_service import dialback_places
from swarm.network.reach.reachability import (
    DIALBACK,
    RESERVE,
    AskDialback,
    AskReserve,
    Finding,
    How,
    Reach,
    Reachable,
    judge,
    reachability,
)
from swarm.network.reach.relay import Relay
from swarm.network.reach.relay_slots import RESERVED_S, RelayLimits, RelaySlot
from swarm.security.signing import PrivateIdentity
from swarm.sim.loop import LoopClock, run_world
from tests.harness.expect import LONG_S, eventually
from tests.harness.rigs.network import UP, DialClock, Note, ServiceBench
from tests.harness.supervised import HIDDEN, endpoint_of

MIB = 1 << 20
ME, CONTACT = (PrivateIdentity(bytes([n]) * 32).peer for n in (5, 6))


def at(place: str, peer: PeerId = ME) -> str:
    host, _, port = place.rpartition(":")
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{peer}"


# --- the rules -------------------------------------------------------------------------------------------------------


def places(claims: list[str], observed: list[str], ours: tuple[str, ...] = ("10.9.9.9",)) -> list[str]:
    found = dialback_places(ME, claims, set(map(ip_address, observed)), set(map(ip_address, ours)))
    assert all(text == at(f"{host}:{port}") for host, port, text in found)
    return [f"{host}:{port}" for host, port, _ in found]


def test_dialback_goes_to_the_address_that_calls_and_to_no_other() -> None:
    claims = [at("192.168.7.1:4000"), at("10.0.0.7:4000"), at("8.8.8.8:53"), at("127.0.0.1:4000")]
    assert places(claims, ["10.0.0.7"]) == ["10.0.0.7:4000", "10.0.0.7:53"]
    assert places(claims, []) == []
    assert places([at("10.0.0.7:4000", CONTACT), "nonsense", "/ip4/10.0.0.7/udp/4/quic-v1"], ["10.0.0.7"]) == []


def test_dialback_of_a_caller_behind_a_router_tries_its_ports_there() -> None:
    assert places([at("192.168.7.1:4000"), at("127.0.0.1:4000")], ["203.0.113.9"]) == ["203.0.113.9:4000"]
    assert places([at("fd00::1:4000")], ["2001:db8::5"]) == ["2001:db8::5:4000"]


def test_dialback_of_a_caller_on_the_same_machine_tries_this_machines_addresses() -> None:
    claims = [at("127.0.0.1:4000"), at("10.9.9.9:4000"), at("10.0.0.7:4000")]
    assert places(claims, ["127.0.0.1"]) == ["10.9.9.9:4000", "127.0.0.1:4000"]


def test_dialback_makes_four_connections_at_most() -> None:
    assert len(places([at(f"10.0.0.7:{port}") for port in range(1, 9)], ["10.0.0.7"])) == 4


OWN = (at("10.0.0.7:4000"), at("127.0.0.1:4000"))
SAME = ", from this same machine"


@pytest.mark.parametrize(
    ("own", "findings", "how", "told"),
    [
        (OWN[1:], [], "local", "this machine only"),
        (OWN, [], "unknown", "nobody to ask"),
        (OWN, [Finding(CONTACT, error="no answer")], "unknown", "no answer"),
        (OWN, [Finding(CONTACT)], "unknown", "is not connected directly"),
        (OWN, [Finding(CONTACT, ("10.0.0.7",), OWN[:1])], "direct", "dialled it at /ip4/10.0.0.7/tcp/4000"),
        (OWN, [Finding(CONTACT, ("127.0.0.1",), OWN, beside=True)], "near", SAME),
        (OWN, [Finding(CONTACT, ("10.0.0.7",), OWN, beside=True), Finding(ME, ("203.0.113.9",))], "outgoing", str(ME)),
        (OWN, [Finding(CONTACT, ("203.0.113.9",))], "outgoing", "sees it at 203.0.113.9 and cannot connect"),
        (OWN, [Finding(CONTACT, ("127.0.0.1",), OWN[1:])], "outgoing", "127.0.0.1"),
        (OWN, [Finding(CONTACT, error="x"), Finding(ME, ("203.0.113.9",))], "outgoing", str(ME)),
        (OWN, [Finding(CONTACT, ("203.0.113.9",)), Finding(ME, ("10.0.0.7",), OWN[:1])], "outgoing", str(CONTACT)),
        (OWN, [Finding(CONTACT, ("10.0.0.7",)), Finding(ME, ("8.8.8.8",), (at("8.8.8.8:4000"),))], "direct", str(ME)),
    ],
)
def test_reach_is_judged_by_what_others_could_do(
    own: tuple[str, ...], findings: list[Finding], how: How, told: str
) -> None:
    found, detail = judge(own, findings)
    assert found == how
    assert told in detail
    assert (SAME in detail) == (told == SAME)


class Silent:
    """An endpoint at an address of its own whose every call and relay lets it wait."""

    peer, addresses, relays, standing, behind_nat = ME, OWN, (), (), False

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, peer: PeerId, method: str, *_: object, timeout_s: float) -> Any:
        self.asked.append(method)
        await asyncio.sleep(timeout_s)
        raise DeadlineMissed(f"no answer in {timeout_s} s", peer=peer)

    def also_at(self, addresses: object) -> None:
        assert not addresses

    async def take_relay(self, candidates: object) -> str:
        self.asked.append("relay")
        await asyncio.Event().wait()
        return ""


def test_reach_is_told_in_three_seconds_when_nobody_answers() -> None:
    endpoint = Silent()

    async def ask() -> tuple[Reach, float]:
        reach = await reachability(cast(Reachable, endpoint), [CONTACT], LoopClock())
        return reach, asyncio.get_running_loop().time()

    reach, seconds = run_world(ask())
    assert endpoint.asked == [DIALBACK, "relay"]
    assert reach.how == "unknown"
    assert reach.detail.endswith("no relay: it did not answer in time")
    assert seconds == 3.0


def relay_judges(relay: Relay, caller: PeerId, target: PeerId) -> Status:
    return relay._judge(RelaySlot(caller), CircuitMessage(HopType.CONNECT, peer_bytes(target)))[1]


def test_relay_serves_those_who_asked_for_a_minute() -> None:
    clock = DialClock(100.0)
    relay = Relay(cast(AttachedP2P, None), clock, RelayLimits(reservations=1))
    assert relay_judges(relay, CONTACT, ME) is Status.NO_RESERVATION
    relay.reserve(ME)
    assert relay_judges(relay, CONTACT, ME) is Status.OK
    assert relay_judges(relay, ME, ME) is Status.PERMISSION_DENIED
    with pytest.raises(Busy):
        relay.reserve(CONTACT)
    relay.reserve(ME)
    clock.now += RESERVED_S
    assert relay_judges(relay, CONTACT, ME) is Status.NO_RESERVATION
    relay.reserve(CONTACT)


@pytest.mark.parametrize(
    ("listen", "port_map", "expected"),
    [("/ip4/127.0.0.1/tcp/0", True, "0"), ("/ip4/0.0.0.0/tcp/0", False, "0"), ("/ip4/0.0.0.0/tcp/0", True, "1")],
)
def test_router_is_asked_for_a_port_only_when_told_to(listen: str, port_map: bool, expected: str) -> None:
    address = parse_address(listen, use="listen")
    config = DaemonConfig(key_file=Path("k"), control=Path("c"), listen=[address], port_map=port_map)
    assert f"-natPortMap={expected}" in _arguments(config)


@pytest.mark.parametrize(("listen", "expected"), [("/ip4/127.0.0.1/tcp/0", "0"), ("/ip4/0.0.0.0/tcp/0", "1")])
def test_daemon_is_told_to_punch_holes_from_its_start_on(listen: str, expected: str) -> None:
    address = parse_address(listen, use="listen")
    given = _arguments(DaemonConfig(key_file=Path("k"), control=Path("c"), listen=[address]))
    assert {f"-autonat={expected}", f"-forceReachabilityPrivate={expected}"} <= set(given)


# --- relays on loopback ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(home: Path, name: str, *known: LibP2PEndpoint, **config: Any) -> AsyncIterator[LibP2PEndpoint]:
    async with endpoint_of(home, name, *known, **config) as endpoint:
        endpoint.mount(ServiceBench())
        yield endpoint


async def send(source: LibP2PEndpoint, target: LibP2PEndpoint, size: int = MIB, timeout_s: float = LONG_S) -> int:
    reply, _ = await source.call(target.peer, UP, Note(number=size), timeout_s=timeout_s, payload=bytes(size))
    return reply.number


async def announce(endpoint: LibP2PEndpoint) -> None:
    record = PeerRecord(role="stage", name="p", incarnation=1, status="ready", step=0, addresses=endpoint.addresses[:1])
    await endpoint.directory.announce(record, ttl_s=60)


@pytest.mark.network
async def test_peer_on_loopback_is_local_without_asking_and_is_dialled_back_a_few_times_a_minute(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        reach = await reachability(bob, [alice.peer], SystemClock())
        assert (reach.how, reach.addresses) == ("local", bob.addresses)
        assert await bob.link_kind(alice.peer) == "direct"
        assert await bob.link_kind(PrivateIdentity.generate().peer) == "unknown"

        async def ask() -> tuple[str, ...]:
            found, _ = await bob.call(alice.peer, DIALBACK, AskDialback(addresses=bob.addresses), timeout_s=LONG_S)
            return found.answered

        assert [await ask() for _ in range(3)] == [bob.addresses] * 3
        with pytest.raises(Busy, match="a moment ago"):
            await ask()


@pytest.mark.network
async def test_peers_that_nobody_can_dial_call_through_a_relay_and_change_it_when_it_dies(home: Path) -> None:
    async with (
        opened(home, "a") as alice,
        opened(home, "b", alice) as bob,
        opened(home, "c", alice, bob, **HIDDEN) as carol,
        opened(home, "d", alice, bob, **HIDDEN) as dave,
    ):
        reach = await reachability(dave, [alice.peer], SystemClock())
        assert (reach.how, dave.relays) == ("relayed", (alice.peer,))
        assert reach.addresses[0] == f"{alice.addresses[0]}/p2p-circuit/p2p/{dave.peer}"
        carol.learn(dave.peer, reach.addresses)
        assert await send(carol, dave, 4 * MIB) == 4 * MIB
        assert await carol.link_kind(dave.peer) == "relayed"
        relay = alice._presence._relay
        assert relay is not None
        assert relay.circuits == 1
        assert relay.relayed_bytes > 4 * MIB

        await alice.close()
        with pytest.raises(Unreachable):  # on the broken stream, unless its end was seen before
            await send(carol, dave)
        with pytest.raises(Unreachable, match="by a relay|not called again so soon"):
            await send(carol, dave)
        await dave.take_relay([bob.peer])
        assert dave.relays == (bob.peer,)
        await announce(dave)
        # Carol still has the address through the dead relay; the directory has the new one.
        assert await send(carol, dave) == MIB
        assert await carol.link_kind(dave.peer) == "relayed"


@pytest.mark.network
async def test_relay_refuses_whom_it_cannot_serve(home: Path) -> None:
    async with (
        opened(home, "a", relay="off") as alice,
        opened(home, "b", alice) as bob,
        opened(home, "c", bob, alice, behind_nat=True) as carol,
    ):
        with pytest.raises(Refused, match="relays for nobody"):
            await bob.call(alice.peer, RESERVE, AskReserve(), timeout_s=LONG_S)
        assert (await reachability(carol, [bob.peer], SystemClock())).how == "relayed"
        with pytest.raises(Refused, match="reached through relays alone itself"):
            await bob.call(carol.peer, RESERVE, AskReserve(), timeout_s=LONG_S)
        assert await alice.take_relay([bob.peer]) == "relays are switched off"


@pytest.mark.network
async def test_relay_answers_what_libp2p_says_to_it_and_knows_members_by_what_it_was_told(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:

        async def say(message: bytes) -> int | None:
            reader, writer = await bob._daemon.p2p.open_stream(alice.peer, HOP)
            writer.write(message)
            try:
                async with asyncio.timeout(LONG_S):
                    return decode_hop(await read_body(reader)).status
            finally:
                writer.close()

        connect = encode_hop(CircuitMessage(HopType.CONNECT, peer_bytes(ME)))
        assert await say(connect) == Status.NO_RESERVATION
        assert await say(encode_hop(CircuitMessage(HopType.RESERVE))) == Status.RESERVATION_REFUSED
        assert await say(encode_hop(CircuitMessage(HopType.STATUS))) == Status.UNEXPECTED_MESSAGE
        assert await say(encode_hop(CircuitMessage(HopType.CONNECT))) == Status.UNEXPECTED_MESSAGE
        assert await say(b"\x02\x13\x00") == Status.MALFORMED_MESSAGE
        relay = alice._presence._relay
        assert relay is not None
        relay.reserve(ME)
        assert await say(connect) == Status.CONNECTION_FAILED

        for _ in range(RelayLimits().stranger_reservations - 1):
            relay.reserve(PrivateIdentity.generate().peer)
        with pytest.raises(Busy, match="not members"):
            await bob.call(alice.peer, RESERVE, AskReserve(), timeout_s=LONG_S)
        alice.allow_relay(lambda peer: peer == bob.peer)
        await bob.call(alice.peer, RESERVE, AskReserve(), timeout_s=LONG_S)


@pytest.mark.network
async def test_peers_listen_on_ipv6_and_never_on_quic_unless_told(home: Path) -> None:
    listen = [parse_address("/ip6/::1/tcp/0", use="listen")]
    async with opened(home, "a", listen=listen) as alice, opened(home, "b", alice, listen=listen) as bob:
        assert len(alice.addresses) == 1
        assert alice.addresses[0].startswith("/ip6/::1/tcp/")
        assert await send(bob, alice) == MIB
        assert (await reachability(bob, [alice.peer], SystemClock())).how == "local"


@pytest.mark.network
async def test_relay_closes_streams_that_say_nothing_beyond_a_few(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob, opened(home, "c", alice) as carol:
        relay = alice._presence._relay
        assert relay is not None
        silent = [await bob._daemon.p2p.open_stream(alice.peer, HOP) for _ in range(40)]
        most = RelayLimits().handshakes_per_stranger

        def ended() -> int:
            return sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent)

        reading = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
        await eventually(lambda: ended() == 40 - most, what="all but a few are closed at once")
        assert len(relay._tasks) == most
        relay.reserve(ME)
        reader, writer = await carol._daemon.p2p.open_stream(alice.peer, HOP)
        writer.write(encode_hop(CircuitMessage(HopType.CONNECT, peer_bytes(ME))))
        answer = decode_hop(await asyncio.wait_for(read_body(reader), LONG_S))
        assert answer.status == Status.CONNECTION_FAILED, "an honest caller is served: nobody is there"
        for _, each in (*silent, (reader, writer)):
            each.close()
        await asyncio.gather(*reading, return_exceptions=True)
        await eventually(lambda: not relay._tasks)


@pytest.mark.network
async def test_relay_that_is_about_to_leave_tells_whom_it_serves(home: Path) -> None:
    async with (
        opened(home, "a") as alice,
        opened(home, "b", alice) as bob,
        opened(home, "c", alice, bob) as carol,
        opened(home, "d", alice, bob, **HIDDEN) as dave,
    ):
        await dave.take_relay([alice.peer, bob.peer])
        assert dave.relays == (alice.peer, bob.peer)
        dave.learn(carol.peer, carol.addresses)
        dave._presence._named = (alice.peer, bob.peer, carol.peer)
        carol.learn(dave.peer, dave.addresses)
        assert await send(carol, dave) == MIB
        await alice.retire_relay()
        await eventually(lambda: dave.relays == (bob.peer, carol.peer), what="it has another")
        assert await send(carol, dave) == MIB, "what is passed on goes on"
        with pytest.raises(Refused, match="about to leave"):
            await bob.call(alice.peer, RESERVE, AskReserve(), timeout_s=LONG_S)


@pytest.mark.network
async def test_streams_to_peers_that_are_gone_are_forgotten(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        for name in "cd":
            async with opened(home, name, alice) as passing:
                alice.learn(passing.peer, passing.addresses)
                assert await send(alice, passing, 1) == 1
            await eventually(lambda: not alice._outgoing.alive)
        alice.learn(bob.peer, bob.addresses)
        assert await send(alice, bob, 1) == 1
        assert set(alice._outgoing.peers) == {bob.peer}


class _Broken:
    """A caller's stream that breaks when it is answered."""

    closed = False

    def write(self, data: bytes) -> None:
        """Lost."""

    async def drain(self) -> None:
        """Fails."""
        raise ConnectionResetError("gone")

    def close(self) -> None:
        """Remembered."""
        self.closed = True


async def test_relay_whose_caller_breaks_closes_the_stream_to_whom_it_called() -> None:
    class Daemon:
        there = _Broken()

        async def open_stream(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, Any]:
            reader, writer = asyncio.StreamReader(), self.there
            writer.drain = lambda: asyncio.sleep(0)  # type: ignore[method-assign, assignment]
            reader.feed_data(encode_stop(CircuitMessage(StopType.STATUS, status=Status.OK)))
            return reader, writer

    daemon, here = Daemon(), _Broken()
    relay = Relay(cast(AttachedP2P, daemon), SystemClock())
    relay.reserve(ME)
    reader = asyncio.StreamReader()
    reader.feed_data(encode_hop(CircuitMessage(HopType.CONNECT, peer_bytes(ME))))
    await relay._accept(CONTACT, reader, cast(asyncio.StreamWriter, here))
    await eventually(lambda: not relay._tasks)
    assert (daemon.there.closed, here.closed) == (True, True)
    await relay.close()


def test_circuit_is_limited_until_both_its_ends_are_members() -> None:
    relay = Relay(cast(AttachedP2P, None), SystemClock(), RelayLimits(stranger_bytes_per_s=7, stranger_idle_s=9))
    limits = relay._splice(CONTACT, ME)._limits
    assert (limits.bounded(), limits.bytes_per_s, limits.idle_s) == (True, 7, 9)
    relay.allow(lambda peer: peer == ME)
    assert limits.bounded()
    relay.allow(lambda peer: peer in (ME, CONTACT))
    assert not limits.bounded(), "also of one that was there before"
