"""Our peers in the benchmark ``pipeline``: ``python -m tests.benchmarks._pipeline_peer SIZE HOME STAGE|trainer``.

A stage host runs what a stage host of a run runs: daemon, endpoint, event log, lag probe, health watch, device thread,
:class:`StageServer` over a :class:`TrainedPart`. The trainer runs the real :class:`Trainer`; only its ends are
ready-made tensors, and only the step's leader, here an endless one, is not asked over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm.clock import SystemClock
from swarm.compression.codec import EncodeContext
from swarm.compression.registry import codec_named
from swarm.device import DeviceThread
from swarm.health.watch import HealthWatch
from swarm.ids import MicrobatchId, PeerId, RunId, StepWork
from swarm.models.registry import family_of
from swarm.models.spec import token_spec
from swarm.monitoring.recorder import LoopLagProbe, Recorder
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import Payload
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.boundary import BoundarySpecs, RowNotes
from swarm.pipeline.compute import Bounds, StageCompute
from swarm.pipeline.seals import Seals
from swarm.pipeline.stage.admission import Participants, StageContext, StageSettings
from swarm.pipeline.stage.server import StageServer
from swarm.pipeline.trainer.audits import HopClaim
from swarm.pipeline.trainer.flight import InFlight
from swarm.pipeline.trainer.journey import FinishedJourney, JourneyContext
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.trainer.trainer import Trainer
from swarm.pipeline.wiring import Wiring
from swarm.security.signing import verify
from swarm.security.statements import AuditStatement
from tests.benchmarks._pipeline_load import (
    SIZES,
    Order,
    Window,
    activation_of,
    gradient_of,
    model_of,
    part_of,
    threads,
)
from tests.benchmarks._stage import Size
from tests.benchmarks._worker import orders, say

RUN = RunId("2b" * 32)
CODEC = "bfloat16"
_SHARD = "00" * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every peer has. Close with :meth:`close`."""

    size: Size
    clock: SystemClock
    endpoint: LibP2PEndpoint
    device: DeviceThread
    recorder: Recorder
    watch: HealthWatch
    sign: Any

    @property
    def specs(self) -> BoundarySpecs:
        """What crosses a boundary: 16 bits a value."""
        size = self.size
        return BoundarySpecs(
            activation=family_of(model_of(size)).boundary(size.microbatch, size.sequence),
            tokens=token_spec(size.microbatch, size.sequence),
            codec=codec_named(CODEC),
            hosted=False,
        )

    @classmethod
    async def open(cls, size: Size, home: Path) -> Machine:
        """Start the daemon and enter the run."""
        clock, identity = SystemClock(), load_or_create(home / "identity.key")
        endpoint = await LibP2PEndpoint.open(EndpointConfig(run_dir=home), identity, clock)
        await endpoint.enter(RUN)
        watch = HealthWatch(endpoint, clock)
        endpoint.mount(watch)
        return cls(
            size=size,
            clock=clock,
            endpoint=endpoint,
            device=DeviceThread(torch.device("cpu")),
            recorder=Recorder(home / "events.jsonl", identity.peer, clock),
            watch=watch,
            sign=identity.private.sign,
        )

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.device.close()
        await self.endpoint.close()
        self.recorder.close()

    @contextlib.asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """With what runs alongside the work in every peer; between rounds it would cost the others' processor."""
        beside = [
            asyncio.create_task(LoopLagProbe(self.recorder, self.clock).run()),
            asyncio.create_task(self.watch.run()),
        ]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


