"""A stage replica's side of a journey: admit, queue, compute, pass on.

Admission is decided before a payload is read. Work is done one piece at a time on the device thread; handing results
on happens beside it, so that the next piece starts at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.clock import Clock
from swarm.device import DeviceThread
from swarm.errors import Busy, PeerError, Refused, Violation, WrongStep
from swarm.events import Accumulated, EventSink
from swarm.ids import JourneyKey, MicrobatchId, PeerId, RunId, stage_part
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Answer, Endpoint, Method, Payload, Request
from swarm.pipeline.compute import BoundarySpecs, Graph, StageCompute
from swarm.pipeline.messages import (
    Backward,
    Blocked,
    Forward,
    HopReport,
    InputGradient,
    JourneyMessage,
    Output,
    Resend,
    Targets,
)
from swarm.pipeline.queue import WorkQueue
from swarm.schema import Empty
from swarm.security.receipts import receipt_bytes

logger = logging.getLogger(__name__)
DONE = Answer(Empty())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """One replica's place and limits. ``send_timeout_s`` bounds one hand-over, ``max_under_way`` the graphs
    and payloads held."""

    run: RunId
    stage: int
    stages: int
    specs: BoundarySpecs
    max_queue: int = 32
    max_under_way: int = 64
    send_timeout_s: float = 30.0

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.stages - 1

    @property
    def computes_loss(self) -> bool:
        """Whether forward and backward are one piece of work here."""
        return self.last and self.specs.hosted


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a replica works with. ``sign`` signs receipts with this peer's key."""

    endpoint: Endpoint
    device: DeviceThread
    compute: StageCompute
    sign: Callable[[bytes], bytes]
    events: EventSink
    clock: Clock


@dataclass(slots=True, eq=False)
class Passage:
    """What this replica keeps of one microbatch while its journey lasts."""

    key: JourneyKey
    route: tuple[PeerId, ...]
    arrived: float = 0.0
    input: Payload | None = None
    targets: Payload | None = None
    output: Payload | None = None
    graph: Graph | None = None
    gradient: Payload | None = None
    gradient_sender: PeerId | None = None
    forward_attempt: int = -1
    accumulated: bool = False


