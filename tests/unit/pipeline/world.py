"""Replicas and trainers with cheap parts, on a network in memory, that a test can watch and break."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from swarm.clock import SystemClock
from swarm.compression.codec import EncodeContext
from swarm.compression.dense import FLOAT32, INT32
from swarm.errors import BugError
from swarm.events import Event
from swarm.ids import MicrobatchId, PeerId, RunId
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Answer, AnyMethod, Incoming, Payload, Rpc
from swarm.pipeline.compute import BoundarySpecs, EndsCompute, StageCompute
from swarm.pipeline.messages import (
    ADOPT,
    ATTEND,
    BACKWARD,
    BLOCKED,
    DROP,
    FORWARD,
    GRADIENT,
    HOP,
    OUTPUT,
    RECALL,
    RESEND,
    TARGETS,
    TRAINER_RECALL,
)
from swarm.pipeline.stage.admission import Participants, StageContext, StageSettings
from swarm.pipeline.stage.server import StageServer
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.journey import FinishedJourney
from swarm.pipeline.trainer.pace import JourneyDeadlines
from swarm.pipeline.trainer.trainer import Trainer
from swarm.pipeline.wiring import Wiring
from swarm.schema import Empty
from swarm.sim.network import SimEndpoint, SimNetwork

EventT = TypeVar("EventT", bound=Event)

RUN = RunId("ab" * 32)
TRAINER, THIEF = PeerId("tr"), PeerId("thief")
CONTEXT = EncodeContext(step=1, direction="forward")
ACTIVATION, TOKENS = TensorSpec((1, 2, 4), "float32"), TensorSpec((1, 2), "int64")
ACTIVATION_BYTES, TOKEN_BYTES = 32, 8
RPCS: tuple[Rpc[Any, Any], ...] = (
    FORWARD,
    TARGETS,
    BACKWARD,
    RESEND,
    ADOPT,
    DROP,
    RECALL,
    ATTEND,
    TRAINER_RECALL,
    OUTPUT,
    GRADIENT,
    HOP,
    BLOCKED,
)
BY_KIND = {rpc.request: rpc for rpc in RPCS}


def specs(*, hosted: bool = False) -> BoundarySpecs:
    """Eight float32 per activation."""
    return BoundarySpecs(activation=ACTIVATION, tokens=TOKENS, codec=FLOAT32, hosted=hosted)


def microbatch(position: int, trainer: PeerId = TRAINER) -> MicrobatchId:
    """One microbatch of a trainer."""
    return MicrobatchId(trainer, "00" * 8, 0, position)


def tensor(value: float) -> bytes:
    """An activation or a boundary gradient that is ``value`` everywhere."""
    return bytes(FLOAT32.encode(torch.full(ACTIVATION.shape, value), CONTEXT))


def token_ids() -> bytes:
    """Hosted inputs or targets."""
    return bytes(INT32.encode(torch.ones(TOKENS.shape, dtype=torch.int64), CONTEXT))


def value(payload: Payload) -> float:
    """The first element."""
    return float(FLOAT32.decode(bytes(payload), ACTIVATION)[0, 0, 0])


def sign(peer: PeerId, data: bytes) -> bytes:
    """64 bytes that :func:`verify` accepts."""
    return hashlib.sha512(peer.encode() + data).digest()


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether :func:`sign` made it."""
    return signature == sign(peer, data)


