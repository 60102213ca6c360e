"""What other peers ask of our directory, and answer, without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.clock import SystemClock
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.libp2p.attach import MAX_ID_BYTES, MAX_KEYS, MAX_NEIGHBOURS, AttachedP2P, peer_of_bytes
from swarm.network.reach.circuit import CircuitMessage, HopType, Status, decode_hop, encode_hop
from swarm.network.reach.relay import Relay
from swarm.network.rpc.strangers import QuestionBudget

OTHER = PeerID(b"other")
LONG = b"x" * (MAX_ID_BYTES + 1)
Answering = Callable[[bytes, PeerID], Awaitable[bytes]]


def attached(answer: bytes = b"") -> tuple[AttachedP2P, dict[str, Answering]]:
    """Our client of a daemon that gives every call this answer, and what is served there."""
    served: dict[str, Answering] = {}

    async def call(*_: object) -> bytes:
        return answer

    async def serve(name: str, handler: Answering, **_: object) -> None:
        served[name] = handler

    p2p = AttachedP2P()
    p2p.peer_id, p2p._client_listen_maddr = PeerID(b"me"), None
    p2p._client = SimpleNamespace(
        alive=True, call_unary_handler=call, add_unary_handler=serve, close=lambda: None, handlers={}
    )
    return p2p, served


def result(peers: int = 1, peer: bytes = b"peer", node: bytes = b"node") -> dht_pb2.FindResult:
    return dht_pb2.FindResult(nearest_node_ids=[node] * peers, nearest_peer_ids=[peer] * peers)


async def found(*results: dht_pb2.FindResult) -> object:
    """What hivemind makes of an answer to a question about one key: nothing when the call failed."""
    p2p, _ = attached(dht_pb2.FindResponse(results=results).SerializeToString())
    protocol = await DHTProtocol.create(p2p, DHTID.generate(), 20, 5, 5, 2.0, client_mode=True)
    return await protocol.call_find(OTHER, [DHTID.generate()])


async def test_answer_with_neighbours_is_taken() -> None:
    assert await found(result(MAX_NEIGHBOURS, b"p" * MAX_ID_BYTES)) is not None


@pytest.mark.parametrize(
    "results",
    [
        [result(peer=LONG)],
        [result(node=LONG)],
        [result(MAX_NEIGHBOURS + 1)],
        [dht_pb2.FindResult(nearest_peer_ids=[b"peer"] * (MAX_NEIGHBOURS + 1))],
    ],
)
async def test_answer_that_no_honest_node_gives_is_a_call_that_failed(results: list[dht_pb2.FindResult]) -> None:
    assert await found(*results) is None


async def test_answer_with_more_results_than_keys_is_refused_before_hivemind_has_it() -> None:
    p2p, _ = attached(dht_pb2.FindResponse(results=[result(), result()]).SerializeToString())
    asked = dht_pb2.FindRequest(keys=[b"key"])
    with pytest.raises(ValueError, match="2 results"):
        await p2p.call_protobuf_handler(OTHER, "find", asked, dht_pb2.FindResponse)


@pytest.mark.parametrize("kind", [dht_pb2.FindRequest, dht_pb2.StoreRequest])
async def test_question_about_too_many_keys_or_one_twice_never_reaches_its_handler(kind: type) -> None:
    p2p, served = attached()
    seen: list[int] = []

    async def answer(asked: dht_pb2.FindRequest, context: object) -> dht_pb2.FindResponse:
        seen.append(len(asked.keys))
        return dht_pb2.FindResponse()

    await p2p.add_protobuf_handler("ask", answer, kind)
    many = [b"%d" % number for number in range(MAX_KEYS + 1)]
    for keys in (many, [b"key", b"key"]):
        with pytest.raises(ValueError, match="question"):
            await served["ask"](kind(keys=keys).SerializeToString(), OTHER)
    await served["ask"](kind(keys=many[:-1]).SerializeToString(), OTHER)
    assert seen == [MAX_KEYS]


async def test_question_of_a_stranger_beyond_its_budget_never_reaches_its_handler() -> None:
    p2p, served = attached()
    p2p.questions = QuestionBudget(SystemClock())
    p2p.questions.known = lambda peer: peer != OTHER.to_base58()
    seen: list[object] = []

    async def answer(asked: dht_pb2.StoreRequest, context: object) -> dht_pb2.StoreResponse:
        seen.append(context)
        return dht_pb2.StoreResponse()

    await p2p.add_protobuf_handler("store", answer, dht_pb2.StoreRequest)
    large = dht_pb2.StoreRequest(keys=[b"key"], values=[b"x" * (1 << 20)]).SerializeToString()
    await served["store"](large, OTHER)
    with pytest.raises(Busy, match="no members"):
        await served["store"](large, OTHER)
    await served["store"](large, PeerID(b"member"))
    assert len(seen) == 2


async def test_question_to_hide_what_is_stored_behind_the_cache_never_reaches_its_handler() -> None:
    p2p, served = attached()
    seen: list[dht_pb2.StoreRequest] = []

    async def answer(asked: dht_pb2.StoreRequest, context: object) -> dht_pb2.StoreResponse:
        seen.append(asked)
        return dht_pb2.StoreResponse()

    await p2p.add_protobuf_handler("store", answer, dht_pb2.StoreRequest)
    asked = dht_pb2.StoreRequest(keys=[b"a", b"b"], in_cache=[False, True])
    with pytest.raises(ValueError, match="cache"):
        await served["store"](asked.SerializeToString(), OTHER)
    assert not seen
    asked.in_cache[1] = False
    await served["store"](asked.SerializeToString(), OTHER)
    assert seen == [asked]


def test_peer_of_more_bytes_than_any_id_has_is_refused() -> None:
    assert peer_of_bytes(LONG[1:])
    with pytest.raises(ValueError, match="65 bytes"):
        peer_of_bytes(LONG)


async def test_relay_that_is_asked_for_a_peer_of_too_many_bytes_says_malformed() -> None:
    reader, told = asyncio.StreamReader(), bytearray()
    reader.feed_data(encode_hop(CircuitMessage(HopType.CONNECT, LONG)))

    async def drain() -> None:
        return None

    writer = SimpleNamespace(write=told.extend, drain=drain, close=lambda: None)
    relay = Relay(attached()[0], SystemClock())
    await relay._accept(PeerId("caller"), reader, writer)
    await asyncio.gather(*relay._tasks)
    assert decode_hop(bytes(told[1:])).status == Status.MALFORMED_MESSAGE