class StageServer:
    """The ``pipeline/1`` service of one replica. ``open_step`` moves it from step to step."""

    def __init__(self, settings: StageSettings, context: StageContext, trainers: Sequence[PeerId]) -> None:
        self._settings, self._context = settings, context
        self._step = 0
        self._trainers = frozenset(trainers)
        self._passages: dict[tuple[int, MicrobatchId], Passage] = {}
        self._queue: WorkQueue[Passage] = WorkQueue(settings.max_queue)
        self._wake = asyncio.Event()
        self._sending: asyncio.TaskGroup | None = None

    # --- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int, trainers: Sequence[PeerId]) -> None:
        """Accept and compute work of ``step`` from these trainers; forget everything older."""
        self._step, self._trainers = step, frozenset(trainers)
        self._queue.drop_before(step)
        self._passages = {index: kept for index, kept in self._passages.items() if index[0] >= step}
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._sending = group
            while True:
                passage = self._queue.pop(self._step)
                if passage is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    await self._work(passage)

    # --- admission -----------------------------------------------------------------------------------------------

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="pipeline/1/forward", request=Forward, handle=self._on_forward, admit=self._admit_forward),
            Method(name="pipeline/1/targets", request=Targets, handle=self._on_targets, admit=self._admit_targets),
            Method(name="pipeline/1/backward", request=Backward, handle=self._on_backward, admit=self._admit_backward),
            Method(name="pipeline/1/resend", request=Resend, handle=self._on_resend),
        ]

    def _check_journey(self, body: JourneyMessage, route: tuple[str, ...]) -> None:
        if body.microbatch.trainer not in self._trainers:
            raise Refused(f"{body.microbatch.trainer} is not a trainer of this run")
        if len(route) != self._settings.stages or route[self._settings.stage] != self._context.endpoint.peer:
            raise Refused("the route does not lead through this replica")
        if not self._step <= body.step <= self._step + 1:
            raise WrongStep(f"step {body.step} is not open here, step {self._step} is")
        known = self._passages.get((body.step, body.microbatch))
        if known is not None and body.attempt < known.key.attempt:
            raise Refused(f"attempt {body.attempt} was superseded by {known.key.attempt}")

    def _admit_forward(self, caller: PeerId, body: Forward, payload_bytes: int) -> None:
        settings = self._settings
        self._check_journey(body, body.route)
        upstream = body.microbatch.trainer if settings.first else body.route[settings.stage - 1]
        if caller != upstream or body.hop != settings.stage:
            raise Refused(f"forward for stage {settings.stage} must come from {upstream}")
        tokens_come = settings.first and settings.specs.hosted
        expected = settings.specs.token_bytes if tokens_come else settings.specs.activation_bytes
        if payload_bytes != expected:
            raise Violation(f"activation of {payload_bytes} bytes where {expected} are expected", peer=caller)
        known = self._passages.get((body.step, body.microbatch))
        if known is not None and known.forward_attempt >= 0:
            raise Refused("this microbatch is already here")
        if self._queue.full or self._under_way >= settings.max_under_way:
            raise Busy(f"{self._under_way} microbatches under way")
        self._passage(body, body.route).forward_attempt = body.attempt

    def _admit_targets(self, caller: PeerId, body: Targets, payload_bytes: int) -> None:
        self._check_journey(body, body.route)
        if caller != body.microbatch.trainer or not self._settings.computes_loss:
            raise Refused("targets go from their trainer to the last stage of a run with hosted ends")
        if payload_bytes != self._settings.specs.token_bytes:
            raise Violation(f"targets of {payload_bytes} bytes where {self._settings.specs.token_bytes} are expected")

    def _admit_backward(self, caller: PeerId, body: Backward, payload_bytes: int) -> None:
        settings = self._settings
        self._check_journey(body, body.route)
        downstream = body.microbatch.trainer if settings.last else body.route[settings.stage + 1]
        if caller != downstream or body.hop != settings.stage:
            raise Refused(f"backward for stage {settings.stage} must come from {downstream}")
        if payload_bytes != settings.specs.activation_bytes:
            raise Violation(f"gradient of {payload_bytes} bytes where {settings.specs.activation_bytes} are expected")
        known = self._passages.get((body.step, body.microbatch))
        if known is None or known.graph is None or known.gradient is not None:
            raise Refused("no forward of this microbatch waits here for its gradient")

    @property
    def _under_way(self) -> int:
        return sum(not passage.accumulated for passage in self._passages.values())

    def _passage(self, body: JourneyMessage, route: tuple[str, ...]) -> Passage:
        index = (body.step, body.microbatch)
        peers = tuple(PeerId(peer) for peer in route)
        passage = self._passages.get(index)
        if passage is None:
            passage = self._passages[index] = Passage(body.key, peers)
        passage.key, passage.route = body.key, peers
        return passage

    # --- arrivals ------------------------------------------------------------------------------------------------

    async def _on_forward(self, request: Request) -> Answer:
        passage = self._passage(request.body, request.body.route)
        passage.input = request.payload
        self._enqueue_forward(passage)
        return DONE

    async def _on_targets(self, request: Request) -> Answer:
        passage = self._passage(request.body, request.body.route)
        passage.targets = request.payload
        self._enqueue_forward(passage)
        return DONE

    def _enqueue_forward(self, passage: Passage) -> None:
        if passage.input is None or (self._settings.computes_loss and passage.targets is None):
            return
        passage.arrived = self._context.clock.monotonic()
        self._queue.push("forward", passage.key.step, passage)
        self._wake.set()

    async def _on_backward(self, request: Request) -> Answer:
        passage = self._passage(request.body, request.body.route)
        passage.gradient, passage.gradient_sender = request.payload, request.caller
        passage.arrived = self._context.clock.monotonic()
        self._queue.push("backward", passage.key.step, passage)
        self._wake.set()
        return DONE

    async def _on_resend(self, request: Request) -> Answer:
        body: Resend = request.body
        if request.caller != body.microbatch.trainer:
            raise Refused("only its trainer reroutes a microbatch")
        self._check_journey(body, body.route)
        passage = self._passages.get((body.step, body.microbatch))
        if passage is None or passage.output is None:
            raise Refused("the output to send again is not held here")
        self._passage(body, body.route)
        self._spawn(self._pass_forward(passage, passage.output))
        return DONE

    # --- work ----------------------------------------------------------------------------------------------------

    async def _work(self, passage: Passage) -> None:
        started = self._context.clock.monotonic()
        queued = started - passage.arrived
        direction = "forward" if passage.gradient is None else "backward"
        try:
            if direction == "backward":
                await self._backward(passage, queued)
            elif self._settings.computes_loss:
                await self._forward_backward(passage, queued)
            else:
                await self._forward(passage, queued)
        except PeerError as error:
            logger.warning("step %d, microbatch %s: %s", passage.key.step, passage.key.microbatch, error)
            self._spawn(self._report_blocked(passage, self._settings.stage, direction, error))

    async def _forward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        seed = dropout_seed(self._settings.run, passage.key.microbatch)
        payload = passage.input
        assert payload is not None  # noqa: S101 - queued only when it is there
        output, graph = await self._context.device.run(
            lambda: self._context.compute.forward(payload, seed, first=self._settings.first)
        )
        passage.graph, passage.input, passage.output = graph, None, output
        self._spawn(self._report(passage, "forward", queued, self._context.clock.monotonic() - started))
        self._spawn(self._pass_forward(passage, output))

    async def _backward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        graph, payload, sender = passage.graph, passage.gradient, passage.gradient_sender
        passage.graph = passage.output = None
        assert payload is not None and sender is not None  # noqa: S101, PT018 - set together on arrival
        gradient = await self._context.device.run(
            lambda: self._context.compute.backward(graph, payload, passage.key.microbatch, sender)
        )
        self._contributed(passage)
        self._spawn(self._report(passage, "backward", queued, self._context.clock.monotonic() - started))
        self._spawn(self._pass_backward(passage, gradient))

    async def _forward_backward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        seed = dropout_seed(self._settings.run, passage.key.microbatch)
        payload, targets = passage.input, passage.targets
        passage.input = passage.targets = None
        assert payload is not None and targets is not None  # noqa: S101, PT018 - queued only when both are there
        gradient, loss_sum, tokens = await self._context.device.run(
            lambda: self._context.compute.forward_backward(
                payload, targets, seed, passage.key.microbatch, first=self._settings.first
            )
        )
        self._contributed(passage)
        elapsed = self._context.clock.monotonic() - started
        self._spawn(self._report(passage, "backward", queued, elapsed, loss_sum=loss_sum, tokens=tokens))
        self._spawn(self._pass_backward(passage, gradient))

    def _contributed(self, passage: Passage) -> None:
        passage.accumulated = True
        key, part = passage.key, stage_part(self._settings.stage)
        self._context.events.emit(Accumulated(step=key.step, microbatch=key.microbatch, part=part))

    # --- passing on ----------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._sending is not None  # noqa: S101 - work is only done inside run()
        self._sending.create_task(work)

    async def _pass_forward(self, passage: Passage, output: Payload) -> None:
        key, hop = passage.key, self._settings.stage + 1
        fields: dict[str, Any] = {"step": key.step, "microbatch": key.microbatch, "attempt": key.attempt}
        try:
            if self._settings.last:
                await self._send(key.microbatch.trainer, "trainer/1/output", Output(**fields), output)
                passage.output = None
            else:
                body = Forward(**fields, route=passage.route, hop=hop)
                await self._send(passage.route[hop], "pipeline/1/forward", body, output)
        except PeerError as error:
            await self._report_blocked(passage, hop, "forward", error)

    async def _pass_backward(self, passage: Passage, gradient: Payload | None) -> None:
        key, hop = passage.key, self._settings.stage - 1
        fields: dict[str, Any] = {"step": key.step, "microbatch": key.microbatch, "attempt": key.attempt}
        try:
            if gradient is None:
                return
            if self._settings.first:
                await self._send(key.microbatch.trainer, "trainer/1/gradient", InputGradient(**fields), gradient)
            else:
                body = Backward(**fields, route=passage.route, hop=hop)
                await self._send(passage.route[hop], "pipeline/1/backward", body, gradient)
        except PeerError as error:
            await self._report_blocked(passage, max(hop, 0), "backward", error)

    async def _send(self, target: PeerId, method: str, body: JourneyMessage, payload: Payload = b"") -> None:
        await self._context.endpoint.call(
            target, method, body, Empty, timeout_s=self._settings.send_timeout_s, payload=payload
        )

    async def _report(self, passage: Passage, direction: Any, queued: float, computed: float, **loss: Any) -> None:
        key, stage = passage.key, self._settings.stage
        receipt = b""
        if direction == "backward":
            receipt = self._context.sign(receipt_bytes(self._settings.run, key.step, key.microbatch, stage))
        report = HopReport(
            step=key.step,
            microbatch=key.microbatch,
            attempt=key.attempt,
            hop=stage,
            direction=direction,
            queued_s=max(0.0, queued),
            compute_s=computed,
            receipt=receipt,
            **loss,
        )
        await self._tell(key.microbatch.trainer, "trainer/1/hop", report)

    async def _report_blocked(self, passage: Passage, hop: int, direction: Any, error: PeerError) -> None:
        key = passage.key
        peer = passage.route[hop] if hop < len(passage.route) else key.microbatch.trainer
        blocked = Blocked(
            step=key.step,
            microbatch=key.microbatch,
            attempt=key.attempt,
            hop=min(hop, self._settings.stages - 1),
            direction=direction,
            peer=peer,
            code=error.code,
            reason=error.reason[:400],
        )
        await self._tell(key.microbatch.trainer, "trainer/1/blocked", blocked)

    async def _tell(self, trainer: PeerId, method: str, body: JourneyMessage) -> None:
        """Notify the trainer; if it cannot be told, its own deadline and the health watch deal with it."""
        try:
            await self._send(trainer, method, body)
        except Refused as refused:
            logger.debug("trainer %s no longer waits for this microbatch: %s", trainer, refused)
        except PeerError as error:
            logger.warning("cannot tell trainer %s: %s", trainer, error)
