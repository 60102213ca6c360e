"""Calls without payload, in both worlds."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import PEER_ERRORS, BugError, DeadlineMissed, PeerError, Refused, Unreachable, Violation
from swarm.ids import PeerId
from swarm.network.rpc.bodies import pack_request
from swarm.network.rpc.framing import wire_bytes
from tests.harness.expect import eventually
from tests.harness.rigs.network import (
    BROKEN_ADMIT,
    DOWN,
    ECHO,
    HANG,
    LIMITS,
    NOTHING,
    RAISE,
    UP,
    WRONG_ANSWER,
    Anything,
    Note,
    Peer,
    World,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERYTHING = Note(text="grüß dich", number=-(2**40), value=0.1, pairs=(("a", 1), ("b", 2)), blob=b"\0\xff")


async def test_call_with_a_full_body_gives_it_back(alice: Peer, bob: Peer) -> None:
    answer, payload = await alice.endpoint.call(bob.endpoint.peer, ECHO, EVERYTHING, timeout_s=120)
    assert answer == EVERYTHING
    assert len(payload) == 0


async def test_call_to_itself_goes_the_same_way(bob: Peer) -> None:
    answer, _ = await bob.endpoint.call(bob.endpoint.peer, ECHO, EVERYTHING, timeout_s=120)
    assert answer == EVERYTHING
    with pytest.raises(Refused):
        await bob.endpoint.call(bob.endpoint.peer, NOTHING, Note(), timeout_s=120)


@pytest.mark.parametrize("code", sorted(PEER_ERRORS))
async def test_call_whose_handler_refuses_raises_the_same_type(code: str, alice: Peer, bob: Peer) -> None:
    with pytest.raises(PeerError, match="as asked") as caught:
        await alice.endpoint.call(bob.endpoint.peer, RAISE, Note(text=code), timeout_s=120)
    assert type(caught.value) is PEER_ERRORS[code]
    assert caught.value.peer == bob.endpoint.peer
    answer, _ = await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(number=1), timeout_s=120)
    assert answer.number == 1


async def test_call_whose_handler_has_a_bug_tells_its_type_only(
    alice: Peer, bob: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PeerError) as caught:
        await alice.endpoint.call(bob.endpoint.peer, RAISE, Note(text="bug"), timeout_s=120)
    assert "ZeroDivisionError" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


async def test_call_whose_admission_has_a_bug_fails_and_the_peer_goes_on(alice: Peer, bob: Peer) -> None:
    with pytest.raises(PeerError, match="ZeroDivisionError"):
        await alice.endpoint.call(bob.endpoint.peer, BROKEN_ADMIT, Note(), timeout_s=120)
    await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=120)


async def test_call_of_an_unknown_method_is_refused(alice: Peer, bob: Peer) -> None:
    with pytest.raises(Refused, match="no method"):
        await alice.endpoint.call(bob.endpoint.peer, NOTHING, Note(), timeout_s=120)


@pytest.mark.parametrize("content", [1, {"a": {1: 2}}, "x" * 100])
async def test_call_with_a_body_of_another_shape_is_a_violation(content: object, alice: Peer, bob: Peer) -> None:
    with pytest.raises(Violation):
        await alice.endpoint.call(bob.endpoint.peer, ECHO, Anything(content=content), timeout_s=120)
    assert bob.bench.handled == 0


async def test_call_with_a_deeply_nested_body_is_a_violation(alice: Peer, bob: Peer) -> None:
    nested: object = 0
    for _ in range(400):
        nested = [nested]
    with pytest.raises(Violation, match="nested deeper"):
        await alice.endpoint.call(bob.endpoint.peer, ECHO, Anything(content=nested), timeout_s=120)


async def test_call_with_too_large_a_body_is_never_sent(alice: Peer, bob: Peer) -> None:
    with pytest.raises(Violation, match="exceeds"):
        await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(blob=bytes(5 << 20)), timeout_s=120)


async def test_call_with_a_malformed_answer_is_a_violation(alice: Peer, bob: Peer) -> None:
    with pytest.raises(Violation, match="malformed answer"):
        await alice.endpoint.call(bob.endpoint.peer, WRONG_ANSWER, Note(text="x"), timeout_s=120)
    await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=120)


async def test_call_without_answer_misses_its_deadline_and_cancels_the_handler(alice: Peer, bob: Peer) -> None:
    with pytest.raises(DeadlineMissed):
        await alice.endpoint.call(bob.endpoint.peer, HANG, Note(), timeout_s=0.5)
    await asyncio.wait_for(bob.bench.cancelled.wait(), 120)


async def test_call_carries_its_deadline_as_time_that_is_left(world: World, alice: Peer, bob: Peer) -> None:
    before = world.clock.monotonic()
    asking = asyncio.ensure_future(alice.endpoint.call(bob.endpoint.peer, HANG, Note(), timeout_s=500))
    await asyncio.wait_for(bob.bench.started.wait(), 120)
    assert before + 499 < bob.bench.deadlines[0] <= world.clock.monotonic() + 500
    bob.bench.release.set()
    assert (await asking)[0].text == "released"


async def test_call_that_is_cancelled_cancels_its_handler(alice: Peer, bob: Peer) -> None:
    asking = asyncio.ensure_future(alice.endpoint.call(bob.endpoint.peer, HANG, Note(), timeout_s=60))
    await asyncio.wait_for(bob.bench.started.wait(), 120)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(bob.bench.cancelled.wait(), 120)


async def test_calls_in_great_number_at_once_all_get_their_own_answer(alice: Peer, bob: Peer) -> None:
    calls = [alice.endpoint.call(bob.endpoint.peer, ECHO, Note(number=number), timeout_s=120) for number in range(64)]
    assert [answer.number for answer, _ in await asyncio.gather(*calls)] == list(range(64))


async def test_calls_beyond_a_peers_share_are_told_busy(alice: Peer, bob: Peer) -> None:
    peer = bob.endpoint.peer
    hanging = [
        asyncio.ensure_future(alice.endpoint.call(peer, HANG, Note(), timeout_s=120))
        for _ in range(LIMITS.calls_per_peer)
    ]
    await eventually(lambda: len(bob.bench.deadlines) == LIMITS.calls_per_peer)
    with pytest.raises(PeerError) as caught:
        await alice.endpoint.call(peer, ECHO, Note(), timeout_s=120)
    assert caught.value.code == "busy"
    bob.bench.release.set()
    await asyncio.gather(*hanging)
    await alice.endpoint.call(peer, ECHO, Note(), timeout_s=120)


async def test_calls_of_a_peer_that_dies_fail_at_once(world: World, alice: Peer) -> None:
    carol = await world.peer()
    asking = asyncio.ensure_future(alice.endpoint.call(carol.endpoint.peer, HANG, Note(), timeout_s=60))
    await asyncio.wait_for(carol.bench.started.wait(), 120)
    await world.kill(carol)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(asking, 120)
    with pytest.raises(PeerError) as caught:
        await alice.endpoint.call(carol.endpoint.peer, ECHO, Note(), timeout_s=120)
    assert isinstance(caught.value, (Unreachable, DeadlineMissed))


async def test_calls_from_a_closed_endpoint_are_unreachable(world: World, bob: Peer) -> None:
    dave = await world.peer()
    await dave.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=120)
    await dave.endpoint.close()
    await dave.endpoint.close()
    with pytest.raises(Unreachable):
        await dave.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=120)


async def test_call_of_a_peer_nobody_knows_is_unreachable_or_late(alice: Peer) -> None:
    stranger = PeerId("12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust")
    with pytest.raises((Unreachable, DeadlineMissed)):
        await alice.endpoint.call(stranger, ECHO, Note(), timeout_s=1)


async def test_endpoint_with_a_method_mounted_twice_has_a_bug(alice: Peer) -> None:
    with pytest.raises(BugError, match="twice"):
        alice.endpoint.mount(alice.bench)


async def test_statistics_of_a_fresh_pair_count_every_byte_of_the_frames(world: World) -> None:
    asking, answering = await world.peer(), await world.peer()
    target = answering.endpoint.peer
    up = Note(number=300_000)
    await asking.endpoint.call(target, UP, up, timeout_s=120, payload=bytes(300_000))
    answer, payload = await asking.endpoint.call(target, DOWN, Note(number=1024), timeout_s=120, max_reply_bytes=4096)
    assert (answer.text, len(payload)) == ("down", 1024)
    sent = wire_bytes(len(b"".join(pack_request(UP.name, 5, 0, up))), 300_000)
    sent += wire_bytes(len(b"".join(pack_request(DOWN.name, 5, 4096, Note(number=1024)))))
    there, back = asking.endpoint.statistics(), answering.endpoint.statistics()
    assert there.bytes_sent == {target: sent}
    assert back.bytes_received == {asking.endpoint.peer: sent}
    assert there.bytes_received[target] == back.bytes_sent[asking.endpoint.peer]
    assert 1024 < there.total[1] < 1400