class Host:
    """One replica of one stage. Between two rounds it closes its step, for itself alone."""

    def __init__(self, machine: Machine, stage: int) -> None:
        self._machine = machine
        spec, snapshot = part_of(machine.size, stage)
        self._part = TrainedPart(spec, model_of(machine.size), AdamW(OptimizerConfig()))
        self._part.install(snapshot)
        settings = StageSettings(run=RUN, part=spec.name, stage=stage, stages=machine.size.blocks, specs=machine.specs)
        context = StageContext(
            endpoint=machine.endpoint,
            device=machine.device,
            compute=StageCompute(self._part, machine.specs, machine.device.torch_device),
            sign=machine.sign,
            seals=Seals(RUN, machine.sign, verify),
            events=machine.recorder,
            clock=machine.clock,
        )
        self._server = StageServer(settings, context, Participants.of((), ((),) * machine.size.blocks))
        machine.endpoint.mount(self._server)
        self._places = Participants.of((), ())
        self._busy: asyncio.Task[None] | None = None

    def meet(self, trainer: PeerId, route: Sequence[PeerId]) -> None:
        """Who takes part."""
        self._places = Participants.of((trainer,), ((peer,) for peer in route))

    async def begin(self, step: int) -> dict[str, Any]:
        """Open the step and serve it until :meth:`end`."""
        self._server.open_step(step, self._places)
        self._busy = asyncio.create_task(self._serve())
        return {}

    async def end(self) -> dict[str, Any]:
        """Close the step. Returns how many microbatches it had."""
        if self._busy is not None:
            self._busy.cancel()
            await asyncio.gather(self._busy, return_exceptions=True)
        return {"microbatches": await self._machine.device.run(self._close_step)}

    async def _serve(self) -> None:
        async with self._machine.attended():
            await self._server.run()

    def _close_step(self) -> int:
        count = len(self._part.accumulated(self._part.step + 1))
        mean = self._part.gradient_sum() / (max(count, 1) * self._machine.size.tokens)
        self._part.prepare(mean, lr=1e-4, clip=1.0, step=self._part.step + 1)
        self._part.swap()
        return count


class ReadyEnds:
    """Shaped like :class:`~swarm.pipeline.compute.EndsCompute`: codec and checks are real, what they work on is made
    beforehand."""

    def __init__(self, machine: Machine) -> None:
        self.bounds = Bounds()
        self._specs, self._tokens = machine.specs, machine.size.tokens
        self._hidden, self._gradient = activation_of(machine.size), gradient_of(machine.size)

    def embed(self, tokens: torch.Tensor, seed: int, work: StepWork, rows: RowNotes) -> tuple[memoryview, None]:
        """The ready-made activation."""
        return self._specs.codec.encode(self._hidden, EncodeContext(step=1, direction="forward")), None

    def loss(self, payload: Payload, targets: torch.Tensor, work: StepWork) -> tuple[float, int, memoryview, None]:
        """The ready-made gradient."""
        self._decode(payload)
        context = EncodeContext(step=1, direction="backward")
        return 1.0, self._tokens, self._specs.codec.encode(self._gradient, context), None

    def finish(self, graph: None, payload: Payload, head_gradients: None, microbatch: MicrobatchId) -> None:
        """The microbatch is home."""
        self._decode(payload)

    def _decode(self, payload: Payload) -> torch.Tensor:
        return self._specs.codec.decode(payload, self._specs.activation, check_finite=True)


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A microbatch whose content nobody looks at."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None
    choice: int = 0


class EndlessSource:
    """As many microbatches as are taken."""

    shard = _SHARD

    def __init__(self, trainer: PeerId) -> None:
        self._trainer, self._positions, self._nothing = trainer, itertools.count(), torch.zeros(1, 1)

    def take(self) -> ReadyBatch:
        """The next one."""
        microbatch = MicrobatchId(self._trainer, _SHARD, 0, next(self._positions))
        return ReadyBatch(microbatch, self._nothing, self._nothing)

    @property
    def cursor(self) -> tuple[int, int]:
        """Nobody asks."""
        return 0, 0

    @property
    def microbatches_per_epoch(self) -> int:
        """Nobody asks."""
        return 1

    def seek(self, cursor: tuple[int, int]) -> None:
        """Nobody asks."""


