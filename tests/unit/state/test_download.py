"""Downloading from several donors that die, stall and lie: what was verified stays, and who lies is named."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.errors import Busy, DeadlineMissed, PeerError, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PeerId
from swarm.network.protocols import Answer
from swarm.state import download as download_module
from swarm.state import snapshot as chunks
from swarm.state.sharing import CEILING_S, FLOOR_S, LATE
from swarm.state.snapshot import Snapshot, digest, hashes_of
from swarm.state.transfer import CHUNK, DESCRIBE
from swarm.waiting import TokenBucket
from tests.harness.rigs.state import ME, QUIET_TURNS, Donors, big_state, turns

A, B, C = (PeerId(name) for name in "abc")
CHUNKS = 30
"""Ten chunks of 256 bytes a vector."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)


def same(found: Snapshot, state: Snapshot) -> bool:
    return digest(found) == digest(state)


async def test_download_shares_the_chunks_among_all_donors_and_fetches_each_once() -> None:
    world = Donors(big_state())
    world.slow({"a": 0.1, "b": 0.1, "c": 0.1})
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert sorted(sum(world.served.values(), [])) == list(range(CHUNKS))
    assert min(map(len, world.served.values())) >= 5
    total = world.cut.total_bytes
    assert [told[1] for told in world.progress] == sorted(told[1] for told in world.progress)
    assert world.progress[-1][1:] == (total, total)
    assert (sum(download.given.values()), download.refetched_bytes) == (total, 0)


@pytest.mark.parametrize("names", ["a", "abc"])
async def test_download_at_a_pace_keeps_to_it_however_many_give(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "CHUNK_BYTES", 256)
    world = Donors(big_state(), names)
    download = await world.open(pace=TokenBucket(1000.0, 1024))
    assert same(await world.fetch(download), world.state)
    assert world.clock.now == pytest.approx((world.cut.total_bytes - 1024) / 1000.0, rel=0.02)
    assert world.asked == CHUNKS


async def test_download_at_a_pace_whose_donor_dies_while_it_pauses_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "CHUNK_BYTES", 256)
    world = Donors(big_state(), "a")
    download = await world.open(pace=TokenBucket(1000.0, 1024))
    world.after = lambda count: world.network.kill(A) if count == 5 else None
    with pytest.raises(Unreachable):
        await world.fetch(download)
    assert sum(download.given.values()) == 5 * 256


# --- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, CHUNKS + 1))
async def test_download_whose_donor_dies_at_any_chunk_goes_on_and_fetches_little_twice(at: int) -> None:
    world = Donors(big_state())
    world.slow({"a": 0.1, "b": 0.1, "c": 0.1})
    killed: list[int] = []

    def kill(count: int) -> None:
        if count == at:
            killed.append(count)
            world.network.kill(A)

    world.after = kill
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert killed, "the fault did not fire"
    assert download.refetched_bytes == 0
    lost = len(world.served[A]) + len(world.served[B]) + len(world.served[C]) - CHUNKS
    assert lost <= 8, "more than what was under way at the dead donor was asked for again"
    assert world.dropped.get(A) in (None, "unreachable")


async def test_download_whose_donors_all_die_keeps_what_it_has_and_goes_on_with_others() -> None:
    world = Donors(big_state(), "abcd")
    world.slow(dict.fromkeys("abcd", 0.1))

    def kill(count: int) -> None:
        if count == 20:
            for name in (A, B, C):
                world.network.kill(name)

    world.after = kill
    download = await world.open()
    with pytest.raises(Unreachable):
        await world.fetch(download, [A, B, C])
    verified = sum(download.given.values())
    assert 0 < verified < world.cut.total_bytes
    assert same(await world.fetch(download, [A, PeerId("d")]), world.state)
    assert 256 * len(world.served[PeerId("d")]) == world.cut.total_bytes - verified
    assert download.refetched_bytes == 0


async def test_download_that_is_cancelled_leaves_no_task_and_can_go_on() -> None:
    world = Donors(big_state())
    world.slow(dict.fromkeys("abc", 0.1))
    half = asyncio.Event()
    world.after = lambda count: half.set() if count == 15 else None
    download = await world.open()
    task = asyncio.create_task(download.fetch(world.names))
    while not half.is_set():
        await turns(QUIET_TURNS)
        world.clock.jump()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns(QUIET_TURNS)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert same(await world.fetch(download), world.state)


