"""What the benchmark ``doors`` makes of what it sees: processor time of a coroutine, floods, frames and losses."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm.network.rpc.strangers import ALL_QUESTIONS_AT_ONCE, ALL_QUESTIONS_S
from tests.benchmarks._doors_flood import Floods
from tests.benchmarks._doors_frames import WORST, Frames, Stopwatch
from tests.benchmarks._doors_questions import STRANGERS, TRIES_S, ask
from tests.benchmarks._doors_stories import loss_ratio


async def test_stopwatch_counts_what_the_thread_works_and_not_what_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = 0
    monkeypatch.setattr(time, "thread_time_ns", lambda: worked)

    async def work() -> str:
        nonlocal worked
        worked += 5
        await asyncio.sleep(0)
        worked += 7
        return "done"

    async def meanwhile() -> None:
        nonlocal worked
        worked += 1000

    watch = Stopwatch(work())
    told, _ = await asyncio.gather(asyncio.create_task(watch), meanwhile())
    assert (told, watch.ns) == ("done", 12)


async def test_stopwatch_passes_a_cancel_and_an_error_on() -> None:
    cleaned = False

    async def wait() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            cleaned = True

    async def fail() -> None:
        raise ValueError("as it is")

    waiting = asyncio.create_task(Stopwatch(wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cleaned
    with pytest.raises(ValueError, match="as it is"):
        await asyncio.create_task(Stopwatch(fail()))


def test_slowest_frames_are_kept_the_slowest_first() -> None:
    found = Frames()
    for ms in (1.0, 9.0, 3.0, 2.0, 8.0, 4.0, 7.0):
        found.note(ms, "a/1/b", 10)
    assert found.tried == 7
    assert [ms for ms, _, _ in found.worst] == [9.0, 8.0, 7.0, 4.0, 3.0]
    assert len(found.worst) == WORST


def test_steps_kept_are_the_median_of_the_rounds() -> None:
    assert Floods(host=[1.0, 9.0, 2.0], sink=[2.0, 10.0, 2.0]).kept == pytest.approx(0.9)


def test_loss_ratio_is_of_the_last_steps() -> None:
    assert loss_ratio([9.0, 2.0, 2.0, 2.0], [9.0, 2.0, 3.0, 4.0]) == pytest.approx(1.5)


async def test_strangers_ask_a_full_directory_as_often_as_they_are_let() -> None:
    asked = await ask(20, 2)
    assert asked.stored == 20
    assert ALL_QUESTIONS_AT_ONCE / 2 < asked.answered < ALL_QUESTIONS_AT_ONCE + 5 * ALL_QUESTIONS_S
    assert asked.answered + asked.refused == STRANGERS * TRIES_S * 4
    assert asked.loop_share > 0
    assert asked.slowest_ms > 0
