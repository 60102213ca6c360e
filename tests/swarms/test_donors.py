"""A joiner in a whole swarm, whose donors are killed while it downloads and while it follows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.events import DigestMismatch, DonorDropped, PeerReady, StateDownloaded, StepClosed
from swarm.ids import PeerId
from swarm.state import snapshot as chunks
from swarm.state.sharing import Sharing
from tests.harness.expect import eventually
from tests.harness.swarm import LocalSwarm

LONG_S = 300.0


async def join_while(swarm: LocalSwarm) -> None:
    """A stage host joins after step 2; return when it is a member that has closed two more steps."""
    await eventually(lambda: any(closed.step >= 2 for closed in swarm.events(StepClosed)), deadline_s=LONG_S)
    peer = await swarm.join("late", "stage", 300, stage=0)
    await eventually(lambda: peer.events.of(PeerReady) or peer.outcome, deadline_s=LONG_S)
    assert peer.events.of(PeerReady), peer.outcome
    joined = peer.events.of(PeerReady)[0].step
    await eventually(lambda: any(c.step >= joined + 2 for c in peer.events.of(StepClosed)), deadline_s=LONG_S)


async def train(swarm: LocalSwarm) -> None:
    await swarm.open()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(swarm.run())
        await join_while(swarm)
        running.cancel()


def name_of(swarm: LocalSwarm, peer: PeerId) -> str:
    return next(one.settings.name for one in swarm.peers.values() if one.endpoint.peer == peer)


async def test_joiner_downloads_from_all_replicas_and_one_that_is_killed_costs_it_nothing_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    swarm = LocalSwarm(tmp_path, hosts=3, trainers=1, run={"steps": 1000}, split={"stages": 1})
    killed: list[PeerId] = []
    arrived = Sharing.arrived

    def kill_a_donor(sharing: Sharing, donor: PeerId, chunk: int, now: float) -> bool:
        first = arrived(sharing, donor, chunk, now)
        late = swarm.peers.get("late")
        if late is not None and not killed and len(sharing.donors) == 3:
            killed.append(donor)
            swarm.kill(name_of(swarm, donor))
        return first

    monkeypatch.setattr(Sharing, "arrived", kill_a_donor)
    await train(swarm)
    late = swarm.peers["late"]
    assert killed, "the fault did not fire"
    assert [one.donor for one in late.events.of(DonorDropped)] == killed
    (done,) = late.events.of(StateDownloaded)
    assert set(done.donors) >= {killed[0]}
    assert len(done.donors) == 3
    assert done.bytes_refetched < done.bytes_received / 4, "what was under way and what was late, not what it had"
    assert not swarm.events(DigestMismatch)
