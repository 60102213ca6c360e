"""Open questions to replicas, from the first need of them to the end of the tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from swarm.ids import PeerId
from swarm.pipeline.trainer.trainer import TrainerTasks
from swarm.sim.network import SimNetwork
from tests.harness.rigs.pipeline import HandClock

REPLICA = PeerId("R")


@dataclass
class FakeContext:
    """As much of a :class:`~swarm.pipeline.trainer.journey.JourneyContext` as questions take."""

    endpoint: Any
    clock: Any


async def test_need_of_a_peer_while_the_group_is_ending_is_nobody_s_error(recwarn: pytest.WarningsRecorder) -> None:
    clock, attended = HandClock(), []
    context = FakeContext(SimNetwork(clock).endpoint(PeerId("T")), clock)
    tasks = TrainerTasks(context, lambda peer, reason: None)  # type: ignore[arg-type]

    async def need_it_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.probes.need([REPLICA])
            attended.append(REPLICA in tasks.probes._asked)

    tasks.begin(need_it_late())
    await asyncio.sleep(0)
    await tasks.end()
    assert attended == [False]
    assert not recwarn.list
