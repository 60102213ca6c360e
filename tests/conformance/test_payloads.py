"""Calls with payload, in both worlds."""

from __future__ import annotations

import asyncio
import mmap
import tracemalloc

import pytest

from swarm.errors import Busy, PeerError, Violation
from tests.harness.expect import eventually
from tests.harness.rigs.network import DOWN, ECHO, FULL, HANG_UPLOAD, UP, Note, Peer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 255, 256 * 1024, 256 * 1024 + 1, 5 * MIB + 3])
async def test_upload_of_any_size_arrives_whole(size: int, alice: Peer, bob: Peer) -> None:
    payload = bytes(index % 251 for index in range(64)).ljust(size, b"\1")[:size]
    answer, _ = await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=size), timeout_s=120, payload=payload)
    assert answer == Note(number=size, value=float(sum(payload[1:64])))
    assert bob.bench.admitted == [size]


async def test_upload_of_a_shaped_view_is_taken_as_bytes(alice: Peer, bob: Peer) -> None:
    view = memoryview(bytearray(4096)).cast("f", shape=[32, 32])
    answer, _ = await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=4096), timeout_s=120, payload=view)
    assert answer.number == 4096


async def test_upload_leaves_the_callers_bytes_alone(alice: Peer, bob: Peer) -> None:
    for target in (bob, alice):
        payload = bytearray(b"abc" * 100)
        body = Note(number=len(payload))
        await alice.endpoint.call(target.endpoint.peer, UP, body, timeout_s=120, payload=payload)
        assert payload == b"abc" * 100


@pytest.mark.parametrize("size", [256, 3 * MIB])
async def test_download_arrives_whole_and_writable(size: int, alice: Peer, bob: Peer) -> None:
    answer, payload = await alice.endpoint.call(
        bob.endpoint.peer, DOWN, Note(number=size), timeout_s=120, max_reply_bytes=size
    )
    assert answer.text == "down"
    assert payload == bytes(range(256)) * (size // 256)
    payload[:1] = b"x"


async def test_download_larger_than_allowed_fails_at_its_source(alice: Peer, bob: Peer) -> None:
    with pytest.raises(PeerError, match="BugError"):
        await alice.endpoint.call(bob.endpoint.peer, DOWN, Note(number=MIB), timeout_s=120, max_reply_bytes=MIB - 1)


async def test_upload_that_admission_did_not_expect_is_a_violation_before_allocation(alice: Peer, bob: Peer) -> None:
    announced = 512 * MIB  # untouched pages of an anonymous map: nothing is allocated here either
    payload = memoryview(mmap.mmap(-1, announced))
    tracemalloc.start()
    try:
        with pytest.raises(Violation, match="expected 7 bytes"):
            await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=7), timeout_s=120, payload=payload)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    assert bob.bench.admitted == [announced]
    assert bob.bench.handled == 0
    await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=1), timeout_s=120, payload=b"1")


async def test_upload_to_a_method_without_payload_is_a_violation(alice: Peer, bob: Peer) -> None:
    with pytest.raises(Violation, match="takes no payload"):
        await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=120, payload=b"1")


async def test_upload_refused_as_busy_is_discarded_and_its_neighbours_live(alice: Peer, bob: Peer) -> None:
    peer = bob.endpoint.peer
    neighbour = asyncio.ensure_future(
        alice.endpoint.call(peer, HANG_UPLOAD, Note(number=3), timeout_s=120, payload=b"123")
    )
    await asyncio.wait_for(bob.bench.started.wait(), 120)
    payload = memoryview(mmap.mmap(-1, 64 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(Busy, match="queue is full"):
            await alice.endpoint.call(peer, FULL, Note(), timeout_s=120, payload=payload)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    await alice.endpoint.call(peer, UP, Note(number=2 * MIB), timeout_s=120, payload=bytes(2 * MIB))
    bob.bench.release.set()
    assert (await neighbour)[0].text == "released"


async def test_uploads_beyond_a_peers_share_are_told_busy(alice: Peer, bob: Peer) -> None:
    peer = bob.endpoint.peer
    held = bytes(64 * MIB)
    holding = asyncio.ensure_future(
        alice.endpoint.call(peer, HANG_UPLOAD, Note(number=len(held)), timeout_s=120, payload=held)
    )
    await asyncio.wait_for(bob.bench.started.wait(), 120)
    with pytest.raises(Busy, match="held"):
        await alice.endpoint.call(peer, UP, Note(number=len(held)), timeout_s=120, payload=held)
    bob.bench.release.set()
    await holding
    await alice.endpoint.call(peer, UP, Note(number=4), timeout_s=120, payload=b"1234")


async def test_uploads_at_once_do_not_mix(alice: Peer, bob: Peer) -> None:
    async def one(value: int) -> float:
        payload = bytes([value]) * (MIB + value)
        answer, _ = await alice.endpoint.call(
            bob.endpoint.peer, UP, Note(number=len(payload)), timeout_s=120, payload=payload
        )
        return answer.value / 63

    assert await asyncio.gather(*[one(value) for value in range(16)]) == list(range(16))


async def test_upload_that_is_cancelled_halfway_leaves_the_stream_usable(alice: Peer, bob: Peer) -> None:
    peer = bob.endpoint.peer
    payload = bytes(48 * MIB)
    for _ in range(3):
        asking = asyncio.ensure_future(
            alice.endpoint.call(peer, HANG_UPLOAD, Note(number=len(payload)), timeout_s=120, payload=payload)
        )
        await eventually(lambda: bob.bench.admitted)
        bob.bench.admitted.clear()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answer, _ = await alice.endpoint.call(peer, UP, Note(number=5), timeout_s=120, payload=b"12345")
        assert answer.number == 5
        bob.bench.admitted.clear()


async def test_what_was_sent_by_method_is_what_arrived(alice: Peer, bob: Peer) -> None:
    """What the receiver counts as it reads is the capture; both worlds count frames with their headers."""
    before = _between(alice, bob)
    for size in (MIB + 1, 3):
        await alice.endpoint.call(bob.endpoint.peer, UP, Note(number=size), timeout_s=120, payload=bytes(size))
    await alice.endpoint.call(bob.endpoint.peer, DOWN, Note(number=512 << 10), timeout_s=120, max_reply_bytes=MIB)
    await alice.endpoint.notify(bob.endpoint.peer, ECHO, Note(text="said"), timeout_s=120)
    with pytest.raises(Busy):
        await alice.endpoint.call(bob.endpoint.peer, FULL, Note(), timeout_s=120)

    def grown() -> list[dict[str, int]]:
        now = _between(alice, bob)
        return [{name: n - was.get(name, 0) for name, n in one.items()} for was, one in zip(before, now, strict=True)]

    await eventually(lambda: all(sum(one.values()) == 2 * one["captured"] for one in grown()))
    there, back = grown()
    assert MIB < there[UP.name] < 1.01 * MIB
    assert (512 << 10) < back[DOWN.name] < 1.01 * (512 << 10)
    assert there[DOWN.name] < 1024
    assert there[ECHO.name] < 1024


def _between(one: Peer, other: Peer) -> list[dict[str, int]]:
    """Bytes by method from each to the other, and ``captured`` where they arrived."""
    found = []
    for source, target in ((one.endpoint, other.endpoint), (other.endpoint, one.endpoint)):
        sent_by = source.statistics().sent_by
        by = {method: counts[target.peer] for method, counts in sent_by.items() if target.peer in counts}
        found.append({**by, "captured": target.statistics().bytes_received.get(source.peer, 0)})
    return found
