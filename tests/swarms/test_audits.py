"""Hops that others of the stage compute again: who lies is found out, and nobody else is accused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.liars.lies import Liar, lying
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import HopAudited, JourneySetAside, StepClosed
from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.trainer.audits import STANDING, share_of
from swarm.sim.loop import PEER, run_world
from tests.harness.expect import eventually

SHAPE: dict[str, Any] = {
    "hosts": 6,
    "model": {"layers": 2, "dim": 16, "context": 16},
    "batch": {"microbatch_size": 4, "microbatches_per_step": 12},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}
EXACT = {"steps": 4, "reproducible": True}


def outcomes(swarm: SimSwarm) -> dict[str, set[str]]:
    """By what came of audits, whose hops these were."""
    found: dict[str, set[str]] = {}
    for event in swarm.events(HopAudited):
        found.setdefault(event.outcome, set()).add(event.peer)
    return found


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_honest_swarm_in_which_every_hop_is_computed_again_accuses_nobody_and_learns_the_same(
    tmp_path: Path, ends: str
) -> None:
    swarms = []
    for audit in (0.0, 1.0):
        more = {"split": {"stages": 2, "ends": ends}, "verify": {"audit": audit}, "run": EXACT}
        swarms.append(SimSwarm(tmp_path / f"{audit:g}", **SHAPE | more))
        run_world(swarms[-1].run())
    usual, audited = swarms
    assert not usual.events(HopAudited)
    assert list(outcomes(audited)) == ["passed"]
    assert len(audited.events(HopAudited)) == 2 * 12 * 4
    assert not audited.events(JourneySetAside)
    assert [one["digests"] for one in audited.history()] == [one["digests"] for one in usual.history()]


def test_host_that_joins_is_checked_more_often_until_each_trainer_had_hops_of_it_found_right(tmp_path: Path) -> None:
    shape = SHAPE | {"hosts": 4, "trainers": 2, "split": {"stages": 2}, "run": {"steps": 10}, "verify": {"audit": 0.05}}
    swarm, drawn, joined = SimSwarm(tmp_path, **shape), 0.11, 2
    until = next(number for number in range(STANDING) if share_of(0.05, number) <= drawn)
    trainers = [peer for peer in swarm.peers.values() if peer.settings.role == "trainer"]

    async def story() -> None:
        await swarm.open()
        for peer in swarm.peers.values():
            peer.around = dataclasses.replace(peer.around, chance=lambda: drawn)
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run())
            await eventually(lambda: any(one.step >= joined for one in swarm.events(StepClosed)), deadline_s=300)
            await swarm.join("late", "stage", 300, stage=0)
        for trainer in trainers:
            assert trainer.membership is not None
            checked.append(trainer.membership.situation.activity().checked)

    checked = list[Mapping[PeerId, int]]()
    run_world(story())
    late = swarm.peers["late"].endpoint.peer
    for trainer, shown in zip(trainers, checked, strict=True):
        audits = trainer.events.of(HopAudited)
        found = Counter(one.peer for one in audits if one.outcome == "passed")
        assert found.keys() == {late}, "those with which the run began are known"
        assert found[late] >= until, "drawn until so many were found right, and those that were under way then"
        assert shown == found
        hops = [one for record in swarm.history() for one in record["committed"] if late in one["route"]]
        assert sum(one["microbatch"][0] == trainer.endpoint.peer for one in hops) > found[late]


@pytest.mark.parametrize("lie", ["output-noise", "gradient-x-50"])
def test_liar_among_three_is_found_out_barred_and_what_it_did_counts_nowhere(tmp_path: Path, lie: str) -> None:
    shape = SHAPE | {"split": {"stages": 2}, "run": {"steps": 6}, "verify": {"audit": 1.0}}
    who = "host-1" if lie == "gradient-x-50" else "host-0"
    swarm = SimSwarm(tmp_path, **shape, may_fail=True)
    with lying(Liar(lie, mine=lambda: PEER.get() == who)) as told:
        run_world(swarm.run())
    assert told.fired
    liar = swarm.peers[who].endpoint.peer
    found = outcomes(swarm)
    assert found["failed"] == {liar}
    assert not swarm.events(JourneySetAside)
    rows = [one for record in swarm.history()[1:] for one in record["committed"]]
    assert all(liar not in one["route"] for one in rows), "others have computed what it lied about"
    audits = [event for event in swarm.events(HopAudited) if event.outcome == "failed"]
    assert {event.microbatch for event in audits} <= {MicrobatchId(*one["microbatch"]) for one in rows}
    records = swarm.history()[1:]
    assert len(swarm.peers["bootstrap"].events.of(StepClosed)) >= 6
    assert {liar} <= {peer for record in records for peer in record["absent"]}
