"""A device without memory: graphs are dropped, those who asked hear Busy, and each microbatch counts once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.errors import BugError, PeerError
from swarm.events import Accumulated, ContributionReplayed, GraphsDropped, JourneySetAside
from swarm.ids import PeerId
from swarm.pipeline.stage.memory import MOST_ALONE
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import ME, Crew, ReplicaScene, failing, microbatch, quick, working, works

NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
A0, B0, B1 = (PeerId(name) for name in ("a0", "b0", "b1"))


def fails(*turns: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> Callable[[], None]:
    """Return a hook that finds no memory in these of its turns."""
    taken = 0

    def hook() -> None:
        nonlocal taken
        taken += 1
        if taken - 1 in turns:
            raise error(NO_MEMORY)

    return hook


def graphs_of(scene: ReplicaScene) -> list[Any]:
    return [state.tensors.graph for state in scene.server._table]


async def test_forward_without_memory_is_answered_busy_and_waiting_graphs_are_computed_again(
    scene: ReplicaScene,
) -> None:
    graphs: list[weakref.ref[Any]] = []
    usual = scene.part.forward

    def forward(x: torch.Tensor, **options: Any) -> Any:
        output, graph = usual(x, **options)
        graphs.append(weakref.ref(graph))
        return output, graph

    scene.part.forward = forward  # type: ignore[method-assign]
    for position in (0, 1):
        await scene.there(position, x=3.0)
    scene.part.on["forward"] = fails(0)
    await scene.forward(2)
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction, blocked.peer) == ("busy", "forward", ME)
    (event,) = scene.replica.events.of(GraphsDropped)
    assert (event.step, event.part, event.device, event.graphs) == (1, "stage-1", "cpu", 2)
    assert event.reason == NO_MEMORY
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]
    assert graphs_of(scene) == [None, None]
    await scene.backward(0, x=4.0)
    await eventually(lambda: scene.up.of("backward"))
    assert scene.part.held == {microbatch(0): 32.0}, "as with the graph"
    await scene.there(2, attempt=1)
    for position in (1, 2):
        await scene.backward(position, attempt=position - 1)
    await eventually(lambda: len(scene.part.held) == 3)
    assert len(scene.replica.events.of(Accumulated)) == 3


@pytest.mark.parametrize("where", ["backward", "accumulate"])
async def test_backward_without_memory_adds_nothing_and_is_answered_busy(scene: ReplicaScene, where: str) -> None:
    await scene.there(0)
    scene.part.on[where] = fails(0)
    await scene.backward(0)
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction) == ("busy", "backward")
    assert len(scene.replica.events.of(GraphsDropped)) == 1
    assert (scene.part.held, len(scene.server._table)) == ({}, 0)
    await scene.there(0, attempt=1)
    await scene.backward(0, attempt=1)
    await eventually(lambda: scene.part.held)
    assert len(scene.replica.events.of(Accumulated)) == 1


async def test_sum_that_broke_off_for_want_of_memory_ends_the_replica() -> None:
    scene = ReplicaScene()
    await scene.open()

    def accumulate(one: Any, gradients: Any, **how: Any) -> None:
        scene.part.held[one.microbatch] = 0.0
        raise torch.OutOfMemoryError(NO_MEMORY)

    scene.part.accumulate = accumulate  # type: ignore[method-assign]
    async with working(scene.replica) as (task,):
        await scene.there()
        await scene.backward()
        with pytest.raises(ExceptionGroup) as ended:
            await task
    assert ended.group_contains(BugError, match="the step's sum is corrupt")


async def test_work_that_never_fits_is_told_as_a_failure_after_some_tries(scene: ReplicaScene) -> None:
    scene.part.on["forward"] = failing(torch.OutOfMemoryError(NO_MEMORY))
    for attempt in range(MOST_ALONE):
        await scene.forward(attempt=attempt)
        await eventually(lambda told=attempt + 1: len(scene.trainer.of("blocked")) == told)
    assert [blocked.code for blocked in scene.trainer.of("blocked")] == ["busy"] * (MOST_ALONE - 1) + ["failed"]
    assert NO_MEMORY in scene.trainer.of("blocked")[-1].reason
    assert [event.graphs for event in scene.replica.events.of(GraphsDropped)] == [0] * MOST_ALONE


@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
async def test_step_whose_replica_has_no_memory_now_and_then_counts_each_microbatch_once(hosted: bool) -> None:
    sums = []
    for turns in ((), (1, 4, 9)):
        crew = await Crew.of([[A0], [B0, B1]], hosted=hosted, pace=quick())
        for replica in crew.replicas.values():
            replica.part.on = {where: fails(*turns) for where in ("forward", "backward")}
        leader = await crew.feed(12)
        fired = [event for replica in crew.replicas.values() for event in replica.events.of(GraphsDropped)]
        assert bool(fired) == bool(turns)
        everything = {microbatch(position) for position in range(12)}
        assert {journey.key.microbatch for journey in leader.finished} == everything
        assert crew.side.events.of(JourneySetAside) == []
        async with crew.working():
            await crew.settle(crew.assigned(leader))
        assert crew.held(A0) == crew.held(B0, B1) == everything
        sums.append(crew.sums())
    assert sums[0] == sums[1]


async def test_settling_without_memory_tries_once_more() -> None:
    crew = await Crew.of([[A0], [B0, B1]])
    leader = await crew.feed(4)
    replica = crew.replicas[B0]
    everything = {journey.key.microbatch: (A0, B0) for journey in leader.finished}
    async with crew.working():
        await replica.server.settle(1, {})
        replica.part.on["backward"] = fails(0)
        await replica.server.settle(1, works(everything))
        assert len(replica.events.of(GraphsDropped)) == 1
        assert set(replica.part.held) == set(everything)
        replayed = [event.microbatch for event in replica.events.of(ContributionReplayed)]
        assert sorted(replayed) == sorted(everything)
        await replica.server.settle(1, {})
        replica.part.on["backward"] = failing(torch.OutOfMemoryError(NO_MEMORY))
        with pytest.raises(PeerError, match=NO_MEMORY):
            await replica.server.settle(1, works(everything))
        assert replica.part.held == {}
