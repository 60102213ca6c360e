"""A directory that strangers have filled with records, which they ask for again and again: what answering costs the
loop, by virtual time: as many questions are asked as the budget of strangers lets through.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from swarm.clock import SystemClock
from swarm.errors import Busy
from swarm.ids import RunId
from swarm.network.discovery.directory import RecordValidator
from swarm.network.discovery.records import MAX_TTL_S, PeerRecord, encode_record, key_name, seal, wrap
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.rpc.strangers import QuestionBudget
from swarm.security.signing import PrivateIdentity

RUN = RunId("ab" * 32)
STRANGERS, TRIES_S, SECONDS = 32, 20, 3
"""Identities that ask, each twice as often as it is let."""

Answering = Callable[[bytes, PeerID], Awaitable[bytes]]


class Questions(NamedTuple):
    """``stored`` of the records; milliseconds of one question with all of them, and the share of the loop's thread that
    all questions of strangers take together, once what they may do at once is over."""

    stored: int
    slowest_ms: float
    loop_share: float
    answered: int
    refused: int


class VirtualClock(SystemClock):
    """Steady time that passes when it is slept."""

    now = 1000.0

    def monotonic(self) -> float:
        """Return how much has passed."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Let nothing pass: who asks next comes in the same moment."""


async def ask(records: int, seconds: int) -> Questions:
    """Store so many records of nobody, then ask for all of them for so long."""
    served, budget, clock = dict[str, Answering](), QuestionBudget(VirtualClock()), SystemClock()
    await _protocol(served, budget, clock)
    key = DHTID.generate(source=key_name(RUN, PeerRecord))
    stored = await _fill(served, key, records, clock)
    budget.known = lambda peer: False
    virtual = budget._clock
    assert isinstance(virtual, VirtualClock)
    question = dht_pb2.FindRequest(keys=[key.to_bytes()]).SerializeToString()
    peers = [PeerID(number.to_bytes(34, "big")) for number in range(STRANGERS)]
    costs, spent, refused = list[float](), 0.0, 0
    for second in range(2 * seconds):
        for peer in peers * TRIES_S:
            began = time.thread_time()
            try:
                await served["DHTProtocol.rpc_find"](question, peer)
                costs.append(time.thread_time() - began)
            except Busy:
                refused += 1
            spent += (time.thread_time() - began) * (second >= seconds)
        virtual.now += 1.0
    return Questions(stored, 1e3 * max(costs), spent / seconds, len(costs), refused)


async def _protocol(served: dict[str, Answering], budget: QuestionBudget, clock: SystemClock) -> Any:
    async def serve(name: str, handler: Answering, **_: object) -> None:
        served[name] = handler

    p2p = AttachedP2P()
    p2p.peer_id, p2p._client_listen_maddr, p2p.questions = PeerID(b"me"), None, budget
    p2p._client = SimpleNamespace(alive=True, add_unary_handler=serve, close=lambda: None, handlers={})
    validator = RecordValidator(RUN, (PeerRecord,), PrivateIdentity.generate(), clock)
    return await DHTProtocol.create(p2p, DHTID.generate(), 20, 5, 5, 2.0, record_validator=validator)


async def _fill(served: dict[str, Answering], key: DHTID, records: int, clock: SystemClock) -> int:
    stored = 0
    for number in range(records):
        owner, expiry = PrivateIdentity(number.to_bytes(32, "big")), clock.wall() + MAX_TTL_S
        record = PeerRecord(role="trainer", name=f"sybil-{number}", incarnation=1, status="waiting", step=0)
        value = seal(owner, key.to_bytes(), expiry, wrap(encode_record(record)))
        asked = dht_pb2.StoreRequest(
            keys=[key.to_bytes()], subkeys=[MSGPackSerializer.dumps(str(owner.peer))], values=[value],
            expiration_time=[expiry], in_cache=[False],
        )  # fmt: skip
        answer = await served["DHTProtocol.rpc_store"](asked.SerializeToString(), PeerID(b"stranger"))
        stored += sum(dht_pb2.StoreResponse.FromString(answer).store_ok)
    return stored
