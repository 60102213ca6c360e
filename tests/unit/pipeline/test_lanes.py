"""A replica on a device with several lanes: pieces of work are under way at once, and each counts once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from swarm.errors import BugError
from swarm.events import Accumulated
from swarm.phases import Phases, advance
from swarm.pipeline.stage.memory import MOST_ALONE
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import ReplicaScene, failing, microbatch, working


class Lanes:
    """Stops each piece of work behind every phase, until the test lets it go on."""

    def __init__(self, scene: ReplicaScene) -> None:
        self.waiting: list[asyncio.Event] = []
        self.ended = 0
        device: Any = scene.replica.device
        device.lanes, device.run_phases = 2, self._run_phases

    async def _run_phases(self, phases: Phases[Any]) -> Any:
        try:
            while (end := advance(phases)) is None:
                self.waiting.append(asyncio.Event())
                await self.waiting[-1].wait()
        finally:
            self.ended += 1
        return end.value

    async def stopped(self, times: int) -> None:
        """Return when so many phases have ended in all."""
        await eventually(lambda: len(self.waiting) == times)

    def release(self) -> None:
        """Let go on what has stopped so far, and stop nothing more."""
        for event in self.waiting:
            event.set()

    async def to_the_end(self, done: Any) -> None:
        """Let everything go on until that holds."""
        while not done():
            self.release()
            await asyncio.sleep(0)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[ReplicaScene]:
    found = ReplicaScene()
    await found.open()
    yield found


async def contributing(scene: ReplicaScene, lanes: Lanes) -> int:
    """Have the first phase of a contribution done, and no other. Return how many phases had been done before."""
    await scene.forward()
    await lanes.to_the_end(lambda: scene.down.of("forward"))
    before = len(lanes.waiting)
    await scene.backward()
    await lanes.stopped(before + 1)
    return before


async def test_second_forward_arrives_while_the_first_is_computed_and_a_third_waits(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    async with working(scene.replica):
        for position in range(3):
            await scene.forward(position, x=float(position))
        await lanes.stopped(2)
        assert scene.down.of("forward") == []
        await lanes.to_the_end(lambda: len(scene.down.of("forward")) == 3)
    assert sorted(scene.down.payloads("forward")) == [0.0, 2.0, 4.0]


async def test_contributions_under_way_at_once_are_added_once_each(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    async with working(scene.replica):
        for position in (0, 1):
            await scene.forward(position)
        await lanes.to_the_end(lambda: len(scene.down.of("forward")) == 2)
        before = len(lanes.waiting)
        for position in (0, 1):
            await scene.backward(position, x=float(position))
        await lanes.stopped(before + 2)
        assert scene.part.held == {}
        await lanes.to_the_end(lambda: len(scene.replica.events.of(Accumulated)) == 2)
    assert scene.part.held == {microbatch(0): 0.0, microbatch(1): 8.0}


async def test_contribution_whose_step_closes_between_two_phases_is_not_added_to_the_next(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    async with working(scene.replica):
        before = await contributing(scene, lanes)
        scene.replica.open_step(2)
        closed = len(lanes.waiting)
        await lanes.to_the_end(lambda: lanes.ended == 2)
    assert closed == before + 1, "the step did not close between two phases"
    assert scene.part.held == {}
    assert scene.replica.events.of(Accumulated) == []


async def test_contribution_of_another_lineage_between_two_phases_is_not_added_to_the_step_of_its_number(
    scene: ReplicaScene,
) -> None:
    lanes = Lanes(scene)
    async with working(scene.replica):
        await contributing(scene, lanes)
        scene.replica.open_step(1, after="abc")
        dropped = len(scene.server._table) == 0
        await lanes.to_the_end(lambda: lanes.ended == 2)
    assert dropped, "the step was not opened anew"
    assert scene.part.held == {}


async def test_replica_seems_no_slower_for_what_is_under_way_beside(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    async with working(scene.replica):
        for position in (0, 1):
            await scene.forward(position)
        await lanes.stopped(2)
        scene.replica.clock.now += 8.0
        await lanes.to_the_end(lambda: len(scene.trainer.of("hop")) == 2)
    assert sorted(report.compute_s for report in scene.trainer.of("hop"))[0] == pytest.approx(4.0)


async def test_no_memory_beside_other_work_never_counts_as_work_that_does_not_fit(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    scene.part.on["forward"] = failing(torch.OutOfMemoryError("CUDA out of memory"))
    async with working(scene.replica):
        for position in range(2 * MOST_ALONE):
            await scene.forward(position)
        await lanes.to_the_end(lambda: len(scene.trainer.of("blocked")) == 2 * MOST_ALONE)
    assert [blocked.code for blocked in scene.trainer.of("blocked")[: MOST_ALONE + 1]] == ["busy"] * (MOST_ALONE + 1)


async def test_broken_invariant_in_any_lane_ends_the_replica(scene: ReplicaScene) -> None:
    lanes = Lanes(scene)
    scene.part.on["accumulate"] = failing(BugError("the sum is gone"))
    async with working(scene.replica) as (task,):
        for position in (0, 1):
            await scene.forward(position)
        await lanes.to_the_end(lambda: len(scene.down.of("forward")) == 2)
        await scene.backward(1)
        await lanes.to_the_end(task.done)
        with pytest.raises(ExceptionGroup) as ended:
            await task
    assert ended.group_contains(BugError, match="the sum is gone")
