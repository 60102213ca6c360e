"""Calls that leave a relay once there is a direct connection."""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from swarm.events import Event, LinkUpgraded
from swarm.ids import PeerId
from swarm.network.reach.presence import TELL_EVERY_S, Upgrades
from tests.harness.rigs.clocks import HandClock

A, B = PeerId("a"), PeerId("b")
RELAYED, DIRECT = Multiaddr("/ip4/25.0.0.1/tcp/4001/p2p-circuit"), Multiaddr("/ip4/25.0.0.2/udp/4001/quic-v1")


class Watched:
    """Connections that a test changes, and what came of it."""

    def __init__(self) -> None:
        self.connections: Sequence[tuple[PeerId, Multiaddr]] = ()
        self.renewed: list[PeerId] = []
        self.told: list[Event] = []
        self.called = {A, B}
        self.clock = HandClock()
        self._upgrades = Upgrades(self._now, self._renew, self, self.clock)

    async def look(self, *connections: tuple[PeerId, Multiaddr]) -> list[PeerId]:
        """Return those whose calls are moved in one look at these connections."""
        self.connections = connections
        before = len(self.renewed)
        await self._upgrades.look()
        return self.renewed[before:]

    def emit(self, event: Event) -> None:
        self.told.append(event)

    def _renew(self, peer: PeerId) -> bool:
        self.renewed.append(peer)
        return peer in self.called

    async def _now(self) -> Sequence[tuple[PeerId, Multiaddr]]:
        return self.connections


async def test_only_who_has_both_kinds_of_connection_is_moved_and_once() -> None:
    watched = Watched()
    assert await watched.look((A, RELAYED), (B, DIRECT)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT), (B, DIRECT)) == [A]
    assert await watched.look((A, RELAYED), (A, DIRECT), (B, DIRECT)) == []
    assert await watched.look((A, DIRECT), (B, DIRECT)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT)) == []
    assert watched.told == [LinkUpgraded(target=A, address=str(DIRECT))]


async def test_peer_that_was_relayed_alone_meanwhile_is_moved_again() -> None:
    watched = Watched()
    assert await watched.look((A, DIRECT), (A, RELAYED)) == [A]
    assert await watched.look((A, RELAYED)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT)) == [A]
    assert await watched.look() == []


async def test_connections_that_come_and_go_are_told_of_once_in_some_minutes() -> None:
    watched = Watched()
    for _ in range(3):
        assert await watched.look((A, DIRECT), (A, RELAYED)) == [A], "the calls follow each time"
        assert await watched.look((A, RELAYED)) == []
    assert len(watched.told) == 1
    await watched.clock.advance(TELL_EVERY_S)
    assert await watched.look((A, DIRECT), (A, RELAYED)) == [A]
    assert len(watched.told) == 2
