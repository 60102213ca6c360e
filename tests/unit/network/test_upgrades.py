"""Calls that leave a relay once there is a direct connection."""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from swarm.events import Event, LinkUpgraded
from swarm.ids import PeerId
from swarm.network.reach.upgrades import Upgrades

A, B = PeerId("a"), PeerId("b")
RELAYED, DIRECT = Multiaddr("/ip4/25.0.0.1/tcp/4001/p2p-circuit"), Multiaddr("/ip4/25.0.0.2/udp/4001/quic-v1")


class Watched:
    """Connections that a test changes, and what came of it."""

    def __init__(self) -> None:
        self.connections: Sequence[tuple[PeerId, Multiaddr]] = ()
        self.renewed: list[PeerId] = []
        self.told: list[Event] = []
        self._upgrades = Upgrades(self._now, self.renewed.append, self)

    async def look(self, *connections: tuple[PeerId, Multiaddr]) -> list[PeerId]:
        """Return those who are told of in one look at these connections."""
        self.connections = connections
        before = len(self.renewed)
        await self._upgrades.look()
        return self.renewed[before:]

    def emit(self, event: Event) -> None:
        self.told.append(event)

    async def _now(self) -> Sequence[tuple[PeerId, Multiaddr]]:
        return self.connections


async def test_only_who_has_both_kinds_of_connection_is_told_of_and_once() -> None:
    watched = Watched()
    assert await watched.look((A, RELAYED), (B, DIRECT)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT), (B, DIRECT)) == [A]
    assert await watched.look((A, RELAYED), (A, DIRECT), (B, DIRECT)) == []
    assert await watched.look((A, DIRECT), (B, DIRECT)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT)) == []
    assert watched.told == [LinkUpgraded(target=A, address=str(DIRECT))]


async def test_peer_that_was_relayed_alone_meanwhile_is_told_of_again() -> None:
    watched = Watched()
    assert await watched.look((A, DIRECT), (A, RELAYED)) == [A]
    assert await watched.look((A, RELAYED)) == []
    assert await watched.look((A, RELAYED), (A, DIRECT)) == [A]
    assert await watched.look() == []
