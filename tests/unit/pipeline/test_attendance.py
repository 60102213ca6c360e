"""Open questions to replicas, from the first need of them to the end of the group."""

from __future__ import annotations

import asyncio

import pytest

from swarm.ids import PeerId
from swarm.pipeline.trainer.liveness import LivenessProbes
from swarm.sim.network import SimNetwork
from tests.harness.rigs.pipeline import HandClock

REPLICA = PeerId("R")


async def test_need_of_a_peer_while_the_group_is_ending_is_nobody_s_error(recwarn: pytest.WarningsRecorder) -> None:
    clock = HandClock()
    endpoint = SimNetwork(clock).endpoint(PeerId("T"))
    attended = []

    async def feed() -> None:
        async with asyncio.TaskGroup() as group:
            attendance = LivenessProbes(endpoint, clock, group, lambda peer, reason: None)

            async def need_it_late() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    attendance.need([REPLICA])
                    attended.append(REPLICA in attendance._asked)

            group.create_task(need_it_late())
            await asyncio.Event().wait()

    feeding = asyncio.create_task(feed())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    assert attended == [False]
    assert not recwarn.list
