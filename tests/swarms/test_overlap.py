"""Steps that are fed early while the one before is closed: every promise of a run holds, with two of them open."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending
from swarm.events import HopMoved, RosterChanged, StepClosed
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.harness.crashes import crashes, live, sweep
from tests.harness.expect import eventually
from tests.swarms.story import live_through

STEPS = 8
SPEED: Mapping[str, Any] = {"mode": "overlap", "early_share": 0.5}
FED_EARLY: Mapping[str, Any] = {"speed": SPEED, "batch": {"microbatch_size": 1, "microbatches_per_step": 8}}
STAGE_S = {"forward": 0.05, "forward_loss": 0.05, "backward": 0.1}


def swarm_of(root: Path, *, latency_ms: float = 20.0, run: Mapping[str, Any] | None = None, **shape: Any) -> SimSwarm:
    root.mkdir(parents=True, exist_ok=True)
    links = Links.parse({"default": {"latency_ms": latency_ms}})
    whole = {"hosts": 4, "trainers": 2, "run": {"steps": STEPS, **(run or {})}, **FED_EARLY, **shape}
    return SimSwarm(root, links=links, stage_s=STAGE_S, **whole)


def early(swarm: SimSwarm) -> list[int]:
    """How many microbatches of each step were computed with older parameters."""
    return [sum(one.get("early", False) for one in record["committed"]) for record in swarm.history()]


def digests(swarm: SimSwarm) -> list[dict[str, str]]:
    return [record["digests"] for record in swarm.history()]


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_steps_are_fed_early_and_take_less_time(tmp_path: Path, ends: str) -> None:
    took = {}
    for mode, speed in (("overlap", SPEED), ("sync", {})):
        swarm = swarm_of(tmp_path / mode, latency_ms=100.0, split={"ends": ends}, speed=speed)
        ended: list[float] = []

        async def timed(swarm: SimSwarm = swarm, ended: list[float] = ended) -> None:
            await swarm.run(timeout_s=600.0)
            ended.append(swarm.network.clock.monotonic())

        run_world(timed())
        check_run([tmp_path / mode]).assert_sound()
        (took[mode],) = ended
        fed = early(swarm)
        assert fed[:2] == [0, 0]
        told = [event.early for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0]
        assert told == fed[1:]
        assert all(count == (0 if mode == "sync" else 4) for count in fed[3:])
    assert took["overlap"] < took["sync"]


def test_reproducible_run_feeds_the_same_early_whatever_the_timing(tmp_path: Path) -> None:
    runs = []
    for latency_ms in (5.0, 150.0):
        swarm = swarm_of(tmp_path / f"{latency_ms}", latency_ms=latency_ms, run={"reproducible": True})
        run_world(swarm.run(timeout_s=600.0))
        runs.append(swarm)
    assert early(runs[0]) == early(runs[1]) == [0, 0, *[4] * (STEPS - 1)]
    assert digests(runs[0]) == digests(runs[1])


def test_who_joins_is_given_no_early_work_before_it_has_the_parameters(tmp_path: Path) -> None:
    quiet = swarm_of(tmp_path / "quiet", run={"reproducible": True, "steps": 14})
    run_world(quiet.run(timeout_s=600.0))
    lively = swarm_of(tmp_path / "lively", run={"reproducible": True, "steps": 14})

    async def story() -> None:
        await lively.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(lively.run(timeout_s=600.0))
            await eventually(lambda: any(closed.step >= 3 for closed in lively.events(StepClosed)), deadline_s=120.0)
            await lively.join("late", "stage", 300)

    run_world(story())
    assert any(change.joined for change in lively.events(RosterChanged))
    newcomers = {m["peer"]: m["since"] for r in lively.history() for m in r["roster"] if m.get("since")}
    assert newcomers
    for record in lively.history():
        for one in record["committed"]:
            if one.get("early"):
                assert all(newcomers.get(peer, 0) < record["step"] for peer in one["route"])
    assert digests(lively) == digests(quiet)


def test_death_at_an_event_leaves_nothing_between_two_steps_when_both_are_open(tmp_path: Path) -> None:
    calm = live(tmp_path / "calm", **FED_EARLY)
    assert sum(early(calm.swarm)) > 0
    chosen = crashes(calm, most=8, seed=4, kinds=lambda kind: " " not in kind)
    assert len({crash.victim for crash in chosen}) >= 3
    sweep(tmp_path, calm, chosen, **FED_EARLY)


def test_trainer_that_is_given_the_work_of_another_takes_up_what_it_had_begun_early(tmp_path: Path) -> None:
    """Its shard must not go on behind microbatches that a record leaves out."""
    swarm = swarm_of(tmp_path, may_fail=True)
    death = Strike("death", On("JourneyCompleted", peer="trainer-1", nth=10), Kill(("trainer-1",)))
    live_through(swarm, tmp_path, death, steps=STEPS, timeout_s=600.0)


def test_early_work_goes_on_without_a_replica_that_left_with_the_step_before(tmp_path: Path) -> None:
    """No replica takes a route that names a stranger: who has left and had no turn yet is replaced as well."""
    batch = {"microbatch_size": 1, "microbatches_per_step": 32}
    deep = {"hosts": 6, "split": {"stages": 3}, "model": {"layers": 3, "dim": 16, "context": 8}}
    swarm = swarm_of(tmp_path, run={"steps": 4}, batch=batch, **deep)

    async def story() -> None:
        peer = await swarm.open() or swarm.peers["host-4"]
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=100.0))
            await eventually(lambda: any(closed.step >= 2 for closed in swarm.events(StepClosed)), deadline_s=60.0)
            assert peer.membership is not None
            peer.membership.leave("the test", Ending.DRAINED)

    run_world(story())
    check_run([tmp_path]).assert_sound()
    (left,) = {event.step for event in swarm.events(RosterChanged) if event.left}
    moved = [event for event in swarm.events(HopMoved) if event.reason == "refused: it takes part no more"]
    assert {event.step for event in moved} == {left + 1}
