"""Peers that join and leave a run in progress: the run goes on, exactly, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending
from swarm.events import (
    DigestMismatch,
    PartAssigned,
    PeerReady,
    StepClosed,
)
from swarm.ids import PeerId
from swarm.network.discovery.records import MAX_TTL_S, PeerRecord, encode_record, key_name
from swarm.sim.loop import run_world
from tests.harness.expect import eventually
from tests.harness.swarm import LocalPeer, LocalSwarm


async def after_step(swarm: LocalSwarm, step: int) -> None:
    """Until the founder has closed a step."""
    founder = swarm.peers["bootstrap"].events
    await eventually(lambda: any(closed.step >= step for closed in founder.of(StepClosed)))


async def ready(peer: LocalPeer) -> PeerReady:
    """Until a peer is a member."""
    await eventually(lambda: bool(peer.events.of(PeerReady)))
    return peer.events.of(PeerReady)[0]


@pytest.mark.parametrize("liars", [0, 200])
def test_several_that_join_at_once_spread_over_the_stages(tmp_path: Path, liars: int) -> None:
    """One stage has two replicas more than the other; anyone who looked at the roster alone would take the same one.
    Liars never come, and say all the time that they are on the way to that stage."""
    swarm = SimSwarm(tmp_path, hosts=5, trainers=1, run={"steps": 30}, stage_s={"forward": 0.05, "backward": 0.1})
    lies: list[bool] = []

    async def story() -> None:
        await after_step(swarm, 1)
        hosts = [name for name in swarm.peers if name.startswith("host-") and part_of(swarm, name) == "stage-1"]
        leave(swarm.peers[hosts[0]])
        await eventually(lambda: [len(held) for held in swarm.peers["bootstrap"].membership.roster.columns()] == [3, 1])
        record = PeerRecord(role="stage", name="liar", part="stage-1", incarnation=1, status="waiting", step=0)
        key, expiry = key_name(swarm.manifest.run_id, PeerRecord), swarm.network.clock.wall() + MAX_TTL_S
        for number in range(liars):
            liar = PeerId(f"L1ar{number}")
            lies.append(swarm.network.store(key, liar, liar, expiry, encode_record(record)))
        joiners = [await swarm.join(f"late-{number}", "stage", 300 + number) for number in range(4)]
        for joiner in joiners:
            await ready(joiner)
        assert sum(len(held) for held in swarm.peers["bootstrap"].membership.roster.columns()) == 8

    run_world(beside(swarm, story()))
    assert lies == [True] * liars, "the fault did not fire"
    taken = [one.part for number in range(4) for one in swarm.peers[f"late-{number}"].events.of(PartAssigned)]
    assert len(taken) == 4, "nobody chose twice"
    replicas = 3 + taken.count("stage-0"), 1 + taken.count("stage-1")
    assert abs(replicas[0] - replicas[1]) <= (2 if liars else 0), "of liars no more than two are believed in"
    assert not swarm.events(DigestMismatch)
    assert [record["step"] for record in swarm.history()] == list(range(31))


async def beside(swarm: SimSwarm, story: Coroutine[Any, Any, None]) -> None:
    """Run a swarm and a story of it."""
    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run())
        group.create_task(story)


def part_of(swarm: SimSwarm, name: str) -> str | None:
    """What a peer holds."""
    membership = swarm.peers[name].membership
    assert membership is not None
    return membership.roster[swarm.peers[name].endpoint.peer].part


def leave(peer: LocalPeer) -> None:
    """Have a member leave in order."""
    assert peer.membership is not None
    peer.membership.leave("the test", Ending.DONE)
