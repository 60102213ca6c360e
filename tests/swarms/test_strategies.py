"""Whole runs whose replicas average in groups that swap: the weights are those of one group of all, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.events import DigestMismatch, RoundDone, StepClosed
from tests.harness.faults import On, Strike
from tests.harness.faults_kinds import Kill
from tests.harness.simulated import SimSwarm
from tests.harness.swarm import LocalSwarm
from tests.swarms.story import live_through

SHAPE: dict[str, Any] = {
    "hosts": 4,
    "trainers": 4,
    "split": {"stages": 1},
    "run": {"reproducible": True},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 8},
}


async def digests(root: Path, strategy: str) -> tuple[list[dict[str, str]], LocalSwarm]:
    """The weights after each step, by part."""
    swarm = LocalSwarm(root, averaging={"strategy": strategy}, **SHAPE)
    await swarm.run()
    assert not swarm.events(DigestMismatch)
    return [record["digests"] for record in swarm.history()], swarm


@pytest.mark.parametrize("strategy", ["grid", "butterfly-groups"])
async def test_groups_that_swap_give_the_weights_of_one_group_of_all(
    tmp_path_factory: pytest.TempPathFactory, strategy: str
) -> None:
    expected, _ = await digests(tmp_path_factory.mktemp("everyone"), "everyone")
    found, swarm = await digests(tmp_path_factory.mktemp(strategy), strategy)
    assert found == expected
    rounds = swarm.events(RoundDone)
    assert {(event.round, event.members) for event in rounds} == {(0, 2), (1, 2)}
    assert len(rounds) == 2 * 8 * swarm.manifest.run.steps


def test_replica_that_dies_between_two_rounds_costs_an_attempt_and_no_microbatch(tmp_path: Path) -> None:
    """Three are left then, which make no grid: all of them average at once."""
    swarm = SimSwarm(
        tmp_path, averaging={"strategy": "grid"}, may_fail=True, **{**SHAPE, "run": {"reproducible": True, "steps": 5}}
    )
    first = On(RoundDone, peer="host-1", where={"step": 2, "round": 0})
    plan = live_through(swarm, tmp_path, Strike("death", first, Kill(("host-1",))), steps=5, timeout_s=600.0)
    assert plan.counts == {"kill": 1}
    last = [event for event in swarm.events(RoundDone) if event.step == 5 and event.part == "stage-0"]
    assert {(event.round, event.members) for event in last} == {(0, 3)}
    assert max(event.step for event in swarm.events(StepClosed)) == 5
