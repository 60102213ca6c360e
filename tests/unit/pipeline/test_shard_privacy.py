"""What a trainer's stages can read of its private shard: what it fed, and what it may have fed before it came back."""

from __future__ import annotations

import pytest

from swarm.errors import PeerError, Refused, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.messages import TRAINER_RECALL, TrainerRecall
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.pipeline import (
    ACTIVATION_BYTES,
    TRAINER,
    Crew,
    DialClock,
    FakeLeader,
    FakeSource,
    TrainerSide,
    enter,
    microbatch,
)

FIRST, LAST = PeerId("a0"), PeerId("b0")
ROUTE = (FIRST, LAST)
BEGIN, TARGET = 20, 16


class ShortSource(FakeSource):
    """Ten microbatches an epoch."""

    @property
    def microbatches_per_epoch(self) -> int:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        return 10

    @property
    def cursor(self) -> tuple[int, int]:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        return divmod(self._next, 10)


class Shard:
    """A trainer that came to step 3 at position ``begin`` and has taken nothing yet; its two stages ask."""

    def __init__(self, *, hosted: bool, source: FakeSource | None = None, begin: tuple[int, int] = (0, BEGIN)) -> None:
        self._hosted, self._source, self._begin = hosted, source, begin
        self._network = SimNetwork(DialClock())

    async def open(self) -> None:
        """Everybody is there, the step open."""
        trainer, *stages = await enter(self._network, TRAINER, *ROUTE)
        self._stages: list[SimEndpoint] = stages
        side = TrainerSide(trainer, [[FIRST], [LAST]], hosted=self._hosted, source=self._source)
        side.part.step = 2
        side.trainer.open_step(3, [[FIRST], [LAST]], 1, self._begin)

    async def read(self, asked: MicrobatchId, *, step: int = 3) -> None:
        """The first stage wants the input."""
        body = TrainerRecall(step=step, microbatch=asked, route=ROUTE, what="output")
        await self._call(0, body)

    async def read_end(self, asked: MicrobatchId, *, step: int = 3) -> None:
        """The last stage wants the targets, or the gradient of the loss."""
        body = TrainerRecall(step=step, microbatch=asked, route=ROUTE, what="targets" if self._hosted else "gradient")
        await self._call(1, body)

    async def _call(self, stage: int, body: TrainerRecall) -> None:
        await self._stages[stage].call(TRAINER, TRAINER_RECALL, body, timeout_s=5, max_reply_bytes=ACTIVATION_BYTES)


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "private"])
async def test_nothing_beyond_the_open_step_is_read_for_a_stage(hosted: bool) -> None:
    shard = Shard(hosted=hosted)
    await shard.open()
    for position in (0, BEGIN - 1, BEGIN + TARGET, 4711, 1 << 41):
        for read in (shard.read, shard.read_end):
            with pytest.raises(Refused, match="is not of step 3"):
                await read(microbatch(position))
    for step in (2, 4, 99):
        for read in (shard.read, shard.read_end):
            with pytest.raises(WrongStep):
                await read(microbatch(BEGIN), step=step)


async def test_what_may_have_been_fed_before_the_trainer_came_back_is_given() -> None:
    shard = Shard(hosted=True)
    await shard.open()
    for position in (BEGIN, BEGIN + TARGET - 1):
        await shard.read(microbatch(position))
        await shard.read_end(microbatch(position))


async def test_the_open_step_reaches_into_the_next_epochs() -> None:
    shard = Shard(hosted=True, source=ShortSource(), begin=(0, 8))
    await shard.open()

    async def readable(epoch: int, position: int) -> bool:
        try:
            await shard.read(MicrobatchId(TRAINER, "00" * 8, epoch, position))
        except Refused as refused:
            return "is not of step" not in refused.reason
        return True

    found = [(epoch, position) for epoch in range(4) for position in range(30) if await readable(epoch, position)]
    assert found == [(0, 8), (0, 9), *((1, position) for position in range(10)), *((2, p) for p in range(4))]


async def test_what_was_fed_is_given_until_its_step_closes() -> None:
    crew = await Crew.of([[FIRST], [LAST]])
    body = TrainerRecall(step=1, microbatch=microbatch(0), route=ROUTE, what="output")

    async def read() -> None:
        endpoint = crew.replicas[FIRST].endpoint
        await endpoint.call(TRAINER, TRAINER_RECALL, body, timeout_s=5, max_reply_bytes=ACTIVATION_BYTES)

    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        await read()
        crew.side.trainer.open_step(2, [[FIRST], [LAST]], 1, None)
        with pytest.raises(PeerError):
            await read()
