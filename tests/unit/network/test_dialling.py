"""Which addresses are tried, and when a peer is looked up, against a daemon that only pretends to dial."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from multiaddr import Multiaddr

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p import dialling
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.libp2p.dialling import MAX_PEERS, MAX_PER_PEER, Dialler, Hints
from swarm.network.libp2p.splice import Streams
from swarm.security.signing import PrivateIdentity

ME, TARGET = PrivateIdentity.generate().peer, PrivateIdentity.generate().peer
OLD, NEW, SILENT = "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/2", "/ip4/10.0.0.3/tcp/3"


class _Writer:
    closed = False

    def close(self) -> None:
        """Remembered."""
        self.closed = True


class _Daemon:
    """Connects at NEW, never answers at SILENT, fails at all others."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.connected = asyncio.Event()
        self.writers: list[_Writer] = []
        self.crossing = 0

    async def connections(self) -> list[tuple[PeerId, Multiaddr]]:
        """Those we have, no matter who dialled."""
        return [(TARGET, Multiaddr(NEW))] if self.connected.is_set() else []

    async def connect(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """A dial."""
        told = [str(address) for address in addresses]
        self.dialled += told
        if self.crossing:
            self.crossing -= 1
            raise Unreachable(f"received unexpected handshake message of type *tls.{dialling._CROSSED}", peer=peer)
        if NEW in told:
            self.connected.set()
        elif SILENT in told:
            await self.connected.wait()
        else:
            raise Unreachable(f"nobody at {told}", peer=peer)

    async def open_stream(self, peer: PeerId, protocol: str) -> Streams:
        """Once connected."""
        if not self.connected.is_set():
            raise Unreachable("no addresses", peer=peer)
        self.writers.append(_Writer())
        return cast(Streams, (asyncio.StreamReader(), self.writers[-1]))


class _World:
    def __init__(self, *hints: str, announced: str = "") -> None:
        self.daemon, self.looked_up = _Daemon(), 0
        self.hints = Hints(ME)
        self.hints.learn(TARGET, [f"{text}/p2p/{TARGET}" for text in hints])
        self._announced = [f"{announced}/p2p/{TARGET}"] if announced else []
        self.dialler = Dialler(cast(AttachedP2P, self.daemon), self.hints, self._look_up)

    async def _look_up(self, peer: PeerId) -> Sequence[str]:
        self.looked_up += 1
        return self._announced

    async def dial(self) -> Streams:
        return await asyncio.wait_for(self.dialler.open_stream(TARGET, "x"), 60)


@pytest.mark.parametrize("hints", [(), (OLD,), (f"{OLD}/p2p/{ME}/p2p-circuit",)])
async def test_peer_that_is_not_where_it_was_is_looked_up_once(hints: tuple[str, ...]) -> None:
    world = _World(*hints, announced=NEW)
    await world.dial()
    assert world.looked_up == 1
    assert world.daemon.dialled[-1] == NEW
    assert [str(address) for address in world.hints.of(TARGET)] == [NEW]


async def test_peer_at_an_address_that_does_not_answer_is_looked_up_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "PATIENCE_S", 0.01)
    world = _World(SILENT, announced=NEW)
    _, writer = await world.dial()
    assert world.looked_up == 1
    used = cast(_Writer, writer)
    assert [each is used or each.closed for each in world.daemon.writers] == [True] * len(world.daemon.writers)
    assert not used.closed


@pytest.mark.parametrize(("me", "dialled"), [("", [SILENT]), ("~", [])])
async def test_larger_id_waits_for_the_dial_of_the_other(
    me: str, dialled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "GIVE_WAY_S", 60.0)
    world = _World(SILENT)
    world.hints.me = PeerId(me)
    trying = asyncio.ensure_future(world.dial())
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.daemon.dialled == dialled
    world.daemon.connected.set()  # the other's dial
    await trying


async def test_larger_id_dials_when_the_other_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "GIVE_WAY_S", 0.0)
    world = _World(NEW)
    world.hints.me = PeerId("~")
    await world.dial()
    assert world.daemon.dialled == [NEW]


@pytest.mark.parametrize("crossings", [1, 2])
async def test_dials_that_crossed_are_repeated_once(crossings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_REFUSED_S", 0.0)
    monkeypatch.setattr(dialling, "GIVE_WAY_S", 0.0)
    world = _World(NEW)
    world.daemon.crossing = crossings
    if crossings == 1:
        await world.dial()
    else:
        with pytest.raises(Unreachable, match="clientHelloMsg"):
            await world.dial()
    assert world.daemon.dialled == [NEW, NEW]


@pytest.mark.parametrize("announced", ["", OLD])
async def test_peer_that_is_nowhere_is_unreachable_with_the_first_reason(announced: str) -> None:
    world = _World(OLD, announced=announced)
    with pytest.raises(Unreachable, match=r"nobody at .*10\.0\.0\.1"):
        await world.dial()
    assert (world.looked_up, world.daemon.dialled) == (1, [OLD])


async def test_directory_that_does_not_answer_does_not_keep_a_dial_from_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialling, "_LOOK_UP_S", 0.01)

    async def never(peer: PeerId) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    world = _World(OLD)
    world.dialler._look_up = never
    with pytest.raises(Unreachable, match="nobody at"):
        await world.dial()


def test_hints_keep_the_peers_that_were_last_told_of_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.libp2p.dialling.MAX_PEERS", 3)
    hints = Hints(ME)
    peers = [PrivateIdentity.generate().peer for _ in range(5)]
    for peer in peers:
        hints.learn(peer, [f"{OLD}/p2p/{peer}"] * (MAX_PER_PEER + 1))
        assert len(hints.of(peer)) == MAX_PER_PEER
        assert hints.of(peers[0])
    assert [bool(hints.of(peer)) for peer in peers] == [True, False, False, True, True]
    assert MAX_PEERS > 3
