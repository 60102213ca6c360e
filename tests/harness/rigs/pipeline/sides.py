"""Replicas, trainers and leaders of a pipeline with cheap parts, on a network in memory, to be watched and broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swarm.ids import MicrobatchId, PeerId, stage_part
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import EndsCompute, StageCompute
from swarm.pipeline.seals import Seals
from swarm.pipeline.stage.admission import Participants, StageContext, StageSettings
from swarm.pipeline.stage.server import StageServer
from swarm.pipeline.trainer.audits import HopClaim
from swarm.pipeline.trainer.flight import NOTHING_EARLY, EarlyRules, InFlight
from swarm.pipeline.trainer.journey import FinishedJourney, JourneyContext
from swarm.pipeline.trainer.pace import JourneyDeadlines, ReplicaChoice
from swarm.pipeline.trainer.trainer import Trainer
from swarm.pipeline.wiring import Wiring
from swarm.security.statements import AuditStatement
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.clocks import DialClock, TickingClock
from tests.harness.rigs.common import RUN, EventList, InlineDevice, sign, verify
from tests.harness.rigs.pipeline.parts import THIEF, TOKENS, TRAINER, CheapPart, microbatch, specs


def seals(peer: PeerId) -> Seals:
    """Return a peer's signatures under what it sends."""
    return Seals(RUN, partial(sign, peer), verify)


def places(stages: int, trainer: PeerId = TRAINER) -> Participants:
    """Let anybody hold any stage, but for the thief."""
    return Participants(frozenset([trainer]), (_Anybody(),) * stages)


class _Anybody(frozenset[PeerId]):
    def __contains__(self, peer: object) -> bool:
        return peer != THIEF


class Replica:
    """One real StageServer with a cheap part, or with the one given."""

    def __init__(
        self,
        endpoint: SimEndpoint,
        stage: int,
        stages: int,
        *,
        hosted: bool = False,
        part: Any = None,
        boundary: BoundarySpecs | None = None,
        **limits: Any,
    ) -> None:
        self.endpoint, self.part, self.events = endpoint, part or CheapPart(), EventList()
        self.device, self.clock = InlineDevice(forgets=True), DialClock()
        boundary = boundary or specs(hosted=hosted)
        settings = StageSettings(run=RUN, part=stage_part(stage), stage=stage, stages=stages, specs=boundary, **limits)
        self.compute = StageCompute(self.part, boundary, torch.device("cpu"))
        context = StageContext(
            endpoint=endpoint,
            device=self.device,  # type: ignore[arg-type]
            compute=self.compute,
            sign=partial(sign, endpoint.peer),
            seals=seals(endpoint.peer),
            events=self.events,
            clock=self.clock,
        )
        self.server = StageServer(settings, context, places(stages))
        endpoint.mount(self.server)
        self.stage, self.stages = stage, stages
        self.server.open_step(1, places(stages))

    def open_step(self, step: int, now: Participants | None = None, after: str = "") -> None:
        """Have the part swap and the server follow."""
        self.part.step = step - 1
        self.part.held.clear()
        self.server.open_step(step, now or places(self.stages), after)