# --- stalls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 14, 28])
async def test_download_whose_donor_stalls_leaves_it_out_and_is_hardly_late(at: int) -> None:
    world = Donors(big_state())
    world.slow(dict.fromkeys("abc", 0.1))
    stalled: list[int] = []

    async def stall(body: Any, answer: Answer[Any]) -> Answer[Any]:
        if world.asked >= at:
            stalled.append(at)
            await asyncio.Event().wait()
        return answer

    world.twists[A, CHUNK] = stall
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert stalled, "the fault did not fire"
    assert world.clock.now < 0.1 * CHUNKS + LATE, "it waited for the one that stalled"


async def test_download_whose_only_donor_stalls_waits_by_what_was_measured_and_can_go_on() -> None:
    world = Donors(big_state(), "a")
    world.slow({"a": 0.1})
    fine = [True]

    async def stall(body: Any, answer: Answer[Any]) -> Answer[Any]:
        if fine and world.asked > 15:
            await asyncio.Event().wait()
        return answer

    world.twists[A, CHUNK] = stall
    download = await world.open()
    with pytest.raises(DeadlineMissed):
        await world.fetch(download)
    assert world.clock.now < 2 * FLOOR_S < CEILING_S
    fine.clear()
    asked = world.asked
    assert same(await world.fetch(download), world.state)
    assert world.asked - asked <= CHUNKS - 12, "it began anew"


async def test_download_asks_another_for_the_last_chunk_of_a_slow_donor_and_counts_it_once() -> None:
    world = Donors(big_state(), "ab")
    world.slow({"a": 0.1, "b": 60.0})
    download = await world.open()
    describing = {"a": 0.1, "b": 0.1}
    slow = world.network.delay
    world.network.delay = lambda s, t, size: describing.get(s, 0.0) if size > 600 else slow(s, t, size)
    assert same(await world.fetch(download), world.state)
    assert world.clock.now < 10.0
    twice = set(world.served[A]) & set(world.served[B])
    assert len(world.served[B]) == len(twice) == 1
    assert sum(download.given.values()) == world.cut.total_bytes


async def test_download_over_a_very_thin_link_is_never_given_more_than_it_can_bring() -> None:
    """Fifty seconds a chunk: with eight under way none would arrive before its deadline."""
    world = Donors(big_state(16 * 8), "a")
    free = [0.0]

    async def serial(body: Any, answer: Answer[Any]) -> Answer[Any]:
        free[0] = max(free[0], world.clock.now) + 50.0
        await world.clock.sleep(free[0] - world.clock.now)
        return answer

    world.twists[A, CHUNK] = serial
    assert same(await world.fetch(await world.open()), world.state)
    assert world.asked == world.cut.chunks


# --- lies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 13, CHUNKS - 1])
async def test_download_with_one_false_chunk_names_the_liar_and_fetches_it_elsewhere(chunk: int) -> None:
    world = Donors(big_state())
    world.slow(dict.fromkeys("abc", 0.1))
    lies: list[PeerId] = []

    def lie_of(name: PeerId) -> Any:
        async def lie(body: Any, answer: Answer[Any]) -> Answer[Any]:
            if body.chunk != chunk or (lies and lies != [name]):
                return answer
            lies.append(name)
            false = bytearray(answer.payload)
            false[-1] ^= 1
            return Answer(answer.body, false)

        return lie

    for name in world.names:
        world.twists[name, CHUNK] = lie_of(name)
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert lies, "the fault did not fire"
    assert world.dropped == {lies[0]: "violation"}
    assert download.liars == {lies[0]}
    assert sum(name != lies[0] and chunk in served for name, served in world.served.items()) == 1


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: bytes(data) + b"0", lambda data: b""])
async def test_download_of_a_chunk_of_another_length_drops_its_donor(change: Any) -> None:
    world = Donors(big_state())

    async def wrong(body: Any, answer: Answer[Any]) -> Answer[Any]:
        return Answer(answer.body, change(answer.payload))

    world.twists[A, CHUNK] = wrong
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert A not in download.given
    assert A in world.dropped


async def false_hashes(body: Any, answer: Answer[Any]) -> Answer[Any]:
    hashes = bytearray(answer.payload)
    hashes[40] ^= 1
    return Answer(answer.body, hashes)


async def missing_hash(body: Any, answer: Answer[Any]) -> Answer[Any]:
    return Answer(answer.body, bytes(answer.payload)[:-32])


