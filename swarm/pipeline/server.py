"""A stage replica's side of a journey: admit, queue, compute, pass on.

Admission is decided before a payload is read. Work is done one piece at a time on the device thread; handing results
on happens beside it, so that the next piece starts at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from swarm.clock import Clock
from swarm.device import DeviceThread
from swarm.errors import BugError, Busy, PeerError, Refused, Violation, WrongStep
from swarm.events import Accumulated, EventSink
from swarm.ids import MicrobatchId, PeerId, RunId, stage_part
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Answer, Endpoint, Method, Request
from swarm.pipeline.compute import BoundarySpecs, StageCompute
from swarm.pipeline.handover import Handover
from swarm.pipeline.messages import Backward, Direction, Forward, JourneyMessage, Resend, Targets
from swarm.pipeline.passage import Passage
from swarm.pipeline.queue import WorkQueue
from swarm.schema import Empty

logger = logging.getLogger(__name__)
DONE = Answer(Empty())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """One replica's place and limits. ``send_timeout_s`` bounds one hand-over, ``max_under_way`` the graphs
    and payloads held; four times as many may have sent their (hosted) targets ahead. ``seed`` is the run's."""

    run: RunId
    stage: int
    stages: int
    specs: BoundarySpecs
    seed: int = 0
    max_queue: int = 32
    max_under_way: int = 64
    send_timeout_s: float = 30.0

    @property
    def max_ahead(self) -> int:
        """How many targets may wait for their microbatch."""
        return 4 * self.max_under_way

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


@dataclass(frozen=True, slots=True)
class Places:
    """Who takes part in a step: whose microbatches are taken, and who may stand where on a route."""

    trainers: frozenset[PeerId]
    stages: tuple[frozenset[PeerId], ...]

    @classmethod
    def of(cls, trainers: Iterable[PeerId], stages: Iterable[Iterable[PeerId]]) -> Places:
        """From a roster's slices."""
        return cls(frozenset(trainers), tuple(map(frozenset, stages)))


