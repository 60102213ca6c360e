"""Groups form at once, and each peer says who was in its part's averaging and who was not, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from peers.chaos.faults import Kill
from peers.chaos.plan import On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import Participation, PeerReady, RoundDone, StepClosed
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.harness.expect import eventually
from tests.swarms.story import live_through

LATENCY_S = 0.02
WORKED_S = {"forward": 0.05, "backward": 0.1}


def swarm_of(root: Path, hosts: int, *, steps: int = 6, may_fail: bool = False) -> SimSwarm:
    links = Links.parse({"default": {"latency_ms": 1000 * LATENCY_S}})
    return SimSwarm(
        root, hosts=hosts, trainers=2, links=links, may_fail=may_fail, stage_s=WORKED_S, run={"steps": steps},
        split={"stages": 1},
    )  # fmt: skip


def of(swarm: SimSwarm, part: str, step: int) -> dict[str, Participation]:
    """What each peer said of a part in a step, by name."""
    return {
        name: event
        for name, peer in swarm.peers.items()
        for event in peer.events.of(Participation)
        if (event.part, event.step) == (part, step)
    }


def test_late_replica_is_told_from_which_step_on_it_averages(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 2, steps=14)

    async def story() -> None:
        founder = swarm.peers["bootstrap"].events
        await eventually(lambda: any(event.step >= 2 for event in founder.of(StepClosed)), deadline_s=600.0)
        await swarm.join("late", "stage", 300)

    async def both() -> None:
        await swarm.open()
        await asyncio.gather(swarm.run(), story())

    run_world(both())
    late = swarm.peers["late"]
    step = late.events.of(PeerReady)[0].step
    told = of(swarm, "stage-0", step)
    assert set(told) == {"host-0", "host-1", "late"}
    for event in told.values():
        assert (event.live, event.participating) == (3, 2)
        assert event.why[late.endpoint.peer] == f"joined with step {step}: averages from step {step + 1} on"
        assert event.whole
    first = min(event.step for event in late.events.of(RoundDone))
    assert first == step + 1
    assert all(event.participating == 3 for event in of(swarm, "stage-0", step + 1).values())


def test_replica_whose_only_other_is_lost_hears_that_it_is_alone(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 2, may_fail=True)
    on = On(RoundDone, peer="host-1", where={"step": 3})
    plan = live_through(swarm, tmp_path, Strike("death", on, Kill(("host-1",))), steps=6, timeout_s=900.0)
    assert plan.counts == {"kill": 1}
    dead = swarm.peers["host-1"].endpoint.peer
    said = [event for event in swarm.peers["host-0"].events.of(Participation) if not event.whole]
    assert [event.step for event in said] == list(range(said[0].step, 7))
    assert said[0].why[dead].startswith("lost: ")
    assert {(event.live, event.participating, event.averaged) for event in said} == {(1, 1, 1)}
    assert not said[-1].why
