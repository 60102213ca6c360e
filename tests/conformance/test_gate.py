"""Who may call what is asked before a byte of the body is decoded, in both worlds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from swarm.errors import Busy, PeerError, Refused, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, Rpc, anybody_may
from swarm.network.rpc import dispatcher as serving
from tests.harness.rigs.network import ECHO, FULL, NOTHING, PUBLIC, UP, Anything, Note, Peer, World

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = Anything(content=1)
"""What is a violation once it is decoded."""


class Gate:
    """Refuses some methods to everybody, and remembers who asked for what."""

    def __init__(self, *refused: Rpc[Any, Any]) -> None:
        self.refused = refused
        self.asked: list[tuple[PeerId, Rpc[Any, Any]]] = []

    def __call__(self, caller: PeerId, rpc: Rpc[Any, Any]) -> None:
        self.asked.append((caller, rpc))
        if rpc in self.refused:
            raise Refused(f"{rpc.name} is not for {caller}")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each body that a server has begun to decode."""
    lengths: list[int] = []
    unpack = serving.unpack

    def spy(data: Any) -> Any:
        lengths.append(len(data))
        return unpack(data)

    monkeypatch.setattr(serving, "unpack", spy)
    return lengths


@pytest.fixture
def gate(bob: Peer) -> Iterator[Gate]:
    """Bob's, with the methods that it refuses."""
    made = Gate(ECHO, UP, PUBLIC)
    bob.endpoint.allow_calls(made)
    yield made
    bob.endpoint.allow_calls(anybody_may)


@pytest_asyncio.fixture(loop_scope="module")
async def stranger(world: World) -> AsyncIterator[Endpoint]:
    """One that has entered no run."""
    made = await world.stranger()
    yield made
    await made.close()


async def test_gate_that_refuses_has_no_byte_of_the_body_decoded(
    gate: Gate, decoded: list[int], alice: Peer, bob: Peer
) -> None:
    with pytest.raises(Refused, match="is not for") as caught:
        await alice.endpoint.call(bob.endpoint.peer, ECHO, HOSTILE, timeout_s=30)
    assert caught.value.peer == bob.endpoint.peer
    assert gate.asked == [(alice.endpoint.peer, ECHO)]
    assert not decoded
    bob.endpoint.allow_calls(anybody_may)
    with pytest.raises(Violation):
        await alice.endpoint.call(bob.endpoint.peer, ECHO, HOSTILE, timeout_s=30)
    assert decoded, "the spy sees what is decoded"
    assert bob.bench.handled == 0


async def test_gate_that_refuses_an_upload_leaves_the_stream_to_others(
    gate: Gate, decoded: list[int], alice: Peer, bob: Peer
) -> None:
    payload = bytes(3 << 20)
    with pytest.raises(Refused, match="is not for"):
        await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=len(payload)), timeout_s=30, payload=payload)
    assert not decoded
    assert not bob.bench.admitted
    gate.refused = ()
    answer, _ = await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=3), timeout_s=30, payload=b"123")
    assert answer.number == 3


async def test_gate_that_refuses_a_notice_tells_nobody(gate: Gate, decoded: list[int], alice: Peer, bob: Peer) -> None:
    await alice.endpoint.notify(bob.endpoint.peer, ECHO, HOSTILE, timeout_s=30)
    with pytest.raises(Busy):
        await alice.endpoint.call(bob.endpoint.peer, FULL, Note(), timeout_s=30)
    assert [rpc for _, rpc in gate.asked] == [ECHO, FULL]
    assert len(decoded) == 1
    assert bob.bench.handled == 0


async def test_gate_is_not_asked_about_a_method_that_nobody_serves(
    gate: Gate, decoded: list[int], alice: Peer, bob: Peer
) -> None:
    with pytest.raises(Refused, match="no method"):
        await alice.endpoint.call(bob.endpoint.peer, NOTHING, HOSTILE, timeout_s=30)
    assert not gate.asked
    assert not decoded


async def test_gate_is_asked_about_a_public_method_of_a_stranger_too(
    gate: Gate, decoded: list[int], stranger: Endpoint, bob: Peer
) -> None:
    stranger.learn(bob.endpoint.peer, bob.endpoint.addresses)
    with pytest.raises(Refused, match="is not for"):
        await stranger.call(bob.endpoint.peer, PUBLIC, HOSTILE, timeout_s=30)
    assert not decoded
    gate.refused = ()
    await stranger.call(bob.endpoint.peer, PUBLIC, Note(), timeout_s=30)
    assert gate.asked == [(stranger.peer, PUBLIC)] * 2
    assert bob.bench.handled == 1


async def test_gate_is_asked_about_a_peer_that_calls_itself_too(gate: Gate, decoded: list[int], bob: Peer) -> None:
    with pytest.raises(Refused, match="is not for"):
        await bob.endpoint.call(bob.endpoint.peer, ECHO, HOSTILE, timeout_s=30)
    assert not decoded
    gate.refused = ()
    await bob.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=30)
    assert gate.asked == [(bob.endpoint.peer, ECHO)] * 2
    assert bob.bench.handled == 1


async def test_gate_with_a_bug_lets_nobody_in_and_the_peer_goes_on(
    decoded: list[int], alice: Peer, bob: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(caller: PeerId, rpc: Rpc[Any, Any]) -> None:
        raise ZeroDivisionError("a secret")

    bob.endpoint.allow_calls(broken)
    try:
        with pytest.raises(PeerError, match="ZeroDivisionError"):
            await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=30)
    finally:
        bob.endpoint.allow_calls(anybody_may)
    assert not decoded
    assert "secret" in caplog.text
    await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=30)