class StageServer:
    """The ``pipeline/1`` service of one replica. ``open_step`` moves it from step to step."""

    def __init__(self, settings: StageSettings, context: StageContext, places: Places) -> None:
        self._settings, self._context = settings, context
        self._step = 0
        self._places = places
        self._passages: dict[tuple[int, MicrobatchId], Passage] = {}
        self._queue: WorkQueue[Passage] = WorkQueue(settings.max_queue)
        self._wake = asyncio.Event()
        self._sending: asyncio.TaskGroup | None = None
        self._handover = Handover(settings, context)

    # --- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int, places: Places) -> None:
        """Accept and compute work of ``step``; forget everything older."""
        self._step, self._places = step, places
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
        if len(route) != self._settings.stages or route[self._settings.stage] != self._context.endpoint.peer:
            raise Refused("the route does not lead through this replica")
        self._check_places(body, route)
        if not max(1, self._step) <= body.step <= self._step + 1:
            raise WrongStep(f"step {body.step} is not open here, step {self._step} is")
        known = self._passages.get((body.step, body.microbatch))
        if known is not None and body.attempt < known.key.attempt:
            raise Refused(f"attempt {body.attempt} was superseded by {known.key.attempt}")

    def _check_places(self, body: JourneyMessage, route: tuple[str, ...]) -> None:
        """Who takes part in the step after the open one is known when it opens: until then a stranger may be new."""
        trainer, may_be_new = body.microbatch.trainer, body.step == self._step + 1
        if trainer not in self._places.trainers:
            raise Busy("not open yet") if may_be_new else Refused(f"{trainer} is not a trainer of this run")
        stranger = next((p for p, known in zip(route, self._places.stages, strict=True) if p not in known), None)
        if stranger is not None:
            reason = f"{stranger} does not hold the stage at which the route names it"
            raise Busy("not open yet") if may_be_new else Refused(reason)

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
        if known is not None and (known.begun or known.forward_attempt >= body.attempt):
            raise Refused("this microbatch is already here")
        now = self._context.clock.monotonic()
        under_way = sum(passage.under_way(now) for passage in self._passages.values())
        if self._queue.full or under_way >= settings.max_under_way:
            raise Busy(f"{under_way} microbatches under way")
        passage = self._passage(body, body.route)
        passage.forward_attempt, passage.expires = body.attempt, now + settings.send_timeout_s

    def _admit_targets(self, caller: PeerId, body: Targets, payload_bytes: int) -> None:
        self._check_journey(body, body.route)
        if caller != body.microbatch.trainer or not self._settings.computes_loss:
            raise Refused("targets go from their trainer to the last stage of a run with hosted ends")
        if payload_bytes != self._settings.specs.token_bytes:
            raise Violation(
                f"targets of {payload_bytes} bytes where {self._settings.specs.token_bytes} are expected", peer=caller
            )
        known = self._passages.get((body.step, body.microbatch))
        ahead = sum(passage.forward_attempt < 0 for passage in self._passages.values())
        if known is None and ahead >= self._settings.max_ahead:
            raise Busy(f"{ahead} targets wait for their microbatch")

    def _admit_backward(self, caller: PeerId, body: Backward, payload_bytes: int) -> None:
        settings = self._settings
        self._check_journey(body, body.route)
        downstream = body.microbatch.trainer if settings.last else body.route[settings.stage + 1]
        if caller != downstream or body.hop != settings.stage:
            raise Refused(f"backward for stage {settings.stage} must come from {downstream}")
        if payload_bytes != settings.specs.activation_bytes:
            raise Violation(f"gradient of {payload_bytes} bytes where {settings.specs.activation_bytes} are expected")
        self._awaiting_gradient(body)

    def _awaiting_gradient(self, body: Backward) -> None:
        """The way back is the way there: a neighbour may name another route downstream, where it was moved, but not
        send what is ours to give elsewhere."""
        known = self._passages.get((body.step, body.microbatch))
        if known is None or known.graph is None or known.gradient is not None:
            raise Refused("no forward of this microbatch waits here for its gradient")
        if body.route[: self._settings.stage] != known.route[: self._settings.stage]:
            raise Refused("the way back leads elsewhere than the way there")

    def _passage(self, body: JourneyMessage, route: tuple[str, ...]) -> Passage:
        index = (body.step, body.microbatch)
        peers = tuple(PeerId(peer) for peer in route)
        passage = self._passages.get(index)
        if passage is None:
            passage = self._passages[index] = Passage(body.key, peers)
        passage.key, passage.route = body.key, peers
        return passage

    # --- arrivals ------------------------------------------------------------------------------------------------

    # The payload of an admitted message takes its time: what admission found may have changed meanwhile.

    async def _on_forward(self, request: Request) -> Answer:
        body: Forward = request.body
        self._check_journey(body, body.route)
        passage = self._passages.get((body.step, body.microbatch))
        if passage is None or passage.begun or passage.forward_attempt != body.attempt:
            raise Refused("this forward is not awaited any more")
        passage.input, passage.begun = request.payload, True
        self._enqueue_forward(passage)
        return DONE

    async def _on_targets(self, request: Request) -> Answer:
        body: Targets = request.body
        self._check_journey(body, body.route)
        passage = self._passage(body, body.route)
        if passage.accumulated or (passage.begun and passage.targets is not None):
            return DONE  # a trainer that comes back to a replica brings them again
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
        body: Backward = request.body
        self._check_journey(body, body.route)
        self._awaiting_gradient(body)
        passage = self._passage(body, body.route)
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
        if body.hop != self._settings.stage + 1:
            raise Refused(f"stage {self._settings.stage} hands on to the next stage only, not to {body.hop}")
        passage = self._passages.get((body.step, body.microbatch))
        if passage is None or passage.output is None or passage.gradient is not None:
            raise Refused("the output to send again is not held here")
        if body.attempt <= passage.key.attempt:
            raise Refused(f"attempt {body.attempt} was sent already")
        self._passage(body, body.route)
        self._spawn(self._handover.pass_forward(passage, passage.output))
        return DONE

    # --- work ----------------------------------------------------------------------------------------------------

    async def _work(self, passage: Passage) -> None:
        started = self._context.clock.monotonic()
        queued = started - passage.arrived
        direction: Direction = "forward" if passage.gradient is None else "backward"
        try:
            if direction == "backward":
                await self._backward(passage, queued)
            elif self._settings.computes_loss:
                await self._forward_backward(passage, queued)
            else:
                await self._forward(passage, queued)
        except BugError:
            raise
        except PeerError as error:
            logger.warning("step %d, microbatch %s: %s", passage.key.step, passage.key.microbatch, error)
            self._give_up(passage, direction, error)
        except Exception as error:  # one poisonous microbatch is its trainer's trouble, not the end of the replica
            logger.exception("step %d, microbatch %s", passage.key.step, passage.key.microbatch)
            self._give_up(passage, direction, PeerError(f"{type(error).__name__}: {error}"))

    def _give_up(self, passage: Passage, direction: Direction, error: PeerError) -> None:
        """Nothing was accumulated: forget the microbatch and say so. A new attempt may come."""
        passage.clear()
        if self._current(passage):
            del self._passages[passage.index]
            self._spawn(
                self._handover.report_blocked(passage.key, passage.route, self._settings.stage, direction, error)
            )

    def _current(self, passage: Passage) -> bool:
        """Whether its step is still open."""
        return self._passages.get(passage.index) is passage

    async def _forward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        seed = dropout_seed(self._settings.seed, passage.key.microbatch)
        payload = passage.input
        if payload is None:
            raise BugError("a forward was queued without its input")
        output, graph = await self._context.device.run(
            lambda: self._context.compute.forward(payload, seed, first=self._settings.first)
        )
        passage.input = None
        if not self._current(passage):
            return
        passage.graph, passage.output = graph, output
        self._spawn(self._handover.report(passage, "forward", queued, self._context.clock.monotonic() - started))
        self._spawn(self._handover.pass_forward(passage, output))

    async def _backward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        graph, payload, sender = passage.graph, passage.gradient, passage.gradient_sender
        passage.graph = passage.output = None
        if graph is None or payload is None or sender is None:
            raise BugError("a backward was queued without its graph or its gradient")
        gradient = await self._context.device.run(
            lambda: self._context.compute.backward(graph, payload, passage.key.microbatch, sender)
        )
        self._contributed(passage)
        self._spawn(self._handover.report(passage, "backward", queued, self._context.clock.monotonic() - started))
        self._spawn(self._handover.pass_backward(passage, gradient))

    async def _forward_backward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        seed = dropout_seed(self._settings.seed, passage.key.microbatch)
        payload, targets = passage.input, passage.targets
        if payload is None or targets is None:
            raise BugError("a forward was queued without its input or its targets")
        gradient, loss_sum, tokens = await self._context.device.run(
            lambda: self._context.compute.forward_backward(
                payload, targets, seed, passage.key.microbatch, first=self._settings.first
            )
        )
        self._contributed(passage)
        elapsed = self._context.clock.monotonic() - started
        self._spawn(self._handover.report(passage, "backward", queued, elapsed, loss_sum=loss_sum, tokens=tokens))
        self._spawn(self._handover.pass_backward(passage, gradient))

    def _contributed(self, passage: Passage) -> None:
        passage.accumulated = True
        passage.clear()
        key, part = passage.key, stage_part(self._settings.stage)
        self._context.events.emit(Accumulated(step=key.step, microbatch=key.microbatch, part=part))

    # --- handing on ----------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._sending is not None  # noqa: S101 - work is only done inside run()
        self._sending.create_task(work)
