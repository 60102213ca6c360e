"""A trainer that must leave microbatches to others, and is given room for them again in the same step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from swarm.consensus.ledger import Ledger
from swarm.consensus.records import Contribution
from swarm.errors import WrongStep
from swarm.events import Accumulated, JourneyStarted
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.trainer.flight import EarlyRules
from swarm.pipeline.trainer.journey import FinishedJourney
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    ACTIVATION_BYTES,
    TOKENS,
    TRAINER,
    CheapPart,
    Crew,
    microbatch,
    specs,
    stop,
    tensor,
    turns,
)

A0, B0 = PeerId("a0"), PeerId("b0")
OTHER = PeerId("uu")
TARGET = 4


class Counting:
    """A leader with a real ledger, of which another trainer takes and gives back a part of the step."""

    def __init__(self) -> None:
        self.ledger = Ledger(1, TARGET, {TRAINER: TARGET, OTHER: TARGET})
        self.leased = 0
        self.again, self.listens = asyncio.Event(), asyncio.Event()
        self.reports: list[MicrobatchId] = []
        self.listens.set()

    def others(self, total: int) -> None:
        """So many are leased to the other trainer."""
        self.ledger.lease(1, OTHER, total)

    def back(self, started: tuple[MicrobatchId, ...]) -> int:
        """The trainer was taken for gone, and is counted on again: how many it may keep."""
        self.ledger.share({OTHER: TARGET}, {})
        self.ledger.lease(1, OTHER, 3)
        self.ledger.share({TRAINER: TARGET, OTHER: TARGET}, {})
        self.leased = self.ledger.resume(1, TRAINER, started, ())
        return self.leased

    def alone(self) -> None:
        """The other trainer is gone: there is quota again."""
        self.ledger.share({TRAINER: TARGET}, {})
        self.again.set()

    async def lease(self, step: int, wanted: int) -> int:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        total, _ = self.ledger.lease(step, TRAINER, self.leased + wanted)
        granted, self.leased = total - self.leased, total
        return granted

    async def complete(self, journey: FinishedJourney) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        self.reports.append(journey.key.microbatch)
        await self.listens.wait()
        one = Contribution(microbatch=journey.key.microbatch, tokens=2, loss_sum=3.0, route=journey.route)
        self.ledger.complete(journey.key.step, TRAINER, one)

    async def set_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        raise AssertionError(reason)

    async def wait_quota(self, step: int) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        await self.again.wait()
        self.again.clear()


@asynccontextmanager
async def feeding(crew: Crew, leader: Counting) -> AsyncIterator[None]:
    """The trainer feeds step 1 meanwhile."""
    async with crew.working():
        task = asyncio.create_task(crew.side.trainer.feed(1, leader))
        try:
            yield
        finally:
            await stop(task)


@pytest.mark.parametrize("how_far", ["under way", "reporting"])
async def test_microbatch_that_was_left_is_taken_again_before_any_other_and_committed_once(how_far: str) -> None:
    crew, leader = await Crew.of([[A0], [B0]], in_flight=3), Counting()
    trainer, gate = crew.side.trainer, asyncio.Event()
    leader.others(1)
    if how_far == "under way":
        crew.replicas[B0].device.gate = gate
    else:
        leader.listens.clear()
    async with feeding(crew, leader):
        await eventually(lambda: len(trainer._under_way() if how_far == "under way" else leader.reports) == 3)
        trainer.keep(1, leader.back(trainer.started(1)))
        assert (trainer.started(1), trainer.cursor) == ((microbatch(0),), (0, 1))
        gate.set()
        leader.listens.set()
        await eventually(lambda: len(crew.side.part.held) == 3 and leader.ledger.committed())
        await turns()
        assert [one.microbatch for one in leader.ledger.committed()] == [microbatch(0)]
        leader.alone()
        await eventually(lambda: leader.ledger.full)
        committed = {one.microbatch for one in leader.ledger.committed()}
        assert committed == {microbatch(i) for i in range(4)}
        assert trainer.cursor_after(1, committed) == (0, 4)
        assert crew.held(A0) == crew.held(B0) == set(crew.side.part.held) == committed
    assert len(crew.side.events.of(JourneyStarted)) == 4, "a microbatch makes but one journey in a step"
    assert all(len(replica.events.of(Accumulated)) == 4 for replica in crew.replicas.values())


async def test_microbatch_that_was_left_and_not_taken_again_is_fed_to_the_next_step() -> None:
    crew, leader = await Crew.of([[A0], [B0]], in_flight=3), Counting()
    trainer = crew.side.trainer
    leader.others(1)
    crew.replicas[B0].device.gate = asyncio.Event()
    async with feeding(crew, leader):
        await eventually(lambda: len(trainer._under_way()) == 3)
        trainer.keep(1, leader.back(trainer.started(1)))
        crew.replicas[B0].device.gate.set()
        await eventually(lambda: leader.ledger.committed())
        assert trainer.cursor_after(1, {microbatch(0)}) == (0, 1)
        trainer.open_step(2, [[A0], [B0]], 1, (0, 1))
        await turns()
        assert (list(trainer._issued), trainer.cursor) == ([], (0, 1))


async def test_microbatch_that_was_left_is_taken_again_before_what_was_fed_early_to_the_next_step() -> None:
    """Else the shard goes on behind it, and what was fed early and then to this step comes again with the next."""
    rules = EarlyRules(share=0.5, target=TARGET, last=9)
    crew, leader = await Crew.of([[A0], [B0]], in_flight=8, early=rules), Counting()
    trainer = crew.side.trainer
    trainer.open_step(1, [[A0], [B0]], 1, None)
    leader.others(1)
    crew.replicas[A0].device.gate = asyncio.Event()
    async with feeding(crew, leader):
        await eventually(lambda: len(trainer.started(2)) == 2)
        assert (len(trainer.started(1)), trainer.cursor) == (3, (0, 5))
        trainer.keep(1, leader.back(trainer.started(1)))
        assert (trainer.started(2), trainer.cursor) == ((), (0, 1))
        leader.alone()
        await eventually(lambda: len(trainer.started(1)) == TARGET)
        assert trainer.started(1) == tuple(map(microbatch, range(TARGET)))
        assert trainer.cursor_after(1, set(trainer.started(1))) == (0, 4)


def test_ends_have_a_microbatch_once_however_often_its_journey_comes_home() -> None:
    part = CheapPart()
    ends = EndsCompute(part, specs(), torch.device("cpu"))
    graph = part.embed(torch.ones(TOKENS.shape), seed=0, work=StepWork(1, microbatch(0)))[1]
    assert len(tensor(1.0)) == ACTIVATION_BYTES
    for _ in range(2):
        ends.finish(graph, tensor(1.0), [], StepWork(1, microbatch(0)))
    assert set(part.held) == {microbatch(0)}
    with pytest.raises(WrongStep):
        ends.finish(graph, tensor(1.0), [], StepWork(2, microbatch(1)))
