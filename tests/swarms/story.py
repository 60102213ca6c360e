"""A simulated run with faults, seen to its end, whose peers then have one whole history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.chaos.plan import FaultPlan, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.sim.loop import run_world
from tests.harness.faults_memory import MemoryWorld

DONE = "every step of the run is closed"


def live_through(
    swarm: SimSwarm,
    root: Path,
    *strikes: Strike,
    steps: int,
    timeout_s: float,
    limits: Limits | None = None,
    not_promised: Collection[str] = (),
) -> FaultPlan:
    """All faults fire, everybody but the killed sees the run to its end, and it keeps its invariants, but for one that
    its mode does not promise: one history, every microbatch once, none lost, and cursors that say so. Raises
    AssertionError."""
    with MemoryWorld(swarm) as world:
        plan = FaultPlan(*strikes, world=world)
        run_world(swarm.run(timeout_s=timeout_s))
    plan.assert_fired()
    ends = {name: peer.outcome for name, peer in swarm.peers.items() if not swarm.is_dead(name)}
    assert ends == dict.fromkeys(ends, DONE)
    report = check_run([root], limits)
    report = replace(report, failures=tuple(one for one in report.failures if one.invariant not in not_promised))
    report.assert_sound()
    assert report.steps == steps
    return plan


def run_beside(swarm: SimSwarm, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a swarm beside what happens to it, and end it with that."""

    async def both() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(swarm.run())
            await story()
            running.cancel()

    run_world(both())
