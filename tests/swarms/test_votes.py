"""A majority is killed in one step and comes back in part: with its votes the run goes on, without them it waits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import Accumulated, StepClosed, Waiting
from swarm.sim.loop import run_world
from tests.harness.faults_memory import MemoryWorld
from tests.swarms.story import DONE, live_through

STEPS = 12
PACE = {"forward": 0.3, "backward": 0.3}
KILLED = ("bootstrap", "host-1", "host-2", "trainer-1")
RETURNED = ("host-1", "host-2")
STAYED = ("host-0", "host-3", "trainer-0")
MIDST = On(Accumulated, peer="host-0", where={"step": 3})
TOO_FEW = On(Waiting, where={"what": lambda what: what.startswith("a majority: ")}, after="kill")


def struck(root: Path, *, keep_disk: bool) -> SimSwarm:
    """Four of seven are killed in step 3; two of them are started again when the others see that they are too few."""
    swarm = SimSwarm(root, hosts=4, trainers=2, run={"steps": STEPS}, stage_s=PACE)
    plan = FaultPlan(
        Strike("kill", MIDST, Kill(KILLED)),
        *(Strike(name, TOO_FEW, Restart(name, keep_disk=keep_disk)) for name in RETURNED),
        world=MemoryWorld(swarm),
    )

    async def live() -> None:
        with contextlib.suppress(TimeoutError):
            await swarm.run(timeout_s=100.0)

    run_world(live())
    plan.assert_fired()
    return swarm


def closed(swarm: SimSwarm, name: str) -> list[int]:
    """The steps that a peer took part in."""
    return [event.step for event in swarm.peers[name].events.of(StepClosed)]


def test_majority_that_was_killed_and_returns_with_its_votes_lets_the_run_go_on(tmp_path: Path) -> None:
    swarm = struck(tmp_path, keep_disk=True)
    for name in STAYED:
        assert swarm.peers[name].outcome == DONE
        assert closed(swarm, name) == list(range(1, STEPS + 1))
    for name in RETURNED:
        back = f"{name}-again-1"
        assert swarm.peers[back].outcome == DONE
        assert 3 not in closed(swarm, back), "it voted, and did nothing else"
        assert closed(swarm, back)[-1] == STEPS
    check_run([tmp_path]).assert_sound()


def test_majority_that_was_killed_and_returns_without_its_votes_decides_nothing(tmp_path: Path) -> None:
    swarm = struck(tmp_path, keep_disk=False)
    for name in swarm.peers:
        assert max(closed(swarm, name), default=0) <= 2
    check_run([tmp_path]).assert_sound()


@pytest.mark.parametrize("keep_disk", [True, False])
def test_peer_started_again_at_once_is_let_in_and_there_is_one_history(tmp_path: Path, keep_disk: bool) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS}, stage_s=PACE)
    again = Strike("again", MIDST, Restart("host-1", keep_disk=keep_disk))
    live_through(swarm, tmp_path, again, steps=STEPS, timeout_s=400.0)
    assert "host-1-again-1" in swarm.peers


@pytest.mark.parametrize("victim", ["trainer-0", "host-0"])
def test_run_of_two_voters_goes_on_when_the_one_that_was_killed_is_started_again(tmp_path: Path, victim: str) -> None:
    """Its part has no other replica, and there is no majority without its vote: it gives that, and takes its place."""
    run = {"steps": STEPS, "copies": 2}
    swarm = SimSwarm(tmp_path, hosts=1, trainers=1, split={"stages": 1}, run=run, stage_s=PACE)
    seen: dict[str, Any] = {"what": lambda what: victim in what or "voters" in what}
    again = Strike("again", On(Waiting, where=seen, after="kill"), Restart(victim))
    live_through(swarm, tmp_path, Strike("kill", MIDST, Kill((victim,))), again, steps=STEPS, timeout_s=400.0)
    assert f"{victim}-again-1" in swarm.peers


def test_run_goes_on_when_all_replicas_of_a_stage_and_the_trainer_are_killed_and_started_again(tmp_path: Path) -> None:
    """Three of five voters: those that are left have a copy of the stage, and no majority to take it over with."""
    swarm = SimSwarm(tmp_path, hosts=4, trainers=1, run={"steps": STEPS, "copies": 2}, stage_s=PACE)
    victims = ("host-1", "host-3", "trainer-0")
    again = (Strike(name, TOO_FEW, Restart(name)) for name in victims)
    live_through(swarm, tmp_path, Strike("kill", MIDST, Kill(victims)), *again, steps=STEPS, timeout_s=400.0)
    assert {f"{name}-again-1" for name in victims} <= swarm.peers.keys()
