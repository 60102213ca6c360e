"""A trainer feeds a step: leases quota, keeps journeys in flight, reports each one that came home.

Read :meth:`Trainer.feed` first.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from swarm.errors import Refused, Violation
from swarm.events import JourneyCompleted, JourneyStarted
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.flight import journeys_in_flight
from swarm.pipeline.journey import FinishedJourney, Journey, JourneyContext
from swarm.pipeline.messages import Blocked, HopReport, InputGradient, JourneyMessage, Output
from swarm.schema import Empty

DONE = Answer(Empty())


class StepLeader(Protocol):
    """The step's leader as a trainer sees it; implemented by ``optimization``."""

    async def lease(self, step: int, wanted: int) -> int:
        """Ask for quota: how many microbatches of ``step`` this trainer may start now; 0 means the rest is leased."""

    async def complete(self, journey: FinishedJourney) -> None:
        """Report a finished journey; returns when leader and successor acknowledged it. Raises a PeerError."""


class Trainer:
    """The ``trainer/1`` service and the feeding loop of one trainer."""

    def __init__(
        self,
        context: JourneyContext,
        source: BatchSource,
        *,
        activation_bytes: int,
        replicas: Sequence[int],
        trainers: int,
        max_in_flight: int | None = None,
    ) -> None:
        self._context, self._source = context, source
        self._activation_bytes = activation_bytes
        self._replicas = dict(enumerate(replicas))
        self._trainers = trainers
        self._max_in_flight = max_in_flight
        self._journeys: dict[tuple[int, MicrobatchId], Journey] = {}
        self._round_trips: deque[float] = deque(maxlen=32)
        self._compute_s: dict[int, deque[float]] = {stage: deque(maxlen=32) for stage in self._replicas}

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, position) of the next microbatch of our shard."""
        return self._source.cursor

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="trainer/1/output", request=Output, handle=self._on_output, admit=self._admit_tensor),
            Method(
                name="trainer/1/gradient", request=InputGradient, handle=self._on_gradient, admit=self._admit_tensor
            ),
            Method(name="trainer/1/hop", request=HopReport, handle=self._on_report),
            Method(name="trainer/1/blocked", request=Blocked, handle=self._on_blocked),
        ]

    def rewire(self, stages: Sequence[Sequence[PeerId]], trainers: int) -> None:
        """The replicas of each stage, and how many trainers feed them, from the next step on. Between two steps only:
        no journey is under way."""
        self._replicas = {stage: len(replicas) for stage, replicas in enumerate(stages)}
        self._trainers = trainers
        self._context.wiring.follow(stages)

    def seek(self, cursor: tuple[int, int]) -> None:
        """Continue our shard there: where a record says that it was left. Raises ConfigError outside the shard."""
        self._source.seek(cursor)

    # --- feeding -------------------------------------------------------------------------------------------------

    async def feed(self, step: int, leader: StepLeader) -> None:
        """Work on ``step`` until the leader has no quota left and our own journeys are home.

        Raises what a journey raises (in an ExceptionGroup); journeys in flight are then cancelled.
        """
        running: set[asyncio.Task[None]] = set()
        granted, exhausted = 0, False
        async with asyncio.TaskGroup() as group:
            while not exhausted or running:
                room = self._in_flight_limit() - len(running)
                if not granted and not exhausted and room > 0:
                    granted = await leader.lease(step, room)
                    exhausted = granted == 0
                while granted and room > 0:
                    granted, room = granted - 1, room - 1
                    running.add(group.create_task(self._journey(step, leader)))
                if running:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def _journey(self, step: int, leader: StepLeader) -> None:
        batch = self._source.take()
        journey = Journey(self._context, batch, step)
        index = (step, batch.id)
        self._journeys[index] = journey
        self._context.events.emit(JourneyStarted(step=step, microbatch=batch.id, route=journey.route))
        try:
            finished = await journey.travel()
        finally:
            del self._journeys[index]
        self._round_trips.append(max(0.0, finished.seconds - finished.queued_s))
        for stage, seconds in finished.compute_s.items():
            self._compute_s[stage].append(seconds)
        await leader.complete(finished)
        self._context.events.emit(
            JourneyCompleted(
                step=step,
                microbatch=batch.id,
                tokens=finished.tokens,
                loss_sum=finished.loss_sum,
                route=finished.route,
                seconds=finished.seconds,
            )
        )

    def _in_flight_limit(self) -> int:
        if self._max_in_flight is not None:
            return self._max_in_flight
        stage_s = {stage: statistics.median(recent) for stage, recent in self._compute_s.items() if recent}
        round_trip = statistics.median(self._round_trips) if self._round_trips else None
        return journeys_in_flight(round_trip, stage_s, self._replicas, self._trainers)[0]

    # --- mail for journeys ---------------------------------------------------------------------------------------

    def _admit_tensor(self, caller: PeerId, body: JourneyMessage, payload_bytes: int) -> None:
        self._find(body)
        if payload_bytes != self._activation_bytes:
            raise Violation(f"tensor of {payload_bytes} bytes where {self._activation_bytes} are expected", peer=caller)

    def _find(self, body: JourneyMessage) -> Journey:
        journey = self._journeys.get((body.step, body.microbatch))
        if journey is None:
            raise Refused("no such microbatch is under way here")
        return journey

    async def _on_output(self, request: Request) -> Answer:
        self._find(request.body).deliver_output(request.caller, request.body.attempt, request.payload)
        return DONE

    async def _on_gradient(self, request: Request) -> Answer:
        self._find(request.body).deliver_gradient(request.caller, request.body.attempt, request.payload)
        return DONE

    async def _on_report(self, request: Request) -> Answer:
        self._find(request.body).deliver_report(request.caller, request.body)
        return DONE

    async def _on_blocked(self, request: Request) -> Answer:
        self._find(request.body).deliver_blocked(request.caller, request.body)
        return DONE
