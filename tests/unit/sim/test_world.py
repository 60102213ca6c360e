"""The virtual loop: asyncio's own behaviour, in no time, the same each time, and peers that can be stopped."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarm.sim.loop import EPOCH_S, LoopClock, SimLoop, Stalled, as_peer, run_world


def test_time_jumps_to_the_next_timer() -> None:
    """A loop that waited for the hour would not live to see it: a test has five minutes."""

    async def main() -> tuple[float, int]:
        clock, loop = LoopClock(skew_s=-5.0), asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        assert clock.wall() == EPOCH_S - 5.0
        await asyncio.gather(clock.sleep(3600.0), clock.sleep(10.0))
        return clock.monotonic(), loop.turns

    now, turns = run_world(main())
    assert now == 3600.0
    assert turns < 20, "it goes to each timer at once, in no steps of its own"


def test_world_in_which_nothing_can_happen_says_so() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stalled, match="no timer is set"):
        run_world(main())


def test_world_that_never_ends_is_ended() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(10.0)

    with pytest.raises(Stalled, match="100 were allowed"):
        run_world(main(), longest_s=100.0)


def test_sets_of_tasks_have_the_same_order_each_time() -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.append(name)

        garbage = [bytes(number) for number in range(len(ended), 1000)]
        tasks = {asyncio.create_task(wait(str(number))) for number in range(50)}
        await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert garbage
        return ended

    assert run_world(main()) == run_world(main())


def test_frozen_peer_stands_still_with_all_that_it_started_and_catches_up() -> None:
    async def main() -> dict[str, list[float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        seen: dict[str, list[float]] = {"a": [], "b": []}

        async def tick(name: str) -> None:
            for _ in range(5):
                await asyncio.sleep(1.0)
                seen[name].append(loop.time())

        async def peer(name: str) -> None:
            await asyncio.create_task(tick(name))

        tasks = [loop.create_task(peer(name), context=as_peer(name)) for name in seen]
        await asyncio.sleep(2.5)
        loop.freeze("a")
        assert loop.is_frozen("a")
        await asyncio.sleep(4.0)
        loop.thaw("a")
        await asyncio.gather(*tasks)
        return seen

    assert run_world(main()) == {"a": [1.0, 2.0, 6.5, 7.5, 8.5], "b": [1.0, 2.0, 3.0, 4.0, 5.0]}


def test_peer_frozen_for_good_does_not_hold_up_the_end() -> None:
    ended = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)

        async def forever() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                ended.append(loop.time())

        task = loop.create_task(forever(), context=as_peer("a"))
        await asyncio.sleep(1.0)
        loop.freeze("a")
        task.cancel()
        await asyncio.sleep(1.0)
        assert not ended

    run_world(main())
    assert ended == [2.0]
