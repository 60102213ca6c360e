"""Simulated devices: stated time passes, nothing else changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm.device import DeviceThread
from swarm.errors import ConfigError
from swarm.sim.device import InlineDevice, Paced, SimulatedDevice
from swarm.sim.loop import LoopClock, run_world

CPU = torch.device("cpu")


class Part:
    """Something with a stage's kind of methods."""

    name = "stage"

    def forward(self, payload: bytes, *, first: bool) -> tuple[bytes, bool]:
        return payload[::-1], first

    def settle(self) -> str:
        return "settled"


def virtual() -> SimulatedDevice:
    return SimulatedDevice(InlineDevice(CPU), LoopClock())


def test_paced_compute_takes_its_time_one_after_the_other_and_gives_real_bytes() -> None:
    async def main() -> tuple[Any, float, float]:
        device = virtual()
        part = Paced(Part(), device, {"forward": 0.25})
        results = await asyncio.gather(*(device.run(part.forward, b"abc", first=True) for _ in range(4)))
        assert part.settle() == "settled"
        assert part.name == "stage"
        await device.run(part.settle)
        return results, asyncio.get_running_loop().time(), device.busy_s

    results, took, busy = run_world(main())
    assert results == [(b"cba", True)] * 4
    assert took == busy == 1.0


def test_whoever_listens_hears_when_the_device_was_busy() -> None:
    async def main() -> list[tuple[float, float]]:
        device, heard = virtual(), list[tuple[float, float]]()
        device.on_busy.append(lambda began, ended: heard.append((began, ended)))
        await asyncio.sleep(1.0)
        await asyncio.gather(*(device.run(lambda: device.spend(2.0)) for _ in range(2)))
        await device.run(lambda: None)  # takes no time
        return heard

    assert run_world(main()) == [(1.0, 3.0), (3.0, 5.0)]


def test_cancelled_work_occupies_the_device_to_its_end() -> None:
    async def main() -> float:
        device = virtual()
        first = asyncio.create_task(device.run(device.spend, 1.0))
        await asyncio.sleep(0.1)
        first.cancel()
        await device.run(device.spend, 1.0)
        return asyncio.get_running_loop().time()

    assert run_world(main()) == 2.0


def test_cancelled_in_line_is_dropped() -> None:
    async def main() -> float:
        device = virtual()
        first = asyncio.create_task(device.run(device.spend, 1.0))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(device.run(device.spend, 5.0))
        await asyncio.sleep(0.1)
        second.cancel()
        await device.run(device.spend, 1.0)
        await first
        return asyncio.get_running_loop().time()

    assert run_world(main()) == 2.0


def test_closed_device_ends_what_runs_and_takes_no_more() -> None:
    async def main() -> None:
        device = virtual()
        running = asyncio.create_task(device.run(device.spend, 100.0))
        await asyncio.sleep(1.0)
        await device.close()
        assert asyncio.get_running_loop().time() == 1.0
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(RuntimeError):
            await device.run(lambda: None)

    run_world(main())


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="forwards"):
        Paced(Part(), virtual(), {"forwards": 1.0})


class Slept(LoopClock):
    """A clock that stands still but for what is slept on it; anyone who sleeps finds out whether a thread is free."""

    def __init__(self, thread: DeviceThread) -> None:
        super().__init__()
        self._thread, self.now, self.slept = thread, 0.0, list[float]()

    def monotonic(self) -> float:
        """How much was slept."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Returns once the thread has done something else."""
        await self._thread.run(lambda: None)
        self.slept.append(seconds)
        self.now += seconds


async def test_on_a_real_thread_the_time_is_slept_not_burnt() -> None:
    thread = DeviceThread(CPU)
    clock = Slept(thread)
    device = SimulatedDevice(thread, clock)
    part = Paced(Part(), device, {"forward": 0.2})
    assert await device.run(part.forward, b"ab", first=False) == (b"ba", False)
    await device.run(part.settle)
    assert clock.slept == [0.2], "all of it on the clock, while the thread is free, and nothing for what is not paced"
    assert device.busy_s == 0.2
    await device.close()
