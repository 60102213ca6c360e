"""Whom a founder calls when anybody may announce anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from data_shards.tokenize import train_tokenizer
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.membership.founder import NEWCOMERS, Founder, _Bounded
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import LibP2PEndpoint
from swarm.schema import Empty
from tests.harness.rigs.membership import FakeClock
from tests.harness.swarm import small_manifest

ME = PeerId("founder")
HERE = {PeerId("host"): "stage", PeerId("trainer"): "trainer"}


def _record(role: Any, incarnation: int) -> PeerRecord:
    return PeerRecord(role=role, name="some", incarnation=incarnation, status="waiting", step=0)


class Called:
    """An endpoint with which only those who are here are connected, and answer."""

    peer = ME

    def __init__(self) -> None:
        self.calls: list[PeerId] = []
        self.expected = 0

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Nothing to learn."""

    def expect(self, peers: int) -> None:
        """Remember how many."""
        self.expected = peers

    async def links(self) -> Mapping[PeerId, str]:
        """Whoever called us."""
        return dict.fromkeys(HERE, "direct")

    async def call(self, peer: PeerId, *_: Any, timeout_s: float) -> tuple[Empty, memoryview]:
        """Answer for who is here."""
        self.calls.append(peer)
        if peer not in HERE:
            raise Unreachable("nobody there", peer=peer)
        return Empty(), memoryview(b"")


def _founder(endpoint: Called, records: Mapping[PeerId, PeerRecord]) -> Founder:
    async def lookup(kind: object) -> Mapping[PeerId, PeerRecord]:
        return records

    manifest = small_manifest(train_tokenizer(["some words"], 300), 1, 1, {"split": {"stages": 1}})
    around = SimpleNamespace(endpoint=endpoint, clock=FakeClock(), manifest=manifest)
    return Founder(
        cast(Any, around), cast(Any, SimpleNamespace(lookup=lookup)), cast(Any, None),
        lambda: _record("bootstrap", 1), cast(Any, None), cast(Any, None),
    )  # fmt: skip


def test_founder_has_room_for_all_whom_its_run_waits_for_until_it_has_begun() -> None:
    endpoint = Called()
    with _founder(endpoint, {}).expecting():
        assert endpoint.expected == 2
    assert endpoint.expected == 0
    assert issubclass(LibP2PEndpoint, _Bounded)


async def test_founder_calls_few_of_thousands_and_takes_those_who_answer() -> None:
    """Forged records claim the oldest age, by which nobody is chosen."""
    records = {PeerId(f"forged{n}"): _record(("stage", "trainer")[n % 2], 0) for n in range(5000)}
    records |= {peer: _record(role, 10**12) for peer, role in HERE.items()}
    endpoint = Called()
    founder = _founder(endpoint, records)
    found = await founder._candidates()
    assert {candidate.peer for candidate in found} == {ME, *HERE}
    assert len(endpoint.calls) <= NEWCOMERS
    assert {candidate.peer for candidate in await founder._candidates()} == {ME, *HERE}
    assert len(endpoint.calls) <= NEWCOMERS + len(HERE)
