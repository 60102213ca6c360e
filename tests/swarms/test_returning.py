"""Who comes back when the run is over, or while another of the same identity takes part, is told so and ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

from peers.chaos.faults import Pause
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending, RunEnded
from swarm.events import Accumulated, StepClosed, Waiting
from swarm.sim.loop import run_world
from swarm.step.calls import first_leaf
from tests.harness.expect import eventually
from tests.harness.faults_memory import MemoryWorld

PACE = {"forward": 0.3, "backward": 0.3}
STEPS, ALONE_S = 6, 600.0


def test_peer_that_slept_through_the_end_of_the_run_ends_in_a_stated_time(tmp_path: Path) -> None:
    swarm = SimSwarm(
        tmp_path, hosts=4, trainers=2, run={"steps": STEPS, "wait_for_lost_s": ALONE_S}, stage_s=PACE, may_fail=True
    )
    plan = FaultPlan(
        Strike("sleep", On(Accumulated, peer="host-1", where={"step": 3}), Pause(("host-1",), seconds=300.0)),
        world=MemoryWorld(swarm),
    )
    times: list[float] = []

    async def live() -> None:
        with contextlib.suppress(Exception):
            await swarm.run(timeout_s=3000.0)
        times.append(swarm.network.clock.wall())

    run_world(live())
    plan.assert_fired()
    others = [peer.outcome for name, peer in swarm.peers.items() if name != "host-1"]
    assert set(others) == {"every step of the run is closed"}
    outcome = swarm.peers["host-1"].outcome
    assert isinstance(outcome, BaseExceptionGroup)
    ended = first_leaf(outcome)
    assert isinstance(ended, RunEnded)
    assert ended.ending is Ending.UNREACHABLE
    assert f"nobody of the run has answered this peer for {ALONE_S:.0f} s" in ended.reason
    assert "host-0" in ended.reason
    assert times[0] - plan.fired["sleep"].wall < 300.0 + ALONE_S + 60.0


def test_way_between_all_peers_that_is_away_for_ten_minutes_ends_nobody(tmp_path: Path) -> None:
    """As a relay between sites does: for members, for one on its way in, and for one that is started anew meanwhile."""
    run = {"steps": STEPS, "quorum_grace_s": 0}
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run=run, stage_s=PACE)
    away: list[int] = []

    async def strike() -> None:
        await eventually(lambda: any(closed.step >= 2 for closed in swarm.events(StepClosed)), deadline_s=300)
        await swarm.join("late", "stage", 300)
        await eventually(lambda: swarm.peers["late"].events.of(Waiting), deadline_s=60)
        swarm.kill("host-1")
        await swarm.join("again", "stage", 101, returns=True)
        for one, other in itertools.permutations({peer.endpoint.peer for peer in swarm.peers.values()}, 2):
            swarm.network.cut(one, other)
        await asyncio.sleep(600)
        away.append(max(closed.step for closed in swarm.events(StepClosed)))
        swarm.network.heal()

    async def live() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=3000.0))
            group.create_task(strike())

    run_world(live())
    assert away[0] < STEPS, "the way was away to the end"
    ends = {name: peer.outcome for name, peer in swarm.peers.items() if name != "host-1"}
    assert ends == dict.fromkeys(ends, "every step of the run is closed")
    for name in ("late", "again"):
        assert any("next: " in event.what for event in swarm.peers[name].events.of(Waiting)), name