class EndlessLeader:
    """Leases whatever is wanted until it is told to stop, and notes what came home."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.open = True
        self.seconds: list[float] = []
        self._home = asyncio.Event()

    async def lease(self, step: int, wanted: int) -> int:
        """All of it, or none."""
        return wanted if self.open else 0

    async def complete(self, journey: FinishedJourney) -> None:
        """It ended now."""
        self._window.note()
        self.seconds.append(journey.seconds)
        self._home.set()

    async def home_at_least(self, count: int) -> None:
        """Return once so many came home: all that were under way before, so that the pipeline is full, or empty."""
        while len(self.seconds) < count:
            self._home.clear()
            await self._home.wait()

    async def set_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        """Nothing is poisonous here."""
        raise RuntimeError(f"{microbatch} was set aside: {reason}")

    async def accuse(self, claim: HopClaim, found: Sequence[AuditStatement]) -> None:
        """Nothing is computed again."""

    async def wait_quota(self, step: int) -> None:
        """There is none any more."""
        await asyncio.Event().wait()


class Feeder:
    """The trainer's side of a round."""

    def __init__(self, machine: Machine, in_flight: int | None) -> None:
        self._machine, self._in_flight = machine, in_flight
        self._trainer: Trainer | None = None
        self._stages: list[list[PeerId]] = []

    def meet(self, trainer: PeerId, route: Sequence[PeerId]) -> None:
        """Who takes part."""
        machine = self._machine
        stages = self._stages = [[peer] for peer in route]
        wiring = Wiring(stages, seed=0)
        context = JourneyContext(
            stages=machine.size.blocks,
            endpoint=machine.endpoint,
            device=machine.device,
            specs=machine.specs,
            ends=ReadyEnds(machine),  # type: ignore[arg-type]
            replicas=ReplicaChoice(wiring=wiring),
            events=machine.recorder,
            clock=machine.clock,
            seals=Seals(RUN, machine.sign, verify),
            suspect=machine.watch.suspect,
        )
        self._trainer = Trainer(
            context,
            EndlessSource(machine.endpoint.peer),
            in_flight=InFlight(wiring, trainers=1, fixed=self._in_flight),
        )
        machine.endpoint.mount(self._trainer)

    async def round(self, step: int, order: Order) -> dict[str, Any]:
        """Feed ``step`` without pause; what comes home in the window counts."""
        assert self._trainer is not None
        window = Window(order)
        leader = EndlessLeader(window)
        async with self._machine.attended(), asyncio.TaskGroup() as group:
            self._trainer.open_step(step, self._stages, 1, None)
            feeding = group.create_task(self._trainer.feed(step, leader))
            await asyncio.sleep(order.warmup_s)
            await leader.home_at_least(len(self._trainer.started(step)))
            window.open()
            await asyncio.sleep(order.seconds)
            found = window.close()
            leader.open = False
            await leader.home_at_least(len(self._trainer.started(step)))
            feeding.cancel()
        journeys = sorted(leader.seconds)
        return found | {"journey_s": journeys[len(journeys) // 2], "whole_step": len(journeys)}


async def main(size: str, home: str, role: str, in_flight: str = "") -> None:
    """Serve orders until stdin ends."""
    threads(1)
    machine = await Machine.open(SIZES[size], Path(home))
    try:
        feeder = role == "trainer"
        peer = Feeder(machine, int(in_flight) if in_flight else None) if feeder else Host(machine, int(role))
        endpoint = machine.endpoint
        daemon = endpoint.daemon_pid
        say({"peer": endpoint.peer, "addresses": endpoint.addresses, "pid": os.getpid(), "daemon": daemon})
        async for order in orders():
            say(await _obey(order, machine, peer))
    finally:
        await machine.close()


async def _obey(order: dict[str, Any], machine: Machine, peer: Feeder | Host) -> dict[str, Any]:
    match order, peer:
        case {"trainer": str(trainer), "route": route, "addresses": addresses}, _:
            for other, known in addresses.items():
                machine.endpoint.learn(PeerId(other), known)
            machine.watch.follow([PeerId(other) for other in addresses])
            peer.meet(PeerId(trainer), [PeerId(other) for other in route])
            return {}
        case {"begin": int(step)}, Host():
            return await peer.begin(step)
        case {"end": int()}, Host():
            return await peer.end()
        case {"step": int(step), "order": given}, Feeder():
            return await peer.round(step, Order(**given))
    raise ValueError(f"an order that this peer does not understand: {order}")