@dataclass
class FakeBatch:
    """See :class:`~swarm.pipeline.batch.Batch`."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None
    choice: int = 0


class FakeSource:
    """Microbatches without end."""

    shard = "00" * 8
    choices = (0,)

    def __init__(self) -> None:
        self._next = 0

    @property
    def cursor(self) -> tuple[int, int]:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        return 0, self._next

    @property
    def microbatches_per_epoch(self) -> int:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        return 1 << 40

    def seek(self, cursor: tuple[int, int]) -> None:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        self._next = cursor[1]

    def take(self) -> FakeBatch:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        self._next += 1
        tokens = torch.ones(TOKENS.shape, dtype=torch.int64)
        return FakeBatch(microbatch(self._next - 1), tokens, tokens)


class FakeLeader:
    """Leases ``quota`` microbatches and keeps what came home; ``most`` is the highest number under way at once."""

    def __init__(self, quota: int) -> None:
        self.quota, self.leased, self.asked = quota, 0, 0
        self.finished: list[FinishedJourney] = []
        self.aside: dict[MicrobatchId, str] = {}
        self.accused: list[tuple[HopClaim, Sequence[AuditStatement]]] = []
        self.error: Exception | None = None
        self.over, self.again = asyncio.Event(), asyncio.Event()

    async def lease(self, step: int, wanted: int) -> int:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        self.asked += 1
        granted = min(wanted, self.quota - self.leased)
        self.leased += granted
        return granted

    async def complete(self, journey: FinishedJourney) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        if self.error is not None:
            raise self.error
        self.finished.append(journey)
        self._check_over()

    async def set_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`. The quota is not given again."""
        self.aside[microbatch] = reason
        self._check_over()

    async def accuse(self, claim: HopClaim, found: Sequence[AuditStatement]) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        self.accused.append((claim, found))

    async def wait_quota(self, step: int) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        self._check_over()
        await self.again.wait()
        self.again.clear()

    def _check_over(self) -> None:
        if len(self.finished) + len(self.aside) >= self.quota:
            self.over.set()

    async def fed_by(self, trainer: Trainer, step: int = 1) -> None:
        """Have the trainer feed the step until everything leased came home or was set aside."""
        feeding = asyncio.create_task(trainer.feed(step, self))
        over = asyncio.create_task(self.over.wait())
        try:
            await asyncio.wait([feeding, over], return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
        finally:
            for task in (feeding, over):
                task.cancel()
            await asyncio.gather(feeding, over, return_exceptions=True)


class TrainerSide:
    """A real trainer over given stages; ``suspected`` is whom it suspected."""

    def __init__(
        self,
        endpoint: SimEndpoint,
        stages: Sequence[Sequence[PeerId]],
        *,
        hosted: bool = False,
        pace: JourneyDeadlines | None = None,
        gone: Callable[[], Any] = tuple,
        doubted: Callable[[], Any] = tuple,
        in_flight: int | None = None,
        clock: Any = None,
        part: Any = None,
        boundary: BoundarySpecs | None = None,
        source: Any = None,
        early: EarlyRules = NOTHING_EARLY,
        **more: Any,
    ) -> None:
        self.part, self.events, self.suspected = part or CheapPart(), EventList(), dict[PeerId, str]()
        boundary = boundary or specs()
        self.wiring = Wiring(stages, seed=1)
        self.context = JourneyContext(
            target=16,
            stages=len(stages),
            endpoint=endpoint,
            device=InlineDevice(forgets=True),  # type: ignore[arg-type]
            specs=boundary,
            ends=None if hosted else EndsCompute(self.part, boundary, torch.device("cpu")),
            replicas=ReplicaChoice(
                wiring=self.wiring,
                pace=pace or JourneyDeadlines(floor_s=5.0, ceiling_s=5.0),
                gone=gone,
                doubted=doubted,
            ),
            events=self.events,
            clock=clock or TickingClock(),
            seals=seals(endpoint.peer),
            suspect=self.suspected.__setitem__,
            early=early,
        )
        self.trainer = Trainer(
            self.context,
            source or FakeSource(),
            in_flight=InFlight(self.wiring, trainers=1, fixed=in_flight),
            **more,
        )
        endpoint.mount(self.trainer)


async def enter(network: SimNetwork, *names: str) -> list[SimEndpoint]:
    """Return endpoints of these names, in the run."""
    found = [network.endpoint(name) for name in names]
    for endpoint in found:
        await endpoint.enter(RUN)
    return found


@asynccontextmanager
async def working(*replicas: Replica) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the replicas' loops inside; what ends one early comes out of its task."""
    tasks = [asyncio.create_task(replica.server.run()) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
