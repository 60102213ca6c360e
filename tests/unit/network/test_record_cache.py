"""What a node of the directory keeps where not everybody may announce: filled by strangers, then a newcomer comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from swarm.clock import SystemClock
from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy
from swarm.ids import PeerId, RunId
from swarm.membership.gate import CallGate
from swarm.network.discovery import records
from swarm.network.discovery.directory import DHTDirectory, DirectoryConfig, RecordValidator
from swarm.network.discovery.record_cache import MAX_UNATTESTED, RecordCache, with_cache
from swarm.network.discovery.records import MAX_TTL_S, PeerRecord, encode_record, key_name, seal, wrap
from swarm.network.libp2p import guard
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.libp2p.guard import MAX_ENTRIES
from swarm.security.credentials import Credential, Grant, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity, verify

RUN = RunId("ab" * 32)
KEY = DHTID.generate(source=key_name(RUN, PeerRecord))
ISSUER, ME, ANA, BEN = (PrivateIdentity(bytes([number]) * 32) for number in range(1, 5))
CLOCK = SystemClock()


class Node:
    """A node's protocol, whose answers are asked for without a network; ``gate`` is that of a run by invite."""

    def __init__(self, protocol: Any, *, cache: bool) -> None:
        self.protocol = protocol
        self.cache: RecordCache | None = with_cache(protocol) if cache else None
        policy = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=(str(ISSUER.peer),)))
        self.gate = CallGate(policy, ME.peer, None, verify)

    @classmethod
    async def made(cls, *, cache: bool = True, admits: bool = True) -> Node:
        guard.install()

        async def serve(name: str, handler: Any, **_: object) -> None:
            """Nobody is asked over a network."""

        p2p = AttachedP2P()
        p2p.peer_id, p2p._client_listen_maddr = PeerID(b"me"), None
        p2p._client = SimpleNamespace(alive=True, add_unary_handler=serve, close=lambda: None, handlers={})
        validator = RecordValidator(RUN, (PeerRecord,), ME, CLOCK)
        self = cls(
            await DHTProtocol.create(p2p, DHTID.generate(), 20, 5, 5, 2.0, record_validator=validator), cache=cache
        )
        if self.cache is not None and admits:
            self.cache.admit(self.gate.attests)
        return self

    async def tell(self, *entries: tuple[str, bytes, float], together: bool = False) -> list[bool]:
        """Store entries, one by one or as a dictionary."""
        fields: dict[str, Any]
        if together:
            told = DictionaryDHTValue()
            for owner, value, expiry in entries:
                told.store(owner, value, expiry)
            fields = {"subkeys": [DHTProtocol.IS_DICTIONARY], "values": [MSGPackSerializer.dumps(told)]}
            fields |= {"expiration_time": [max(expiry for _, _, expiry in entries)]}
        else:
            owners, values, expiries = zip(*entries, strict=True)
            fields = {"subkeys": list(map(MSGPackSerializer.dumps, owners)), "values": list(values)}
            fields |= {"expiration_time": list(expiries)}
        number = len(fields["values"])
        request = SimpleNamespace(peer=None, keys=[KEY.to_bytes()] * number, in_cache=[False] * number, **fields)
        answer = await self.protocol.rpc_store(request, None)
        return list(answer.store_ok)

    @property
    def kept(self) -> set[str]:
        found = self.protocol.storage.get(KEY)
        return set() if found is None else {owner for owner, _ in found.value.items()}


def entry(owner: PrivateIdentity, shown: Credential | None = None, age: float = 0.0) -> tuple[str, bytes, float]:
    """(owner, sealed record, expiry)."""
    expiry = CLOCK.wall() + MAX_TTL_S - age
    record = PeerRecord(role="trainer", name="x", incarnation=1, status="waiting", step=0, credential=shown)
    return str(owner.peer), seal(owner, KEY.to_bytes(), expiry, wrap(encode_record(record))), expiry


def granted(owner: PrivateIdentity, issuer: PrivateIdentity = ISSUER, **changed: Any) -> Credential:
    fields: dict[str, Any] = {
        "run": RUN, "serial": "0" * 16, "name": "ana", "role": "any", "until_step": 9, "key": owner.peer
    }  # fmt: skip
    return credential_for(sign_grant(Grant(**(fields | changed)), issuer), owner.peer, None)


def sybils(number: int, first: int = 1000) -> list[tuple[str, bytes, float]]:
    return [entry(PrivateIdentity(each.to_bytes(32, "big"))) for each in range(first, first + number)]


@pytest.fixture(scope="module")
def crowd() -> list[tuple[str, bytes, float]]:
    """As many as one key has room for."""
    return sybils(MAX_ENTRIES)


async def test_directory_that_sybils_filled_takes_the_announcement_of_a_newcomer(crowd: Any) -> None:
    """Also where it was filled before the node knew who may announce."""
    open_to_all = await Node.made(cache=False)
    assert all(await open_to_all.tell(*crowd))
    assert await open_to_all.tell(entry(ANA, granted(ANA))) == [False], "the fault: there is room for nobody"
    filled_before = await Node.made(admits=False)
    assert all(await filled_before.tell(*crowd))
    assert len(filled_before.kept) == MAX_ENTRIES
    assert filled_before.cache is not None
    filled_before.cache.admit(filled_before.gate.attests)
    gated = await Node.made()
    assert sum(await gated.tell(*crowd)) == MAX_UNATTESTED
    for node in (filled_before, gated):
        assert await node.tell(entry(ANA, granted(ANA))) == [True]
        assert str(ANA.peer) in node.kept
        assert len(node.kept) <= MAX_UNATTESTED + 1


