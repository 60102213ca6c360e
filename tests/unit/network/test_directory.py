"""Our records' dates, with a directory node that writes down what it is given."""

from __future__ import annotations

from types import SimpleNamespace

from swarm.clock import SystemClock
from swarm.ids import RunId
from swarm.network.discovery.directory import DHTDirectory, DirectoryConfig
from swarm.network.discovery.records import PeerRecord, lifetime_problem
from swarm.security.signing import PrivateIdentity


class Clock(SystemClock):
    """One whose wall clock tests set."""

    now = 1e9

    def wall(self) -> float:
        """What it was set to."""
        return self.now


class Node:
    """Takes every record."""

    protocol = SimpleNamespace(routing_table=None)

    def __init__(self) -> None:
        self.expiry = 0.0

    async def store(self, key: str, body: bytes, expiry: float, *, subkey: str) -> bool:
        """See hivemind."""
        self.expiry = expiry
        return True


async def test_record_after_our_clock_was_set_back_expires_when_it_may() -> None:
    node, clock = Node(), Clock()
    config = DirectoryConfig(run=RunId("5a" * 32), kinds=[PeerRecord])
    directory = DHTDirectory(node, config, PrivateIdentity.generate(), clock)
    record = PeerRecord(role="stage", name="a", incarnation=1, status="ready", step=0)
    await directory.announce(record, ttl_s=30)
    assert node.expiry == clock.now + 30
    clock.now -= 300
    for _ in range(2):
        await directory.announce(record, ttl_s=30)
        assert lifetime_problem(node.expiry, clock.now) == ""
