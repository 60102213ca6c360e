"""Peers that join and leave a run in progress: the run goes on, exactly, and nobody waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from data_shards.build import build_shard
from swarm.errors import Ending
from swarm.events import Accumulated, DigestMismatch, PeerReady, RosterChanged, StateDownloaded, StepClosed
from tests.harness.expect import eventually
from tests.harness.swarm import LocalPeer, LocalSwarm, _documents


async def after_step(swarm: LocalSwarm, step: int) -> None:
    """Until the founder has closed a step."""
    founder = swarm.peers["bootstrap"].events
    await eventually(lambda: any(closed.step >= step for closed in founder.of(StepClosed)))


async def ready(peer: LocalPeer) -> PeerReady:
    """Until a peer is a member."""
    await eventually(lambda: bool(peer.events.of(PeerReady)))
    return peer.events.of(PeerReady)[0]


@pytest.mark.parametrize("ends", ["private", "hosted"])
async def test_stage_host_and_trainer_join_a_run_in_progress_and_leave_it(tmp_path: Path, ends: str) -> None:
    swarm = LocalSwarm(tmp_path, hosts=2, trainers=1, run={"steps": 40}, split={"ends": ends})
    shard = tmp_path / "late"
    build_shard(shard, _documents(7), swarm.tokenizer)

    async def story() -> None:
        await after_step(swarm, 2)
        host = await swarm.join("late-host", "stage", 300, stage=1)
        trainer = await swarm.join("late-trainer", "trainer", 301, data=shard)
        joined = await ready(host), await ready(trainer)
        assert [one.part for one in joined] == ["stage-1", "ends" if ends == "private" else None]
        assert all(one.step > 2 for one in joined)
        await after_step(swarm, max(one.step for one in joined) + 4)
        assert host.membership is not None
        host.membership.leave("the test", Ending.DONE)
        await eventually(lambda: host.membership is not None and "late-host" not in names(swarm))

    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run())
        group.create_task(story())

    assert not swarm.events(DigestMismatch)
    history = swarm.history()
    assert [record["step"] for record in history] == list(range(41))
    changes = swarm.peers["bootstrap"].events.of(RosterChanged)
    assert [[m["name"] for m in c.joined] for c in changes if c.joined]
    assert [[m["name"] for m in c.left] for c in changes if c.left] == [["late-host"]]
    assert {"late-host", "late-trainer"} == {m["name"] for c in changes for m in c.joined}
    work = {peer.settings.name: len(peer.events.of(Accumulated)) for peer in swarm.peers.values()}
    assert work["late-host"] > 0
    late = swarm.peers["late-trainer"].endpoint.peer
    fed = {m["microbatch"][0] for record in history for m in record["committed"]}
    assert late in fed
    assert swarm.peers["late-host"].events.of(StateDownloaded)


def names(swarm: LocalSwarm) -> set[str]:
    """Who is in the founder's roster."""
    founder = swarm.peers["bootstrap"].membership
    assert founder is not None
    return {member.name for member in founder.roster.members}