async def turns(count: int = 60) -> None:
    """Let everything that can run do so: in memory a message takes a few turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class InlineDevice:
    """A device thread that is the loop itself; a ``gate`` holds work up before it is done."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None

    async def run(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """See :class:`swarm.device.DeviceThread`."""
        if self.gate is not None:
            await self.gate.wait()
        return fn(*args)


@dataclass(eq=False)
class FakeGraph:
    """What a forward leaves behind; weakly referenced by tests."""

    input: torch.Tensor


class FakePart:
    """Doubles on the way out, adds one on the way back. Each hook may raise instead."""

    def __init__(self) -> None:
        self.held: dict[MicrobatchId, float] = {}
        self.on: dict[str, Callable[[], None]] = {}
        self.scale = 2.0
        self.embedded = 1.0
        self.loss_value = 3.0
        self.graphs: list[Any] = []
        self.step = 0

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        return frozenset(self.held)

    def reverse(self, microbatch: MicrobatchId, gradients: Any) -> None:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        if self.held.pop(microbatch) != gradients:
            raise BugError(f"{microbatch} was added with other gradients")

    def _hook(self, name: str) -> None:
        if name in self.on:
            self.on[name]()

    def forward(self, x: torch.Tensor, *, seed: int, graph: bool = True) -> tuple[torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("forward")
        return (x if x.is_floating_point() else torch.ones(ACTIVATION.shape)) * self.scale, FakeGraph(x)

    def forward_loss(self, x: torch.Tensor, targets: torch.Tensor, *, seed: int) -> tuple[float, int, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("forward")
        return self.loss_value, targets.numel(), FakeGraph(x)

    def backward(self, graph: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("backward")
        if graph.input is None:
            raise BugError("a graph was used for a second backward")
        gradient = torch.ones(ACTIVATION.shape) if grad_output is None else grad_output
        graph.input = None
        return gradient + 1, float(gradient.sum())

    def accumulate(self, microbatch: MicrobatchId, gradients: Any) -> None:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("accumulate")
        if microbatch in self.held:
            raise BugError(f"{microbatch} is already in the sum")
        self.held[microbatch] = gradients

    # --- the private ends -----------------------------------------------------------------------------------------

    def embed(self, tokens: torch.Tensor, *, seed: int) -> tuple[torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        return torch.full(ACTIVATION.shape, self.embedded), FakeGraph(tokens)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, int, torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        self._hook("loss")
        return self.loss_value, targets.numel(), torch.ones(ACTIVATION.shape), []

    def embed_backward(self, graph: Any, grad: torch.Tensor) -> Any:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        return [float(grad.sum())]


def spoil(error: BaseException) -> Callable[[], None]:
    """A hook that raises."""

    def hook() -> None:
        raise error

    return hook


class Mailbox:
    """Takes every message and keeps it; or answers with an error that the test chose for the method."""

    def __init__(self, endpoint: SimEndpoint, methods: Sequence[Rpc[Any, Any]] = RPCS) -> None:
        self.endpoint, self._methods = endpoint, methods
        self.mail: list[tuple[str, Any, bytes]] = []
        self.errors: dict[Rpc[Any, Any], Exception] = {}
        endpoint.mount(self)

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [rpc.handled_with_payload(self._handler(rpc), admit=lambda *about: None) for rpc in self._methods]

    def _handler(self, rpc: Rpc[Any, Any]) -> Any:
        async def handle(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Empty]:
            if rpc in self.errors:
                raise self.errors[rpc]
            if rpc is ATTEND:
                await asyncio.Event().wait()
            self.mail.append((rpc.name.rpartition("/")[2], body, bytes(incoming.payload)))
            return Answer(Empty())

        return handle

    def of(self, verb: str) -> list[Any]:
        """Bodies of one kind."""
        return [body for name, body, _ in self.mail if name == verb]

    def payloads(self, verb: str) -> list[float]:
        """First elements of the tensors of one kind."""
        return [value(payload) for name, _, payload in self.mail if name == verb]

    async def call(self, target: PeerId, body: Any, payload: Payload = b"") -> None:
        """Send something to a replica or a trainer."""
        await self.endpoint.call(target, BY_KIND[type(body)], body, timeout_s=5, payload=payload)


@dataclass
class EventList:
    """Keeps events."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """See :class:`swarm.events.EventSink`."""
        self.events.append(event)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """All of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


class HandClock(SystemClock):
    """A clock that the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now


def places(stages: int, trainer: PeerId = TRAINER) -> Participants:
    """Anybody may hold any stage, but for the thief."""
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
        self.endpoint, self.part, self.device, self.events = endpoint, part or FakePart(), InlineDevice(), EventList()
        self.clock = HandClock()
        boundary = boundary or specs(hosted=hosted)
        settings = StageSettings(run=RUN, stage=stage, stages=stages, specs=boundary, **limits)
        context = StageContext(
            endpoint=endpoint,
            device=self.device,  # type: ignore[arg-type]
            compute=StageCompute(self.part, boundary, torch.device("cpu")),
            sign=lambda data: sign(endpoint.peer, data),
            events=self.events,
            clock=self.clock,
        )
        self.server = StageServer(settings, context, places(stages))
        endpoint.mount(self.server)
        self.stage, self.stages = stage, stages
        self.server.open_step(1, places(stages))

    def open_step(self, step: int, now: Participants | None = None, after: str = "") -> None:
        """The part swaps and the server follows."""
        self.part.step = step - 1
        self.part.held.clear()
        self.server.open_step(step, now or places(self.stages), after)


@dataclass
class FakeBatch:
    """See :class:`~swarm.pipeline.batch.Batch`."""

    id: MicrobatchId
    inputs: torch.Tensor
    targets: torch.Tensor


class FakeSource:
    """Microbatches without end."""

    shard = "00" * 8

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
        **more: Any,
    ) -> None:
        self.part, self.events, self.suspected = part or FakePart(), EventList(), dict[PeerId, str]()
        boundary = boundary or specs()
        self.wiring = Wiring(stages, seed=1)
        self.context = JourneyContext(
            run=RUN,
            target=16,
            stages=len(stages),
            endpoint=endpoint,
            device=InlineDevice(),  # type: ignore[arg-type]
            ends=None if hosted else EndsCompute(self.part, boundary, torch.device("cpu")),
            wiring=self.wiring,
            events=self.events,
            clock=clock or SystemClock(),
            verify=verify,
            pace=pace or JourneyDeadlines(floor_s=5.0, ceiling_s=5.0),
            suspect=self.suspected.__setitem__,
            gone=gone,
            doubted=doubted,
        )
        self.trainer = Trainer(
            self.context,
            source or FakeSource(),
            activation_bytes=boundary.activation_bytes,
            replicas=[len(replicas) for replicas in stages],
            trainers=1,
            max_in_flight=in_flight,
            **more,
        )
        endpoint.mount(self.trainer)


async def enter(network: SimNetwork, *names: str) -> list[SimEndpoint]:
    """Endpoints of these names, in the run."""
    found = [network.endpoint(name) for name in names]
    for endpoint in found:
        await endpoint.enter(RUN)
    return found


@asynccontextmanager
async def working(*replicas: Replica) -> AsyncIterator[list[asyncio.Task[None]]]:
    """The replicas' loops run inside; what ends one early comes out of its task."""
    tasks = [asyncio.create_task(replica.server.run()) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