async def no_hashes(body: Any, answer: Answer[Any]) -> Answer[Any]:
    return Answer(answer.body)


async def many_hashes(body: Any, answer: Answer[Any]) -> Answer[Any]:
    return Answer(answer.body, bytes(answer.payload) * 1000)


@pytest.mark.parametrize("lie", [false_hashes, missing_hash, no_hashes, many_hashes])
async def test_download_from_a_donor_that_lies_about_the_hashes_asks_it_for_nothing(lie: Any) -> None:
    world = Donors(big_state())
    world.twists[A, DESCRIBE] = lie
    download = await world.open()
    assert same(await world.fetch(download), world.state)
    assert world.served[A] == []
    assert A in world.dropped


async def test_download_from_liars_only_installs_nothing_and_asks_them_no_more() -> None:
    world = Donors(big_state(), donated=big_state(seed=1))
    download = await world.open()
    with pytest.raises(Violation):
        await world.fetch(download)
    with pytest.raises(StateError, match="nobody is left"):
        await world.fetch(download)
    assert (world.asked, download.given, download.liars) == (0, {}, set(world.names))


async def test_download_from_a_donor_whose_memory_is_damaged_after_it_made_its_hashes_is_right() -> None:
    state, damaged = big_state(), big_state()
    world = Donors(state, "ab")
    download = await world.open()
    held = world.donors[A]._offers[state.part]
    held.hashes = asyncio.get_running_loop().create_future()
    held.hashes.set_result(hashes_of(damaged.buffers()))
    damaged.vectors[1][5] += 1
    held.snapshot = damaged
    world.slow({"a": 0.1, "b": 0.2})
    assert same(await world.fetch(download), state)
    assert world.dropped == {A: "violation"}


# --- who cannot ----------------------------------------------------------------------------------------------------


def refusing(error: PeerError) -> Any:
    async def refuse(body: Any, answer: Answer[Any]) -> Answer[Any]:
        raise error

    return refuse


async def test_download_says_the_gravest_of_what_went_wrong() -> None:
    world = Donors(big_state())
    download = await world.open()
    world.twists[A, DESCRIBE] = refusing(Busy("enough"))
    world.twists[B, DESCRIBE] = refusing(WrongStep("gone on"))
    with pytest.raises(WrongStep):
        await world.fetch(download, [A, B])
    world.network.kill(C)
    with pytest.raises(Unreachable):
        await world.fetch(download, [A, B, C])


async def test_download_of_a_lease_that_ran_out_goes_on_with_the_others() -> None:
    world = Donors(big_state(), "ab")
    world.slow({"a": 0.1, "b": 0.1})
    download = await world.open()
    world.after = lambda count: world.donors[A].release(ME, world.state.part) if count == 12 else None
    assert same(await world.fetch(download), world.state)
    assert world.dropped == {A: "wrong_step"}


async def test_download_asks_a_donor_again_when_it_is_told_to_and_a_liar_never() -> None:
    world = Donors(big_state(), "ab")
    download = await world.open()
    waited: list[PeerId] = []

    async def busy(body: Any, answer: Answer[Any]) -> Answer[Any]:
        if world.asked > 4 and waited.count(A) < 5:
            raise Busy("enough")
        return answer

    async def lie(body: Any, answer: Answer[Any]) -> Answer[Any]:
        return Answer(answer.body, bytes(len(answer.payload)))

    def again(donor: PeerId, error: PeerError) -> float:
        waited.append(donor)
        return 7.0

    world.twists[A, CHUNK], world.twists[B, CHUNK] = busy, lie
    object.__setattr__(download._context, "dropped", again)
    assert same(await world.fetch(download), world.state)
    assert (waited.count(A), waited.count(B), len(world.served[B])) == (5, 1, 1)
    assert world.clock.now >= 5 * 7.0, "it did not wait"


async def test_download_has_no_more_under_way_however_many_donors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "MAX_UNDER_WAY", 5)
    world = Donors(big_state(), "abcdefgh")
    world.slow(dict.fromkeys("abcdefgh", 0.1))
    under_way, most = [0], [0]

    async def counted(body: Any, answer: Answer[Any]) -> Answer[Any]:
        under_way[0] += 1
        most.append(under_way[0])
        await world.clock.sleep(0.1)
        under_way[0] -= 1
        return answer

    for name in world.names:
        world.twists[name, CHUNK] = counted
    assert same(await world.fetch(await world.open()), world.state)
    assert max(most) == 5
