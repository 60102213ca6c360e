"""Clocks that tests move, and whole tests in virtual time.

| clock | time goes on |
|---|---|
| :class:`FakeClock` | when it is set, and at once when somebody sleeps |
| :class:`HandClock` | when it is told; who sleeps waits for that |
| :class:`JumpClock` | to the next who wakes, whenever nobody can go on: :func:`in_time` |
| :class:`DialClock` | where the test sets it; sleeping takes real time |
| :class:`LoopClock` | with the loop: in :func:`in_virtual_time`, to the next timer whenever nobody can go on |
| :class:`TickingClock` | as that, and a microsecond whenever somebody looks |
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from swarm.clock import SystemClock
from swarm.sim.loop import LoopClock as LoopClock
from swarm.sim.loop import new_loop, run_world

T = TypeVar("T")

QUIET_TURNS = 400
"""After so many, one that does not wait for the time waits for somebody who does."""


async def turns(count: int = 60) -> None:
    """Let everybody go on as far as they can: in memory a message takes a few turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel these, which must be under way still and end with it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)


class FakeClock:
    """Time that moves when it is set, and when somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    def wall(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """See :class:`swarm.clock.Clock`. Jumps."""
        self.now += seconds


class DialClock(SystemClock):
    """The system's clock, but for ``monotonic``, which stands where the test has set it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now


class TickingClock(LoopClock):
    """The loop's time, and a microsecond more at each look: as of a real clock, no two readings are the same."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        self._looks += 1
        return super().monotonic() + 1e-6 * self._looks


class HandClock:
    """Time that goes on when told; those who sleep so long wake."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    def wall(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Wait until :meth:`advance` has gone so far."""
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, waker))
        await waker

    async def advance(self, seconds: float) -> None:
        """Let time pass, and let those who woke go on."""
        self.now += seconds
        for due, waker in self._sleepers:
            if due <= self.now and not waker.done():
                waker.set_result(None)
        self._sleepers = [(due, waker) for due, waker in self._sleepers if not waker.done()]
        await turns()


class JumpClock(HandClock):
    """Time that stands still while anybody can go on, and then jumps: see :func:`in_time`."""

    def jump(self) -> None:
        """Move to the next who wakes. Raises AssertionError when nobody ever will: a deadlock."""
        waiting = (sleeper for sleeper in self._sleepers if not sleeper[1].done())
        self._sleepers = sorted(waiting, key=lambda sleeper: sleeper[0])
        assert self._sleepers, "everybody waits, and nobody sleeps"
        self.now = max(self.now, self._sleepers[0][0])
        for due, waker in self._sleepers:
            if due <= self.now:
                waker.set_result(None)


async def in_time(clock: JumpClock, task: asyncio.Task[T]) -> T:
    """Return the task's result; the time jumps whenever nobody can go on."""
    while not task.done():
        await turns(QUIET_TURNS)
        if not task.done():
            clock.jump()
    return task.result()


LONGEST_S = 3600.0
"""What a test may take, in virtual seconds: the one who waits beside a heartbeat for what never comes fails, too."""


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a fresh loop whose time stands still while anything can run and jumps to the next timer
    otherwise: 30 s take no time, and the same every time. No task may be left when ``work`` ends. Raises
    :class:`swarm.sim.loop.Stalled` when nothing can run and no timer is set: a lock-up fails at once."""

    async def watched() -> T:
        try:
            return await work
        finally:
            await turns(50)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

    return run_world(watched())


def virtual(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Have a test run in virtual time: an hour takes no time, and waiting for nothing fails."""

    @functools.wraps(story)
    def play(*args: Any, **kwargs: Any) -> None:
        in_virtual_time(_bounded(story(*args, **kwargs)))

    return play


def virtual_loops(config: object, item: object) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Have all asynchronous tests of a folder run in virtual time: its ``conftest.py`` imports this as
    ``pytest_asyncio_loop_factories``. Work for another thread is done at once, in this one."""
    return {"virtual": lambda: new_loop(longest_s=LONGEST_S)}


async def _bounded(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(LONGEST_S):
        await work