async def test_record_of_a_sybil_is_refused_before_it_is_decoded_or_verified(
    crowd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await Node.made()
    await node.tell(*crowd[:MAX_UNATTESTED])
    looked: list[int] = []
    for name in ("decode_record", "is_sealed_by"):
        real = getattr(records, name)
        monkeypatch.setattr(f"swarm.network.discovery.directory.{name}", lambda *a, r=real: looked.append(1) or r(*a))
    assert not any(await node.tell(*crowd[MAX_UNATTESTED : MAX_UNATTESTED + 50]))
    assert looked == []
    assert await node.tell(entry(ANA, granted(ANA))) == [True]
    assert looked, "and who shows a credential is looked at"


@pytest.mark.parametrize(
    "shown",
    [
        None,
        granted(BEN),
        granted(ANA, PrivateIdentity(bytes(32))),
        granted(ANA, role="observer"),
        granted(ANA, run="c" * 64),
    ],
    ids=["none", "another's", "another issuer's", "an observer's", "another run's"],
)
async def test_credential_that_does_not_count_makes_no_room(shown: Credential | None, crowd: Any) -> None:
    node = await Node.made()
    await node.tell(*crowd[:MAX_UNATTESTED])
    assert await node.tell(entry(ANA, shown)) == [False]
    assert len(node.kept) == MAX_UNATTESTED


async def test_who_is_known_needs_no_credential_and_is_renewed_for_ever(crowd: Any) -> None:
    node = await Node.made()
    await node.tell(*crowd)
    assert await node.tell(entry(ISSUER, age=5)) == [True]
    assert await node.tell(entry(ISSUER)) == [True]
    assert await node.tell(entry(ISSUER, age=3)) == [False], "an older one"
    assert len(node.kept) == MAX_UNATTESTED + 1


async def test_some_that_are_not_known_yet_are_kept_and_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_ENTRIES", 3)
    node = await Node.made()
    early = sybils(2)
    assert await node.tell(*early, entry(ISSUER)) == [True] * 3
    assert await node.tell(*sybils(1, 5000)) == [False]
    assert await node.tell(entry(ANA, granted(ANA))) == [True]
    assert node.kept == {str(ISSUER.peer), str(ANA.peer)}
    assert await node.tell(entry(BEN, granted(BEN, serial="1" * 16))) == [True]
    assert await node.tell(*sybils(1, 6000)) == [False], "those that are known never give way to others"


async def test_entry_that_has_expired_sends_nobody_away() -> None:
    node = await Node.made()
    early = sybils(2)
    assert await node.tell(*early) == [True] * 2
    assert await node.tell(entry(ISSUER, age=MAX_TTL_S + 5)) == [False], "within the skew of clocks, and too late"
    assert node.kept == {owner for owner, _, _ in early}


async def test_room_of_the_unknown_is_free_again_once_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await Node.made()
    await node.tell(*sybils(MAX_UNATTESTED))
    assert node.protocol.storage.refuses(KEY.to_bytes(), MSGPackSerializer.dumps(str(BEN.peer)), entry(BEN)[1])
    later = CLOCK.wall() + MAX_TTL_S + 1
    for module in ("swarm.network.libp2p.guard", "hivemind.utils.timed_storage"):
        monkeypatch.setattr(f"{module}.get_dht_time", lambda: later)
    assert not node.protocol.storage.refuses(KEY.to_bytes(), MSGPackSerializer.dumps(str(BEN.peer)), entry(BEN)[1])


async def test_dictionary_of_another_node_is_taken_without_those_of_nobody(crowd: Any) -> None:
    node = await Node.made()
    told = [*crowd[:500], entry(ANA, granted(ANA)), *crowd[500:900], entry(BEN, granted(BEN, serial="1" * 16))]
    assert await node.tell(*told, together=True) == [True]
    assert node.kept == {str(ANA.peer), str(BEN.peer)}
    plain = await Node.made(admits=False)
    assert await plain.tell(*told, together=True) == [True]
    assert len(plain.kept) == len(told), "and in a run that anybody may join all are kept"


@pytest.mark.parametrize("subkey", [b"", b"\xc1", MSGPackSerializer.dumps(None), MSGPackSerializer.dumps("x" * 80)])
async def test_owner_that_is_no_name_is_refused(subkey: bytes) -> None:
    node = await Node.made()
    assert node.protocol.storage.refuses(KEY.to_bytes(), subkey, b"")


async def test_announcement_that_the_last_node_refuses_counts_where_others_keep_it() -> None:
    """hivemind tells of several nodes what the last one said."""
    kept: dict[str, float] = {}

    class Nodes:
        protocol = SimpleNamespace(routing_table=None)

        async def store(self, key: str, body: bytes, expiry: float, *, subkey: str) -> bool:
            kept.setdefault(subkey, expiry)
            return False

        async def get(self, key: str, *, latest: bool) -> Any:
            return SimpleNamespace(value={owner: SimpleNamespace(expiration_time=at) for owner, at in kept.items()})

    directory = DHTDirectory(Nodes(), DirectoryConfig(run=RUN, kinds=[PeerRecord]), ME, CLOCK)
    record = PeerRecord(role="stage", name="a", incarnation=1, status="ready", step=0)
    await directory.announce(record, ttl_s=30)
    assert set(kept) == {str(ME.peer)}
    with pytest.raises(Exception, match="no node of the directory stored"):
        await directory.announce(record, ttl_s=60)  # an older one is there
    assert PeerId(next(iter(kept))) == ME.peer
