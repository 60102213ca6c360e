"""Whom a founder calls when anybody may announce anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy
from swarm.consensus.placement import assign_stages
from swarm.consensus.slowness import Barred
from swarm.errors import RunEnded, Unreachable
from swarm.ids import PeerId, RunId, stage_part
from swarm.membership.founder import NEWCOMERS, Founder, _Bounded, one_per_grant
from swarm.membership.founding_record import Origin
from swarm.membership.gate import CallGate
from swarm.models.spec import SplitConfig
from swarm.network.discovery.records import PeerRecord, bits_of
from swarm.network.endpoint import LibP2PEndpoint
from swarm.schema import Empty
from swarm.security.credentials import Credential, Grant, SignedGrant
from swarm.security.signing import verify
from tests.harness.rigs.membership import FakeClock
from tests.harness.rigs.membership import manifest as manifest_of

RUN = RunId("a" * 64)
ME = PeerId("founder")
HERE = {PeerId("host"): "stage", PeerId("trainer"): "trainer"}


def _record(role: Any, incarnation: int) -> PeerRecord:
    return PeerRecord(role=role, name="some", incarnation=incarnation, status="waiting", step=0)


def _shown(peer: str, serial: str, *, vote: bool = True, organisation: str = "") -> Credential:
    grant = Grant(
        run=RUN, serial=serial * 16, name="ana", organisation=organisation, role="any", vote=vote, until_step=9,
        key=peer,
    )  # fmt: skip
    return Credential(signed=SignedGrant(grant=grant, signatures={}), peer=peer)


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
        """The callers."""
        return dict.fromkeys(HERE, "direct")

    async def call(self, peer: PeerId, *_: Any, timeout_s: float) -> tuple[Empty, memoryview]:
        """Answer for who is here."""
        self.calls.append(peer)
        if peer not in HERE:
            raise Unreachable("nobody there", peer=peer)
        return Empty(), memoryview(b"")


def _founder(endpoint: Called, records: Mapping[PeerId, PeerRecord], *, stages: int = 1) -> Founder:
    async def lookup(kind: object) -> Mapping[PeerId, PeerRecord]:
        return records

    manifest = manifest_of(hosts=stages, stages=stages)
    around = SimpleNamespace(endpoint=endpoint, clock=FakeClock(), manifest=manifest, gate=None)
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


def test_one_invite_has_one_place() -> None:
    shown = {
        PeerId(peer): None if serial is None else _shown(peer, serial)
        for peer, serial in (("A", "1"), ("B", "2"), ("C", "1"), ("D", None), ("E", "9"), ("F", None))
    }
    me = _record("bootstrap", 1).model_copy(update={"credential": _shown("founder", "9")})
    assert one_per_grant(me, shown) == ["A", "B", "D", "F"]


@pytest.mark.parametrize("vote", [True, False])
async def test_founder_waits_for_one_that_may_vote(vote: bool) -> None:
    said = {PeerId("host"): _shown("host", "1", vote=vote), PeerId("trainer"): _shown("trainer", "2", vote=False)}
    records = {p: _record(HERE[p], 1).model_copy(update={"credential": shown}) for p, shown in said.items()}
    founder = _founder(Called(), records)
    policy = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=("founder",)))
    founder._around.gate = CallGate(policy, ME, None, verify)  # type: ignore[misc]
    found = await founder._candidates()
    assert {candidate.peer for candidate in found} == {ME, *HERE}
    complete, reason = founder._enough(found)
    assert complete == vote
    assert vote or "none that holds a part may vote" in reason


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


async def test_founder_lets_more_in_until_somebody_has_the_memory_for_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = _record("stage", 1).model_copy(update={"unfit": bits_of([0])})
    records = {PeerId("host"): small, PeerId("other"): small, PeerId("trainer"): _record("trainer", 1)}
    monkeypatch.setitem(HERE, PeerId("other"), "stage")
    founder = _founder(Called(), records, stages=2)
    for _ in range(3):
        found = await founder._candidates()
        complete, reason = founder._enough(found)
        assert not complete
        assert reason.startswith("2 of 2 stage hosts and 1 of 1 trainers are here, but no stage host is left with")
    monkeypatch.setitem(HERE, PeerId("big"), "stage")
    records[PeerId("big")] = _record("stage", 1)
    found = await founder._candidates()
    assert founder._enough(found)[0]
    roster, _ = assign_stages(found, SplitConfig(stages=2).parts)
    assert roster.replicas(stage_part(0)) == ("big",)
    records[PeerId("late")] = _record("stage", 1)
    monkeypatch.setitem(HERE, PeerId("late"), "stage")
    assert len(await founder._candidates()) == len(found), "one place more, and no other"


async def test_founder_takes_nobody_who_is_barred_from_the_run_that_goes_on() -> None:
    endpoint, records = Called(), {peer: _record(role, 1) for peer, role in HERE.items()}
    founder = _founder(endpoint, records)
    founder._origin = Origin(digests={}, step=40, barred={"host": Barred(times=1, until=42)})
    assert {candidate.peer for candidate in await founder._candidates()} == {ME, "trainer"}
    founder._origin = Origin(digests={}, step=41, barred={"host": Barred(times=1, until=42)})
    assert {candidate.peer for candidate in await founder._candidates()} == {ME, *HERE}


async def test_founder_takes_no_trainer_of_another_organisation_for_what_one_keeps_to_itself() -> None:
    records = {peer: _record(role, 1) for peer, role in HERE.items()}
    trainer, expert = PeerId("trainer"), stage_part(1, 1, 2)
    policy = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=("founder",)), owners={expert: "acme"})
    for choice, home, there in ((0, "mary", True), (1, "mary", False), (1, "acme", True)):
        shown = _shown("trainer", "1", organisation=home)
        records[trainer] = _record("trainer", 1).model_copy(update={"choice": choice, "credential": shown})
        founder = _founder(Called(), records)
        founder._origin = Origin(digests={}, rules=policy)
        found = {candidate.peer for candidate in await founder._candidates()}
        assert (trainer in found) == there


async def test_founder_that_is_barred_from_the_run_that_goes_on_ends() -> None:
    async def load(told: object) -> Any:
        return Origin(digests={}, step=40, barred={ME: Barred(times=1, until=300)}), []

    told = list[str]()

    async def tell_all(peer: PeerId, reason: str) -> None:
        told.append(reason)

    founder = _founder(Called(), {})
    founder._beginning = SimpleNamespace(load=load)
    founder._around.watch = SimpleNamespace(follow=lambda peers: None, tell_all=tell_all)  # type: ignore[misc]
    with pytest.raises(RunEnded, match="cannot resume the run: .* is barred until step 300"):
        await founder.found(1.0, lambda reason: None)
    assert len(told) == 1, "those who wait are told"
