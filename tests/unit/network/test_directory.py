"""Our records' dates, with a directory node that writes down what it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarm.clock import SystemClock
from swarm.errors import Violation
from swarm.ids import RunId
from swarm.network.discovery.directory import DHTDirectory, DirectoryConfig
from swarm.network.discovery.records import PeerRecord, decode_record, encode_record, lifetime_problem
from swarm.network.rpc.bodies import pack, unpack
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


def test_record_of_a_peer_that_was_started_alone_is_what_peers_of_before_know() -> None:
    alone = PeerRecord(role="stage", name="a", incarnation=1, status="ready", step=0)
    beside = alone.model_copy(update={"beside": ("abc",)})
    assert "beside" not in unpack(encode_record(alone))
    assert [decode_record(PeerRecord, encode_record(record)) for record in (alone, beside)] == [alone, beside]


@pytest.mark.parametrize("bad", [("x" * 13,), ("<b>",), ("a",) * 16, "abc"])
def test_record_that_names_too_much_beside_it_is_refused(bad: object) -> None:
    plain = PeerRecord(role="stage", name="a", incarnation=1, status="ready", step=0).to_wire()
    with pytest.raises(Violation):
        decode_record(PeerRecord, pack(plain | {"beside": bad}))
