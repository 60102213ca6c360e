"""A trainer feeds a step: leases quota, keeps journeys in flight, reports each one that came home.

Read :meth:`Trainer.feed` first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Protocol

from swarm.errors import PeerError, Refused, StateError, WrongStep
from swarm.events import JourneyCompleted, JourneySetAside
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.pipeline.activity import PipelineActivity
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.messages import (
    BLOCKED,
    GRADIENT,
    HOP,
    OUTPUT,
    TRAINER_RECALL,
    Blocked,
    HopReport,
    InputGradient,
    JourneyMessage,
    Output,
    What,
)
from swarm.pipeline.retention import RETENTION_BYTES, HeldOfMicrobatches
from swarm.pipeline.settle import Assigned, settle
from swarm.pipeline.trainer.context import JourneyContext, JourneyHooks
from swarm.pipeline.trainer.ends import TrainerEnds
from swarm.pipeline.trainer.journey import FinishedJourney, Journey, OwnFailure, Poisoned
from swarm.pipeline.trainer.liveness import LivenessProbes, begin_in
from swarm.pipeline.trainer.taken import InFlight, Issued, IssuedMicrobatch
from swarm.schema import Empty
from swarm.waiting import first_done

logger = logging.getLogger(__name__)
DONE = Empty()
TAKEN = Answer(DONE)
OWN_FAILURES = 3
"""So many microbatches one after the other fail here before it is not put down to them: to set one after the other
aside would take the shard's whole epoch out of the training."""
LOOK_S = 0.5
"""How often is looked whether a stage has a replica again that is there, before more is leased."""


class StepLeader(Protocol):
    """The step's leader as a trainer sees it; implemented by ``swarm.step``. It retries by itself: a PeerError from
    ``complete`` or ``set_aside`` means that the microbatch does not count."""

    async def lease(self, step: int, wanted: int) -> int:
        """Ask for quota: how many microbatches of ``step`` this trainer may start now; 0 means the rest is leased. Who
        wants none may start none of what it has not started yet."""

    async def complete(self, journey: FinishedJourney) -> None:
        """Report a finished journey; returns when leader and successor acknowledged it."""

    async def set_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        """Report a microbatch that cannot be computed; its quota is free again."""

    async def wait_quota(self, step: int) -> None:
        """Returns when asking for quota again makes sense."""


class Trainer:
    """The ``trainer/1`` service and the feeding loop of one trainer. ``retention_bytes`` is the budget for the tensors
    retained of the open step's microbatches."""

    def __init__(  # noqa: PLR0913 - said in full where a node is put together
        self,
        context: JourneyContext,
        source: BatchSource,
        *,
        specs: BoundarySpecs,
        replicas: Sequence[int],
        trainers: int,
        max_in_flight: int | None = None,
        retention_bytes: int = RETENTION_BYTES,
    ) -> None:
        self._context, self._source = context, source
        self._in_flight = InFlight(replicas, trainers, max_in_flight)
        self._journeys: dict[tuple[int, MicrobatchId], Journey] = {}
        self._tasks: dict[tuple[int, MicrobatchId], asyncio.Task[None]] = {}
        self._outcomes: dict[tuple[int, MicrobatchId], FinishedJourney | Poisoned] = {}
        self._changed = asyncio.Event()
        self._own_failures = 0
        self._taken = Issued()
        self._open = (0, "")
        self._ends = TrainerEnds(context, source, specs=specs, retention_bytes=retention_bytes)

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            OUTPUT.handled_with_payload(self._on_output, admit=self._admit_tensor),
            GRADIENT.handled_with_payload(self._on_gradient, admit=self._admit_tensor),
            HOP.handled(self._on_report),
            BLOCKED.handled(self._on_blocked),
            TRAINER_RECALL.handled_with_payload(self._ends.answer),
        ]

    # --- steps ---------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, position) of the next microbatch of our shard."""
        return self._source.cursor

    def held(self) -> HeldOfMicrobatches:
        """What is held of microbatches now; with private ends each journey has the graph of its embedding."""
        graphs = 0 if self._context.ends is None else len(self._journeys)
        return HeldOfMicrobatches(graphs, self._ends.retained_bytes)

    def activity(self) -> PipelineActivity:
        """What is done now: of a trainer, the journeys under way and whom it leaves out."""
        parole = self._context.replicas.wiring.on_parole(now=self._context.clock.monotonic())
        return PipelineActivity(under_way=len(self._journeys), parole=parole)

    def open_step(
        self,
        step: int,
        stages: Sequence[Sequence[PeerId]],
        trainers: int,
        cursor: tuple[int, int] | None,
        after: str = "",
    ) -> None:
        """Work on ``step`` from now on, among these replicas of each stage and as one of so many trainers. It follows
        the record whose hash begins with ``after``.

        Journeys of older steps are cancelled at once and what was retained of them is forgotten. Continues our shard at
        ``cursor`` where that is given and another than ours; raises ConfigError when it is outside the shard.
        """
        self._open = (step, after)
        for index in [index for index in self._tasks if index[0] < step]:
            self._tasks[index].cancel()
        self._outcomes = {index: outcome for index, outcome in self._outcomes.items() if index[0] >= step}
        self._taken.drop_before(step)
        self._in_flight.follow([len(replicas) for replicas in stages], trainers)
        self._context.replicas.follow(stages)
        try:
            if cursor is not None and cursor != self._source.cursor:
                self._source.seek(cursor)
        finally:
            self._ends.open_step(step, after)

    def rewound(self) -> None:
        """A lineage was given up: forget what was taken and what came of it, for its steps come again, and the record
        says where our shard goes on."""
        for task in self._tasks.values():
            task.cancel()
        self._outcomes = {}
        self._taken.clear()
        self._ends.rewound()

    def started(self, step: int) -> tuple[MicrobatchId, ...]:
        """The microbatches taken in the step, in that order, those set aside as well, but for those not kept."""
        return self._taken.started(step)

    def keep(self, step: int, count: int) -> None:
        """Only the first ``count`` microbatches started count, or are set aside. Of the others nothing is reported any
        more, and our shard goes back to the first of them: whoever takes from it takes them again. Their journeys go
        on, each microbatch makes but one in a step: taken again in this one, what came of it is reported. What the ends
        added of them is else for :meth:`settle` to reverse."""
        left = self._taken.keep(step, count)
        for microbatch in left:
            task = self._tasks.get((step, microbatch))
            if task is not None and (step, microbatch) in self._outcomes:
                task.cancel()
        if left:
            self._source.seek((left[0].epoch, left[0].position))

    def cursor_after(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int]:
        """(epoch, position) from which our shard continues when the step closes with these microbatches: the first one
        that was taken and is neither committed nor set aside, else the next one."""
        return self._taken.first_left(step, committed) or self._source.cursor

    async def settle(self, step: int, assigned: Assigned) -> None:
        """Have exactly the ``assigned`` microbatches, all of them ours, in the private ends' open step. See
        :func:`~swarm.pipeline.settle.settle`. Raises WrongStep when ``step`` is not open here."""
        ends = self._context.ends
        if ends is not None and step != ends.part.step + 1:
            raise WrongStep(f"step {step} is not open here, step {ends.part.step + 1} is")
        await settle(self._ends, step, assigned)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone: every journey through it is repaired now, without waiting for its deadlines."""
        self._context.suspect(peer, reason)
        self._context.replicas.silence.lost(peer)
        for journey in list(self._journeys.values()):
            journey.lost(peer, reason)

    # --- feeding -------------------------------------------------------------------------------------------------

    async def feed(self, step: int, leader: StepLeader) -> None:
        """Work on ``step`` for as long as the leader has quota, or may have some again: until cancelled, or until
        another step is opened. Journeys under way are then cancelled.

        No single journey ends it, whatever becomes of it; a bug does, what ``leader`` raises and is no PeerError, and
        StateError when our own part fails at one microbatch after the other, or our shard is not what it was.
        """
        changed = self._changed
        async with asyncio.TaskGroup() as group:
            attendance = LivenessProbes(self._context.endpoint, self._context.clock, group, self.lost)
            hooks = JourneyHooks(attendance.need, lambda work: begin_in(group, work), self._warn)
            while step >= self._open[0]:
                changed.clear()
                room = self._in_flight.limit() - self._under_way(step)
                if room <= 0:
                    await first_done(changed.wait(), leader.wait_quota(step))
                    if changed.is_set():
                        continue
                way = self._has_way()
                # Also for nothing: a new leader waits to hear what was begun.
                granted = await leader.lease(step, max(0, room) if way else 0)
                for _ in range(granted if step >= self._open[0] else 0):
                    self._start(group, IssuedMicrobatch(step, self._source.take(), self._open[1]), leader, hooks)
                if not way:
                    await self._context.clock.sleep(LOOK_S)
                elif granted <= 0 < room:
                    await leader.wait_quota(step)
            attendance.close()

    def _has_way(self) -> bool:
        """Whether every stage has a replica that is there, as far as we see. What is leased without would be kept from
        those who may see more."""
        return all(self._context.replicas.present(stage) for stage in range(self._context.stages))

    def _under_way(self, step: int) -> int:
        """Journeys; not what is only being reported, to one who may have stalled."""
        return sum(index[0] == step and index not in self._outcomes for index in self._tasks)

    def _warn(self) -> None:
        for journey in list(self._journeys.values()):
            journey.look_again()

    def _start(self, group: asyncio.TaskGroup, kept: IssuedMicrobatch, leader: StepLeader, hooks: JourneyHooks) -> None:
        """Send a microbatch on its way, and report what comes of it. One that was left is on its way or at its end
        already."""
        index = (kept.step, kept.batch.id)
        self._taken.add(*index)
        if index in self._outcomes:
            task = group.create_task(self._report(index, leader))
        elif index in self._tasks:
            return
        else:
            self._ends.keep(kept)
            task = group.create_task(self._journey(kept, leader, hooks))
        self._tasks[index] = task

        def ended(done: asyncio.Task[None]) -> None:
            self._changed.set()
            if self._tasks.get(index) is done:
                del self._tasks[index]

        task.add_done_callback(ended)

    async def _journey(self, kept: IssuedMicrobatch, leader: StepLeader, hooks: JourneyHooks) -> None:
        index = (kept.step, kept.batch.id)
        try:
            outcome = await self._travel(kept, hooks)
        except PeerError as error:  # the step was closed
            logger.warning("step %d, microbatch %s does not count: %s", *index, error)
            return
        self._outcomes[index] = outcome
        self._changed.set()
        if self._taken.counts(*index):
            await self._report(index, leader)

    async def _travel(self, kept: IssuedMicrobatch, hooks: JourneyHooks) -> FinishedJourney | Poisoned:
        """One microbatch's journey. Raises WrongStep when the step was closed meanwhile."""
        index = (kept.step, kept.batch.id)
        journey = self._journeys[index] = Journey(self._context, kept, hooks)
        try:
            finished = await journey.travel()
        except Poisoned as poison:
            self._check_own_part(poison)
            return poison
        finally:
            if self._journeys.get(index) is journey:
                del self._journeys[index]
        self._own_failures = 0
        self._ends.came_home(kept)
        self._in_flight.observe(finished.seconds - finished.queued_s, finished.compute_s)
        return finished

    def _check_own_part(self, poison: Poisoned) -> None:
        self._own_failures += isinstance(poison, OwnFailure)
        if self._own_failures >= OWN_FAILURES:
            raise StateError(
                f"{self._own_failures} microbatches one after the other cannot be computed here; the last: {poison}. "
                "Check this machine's device and memory; then join again: the shard goes on where it was."
            ) from poison

    async def _report(self, index: tuple[int, MicrobatchId], leader: StepLeader) -> None:
        """Tell the leader what came of a microbatch."""
        outcome = self._outcomes[index]
        try:
            if isinstance(outcome, Poisoned):
                await self._set_aside(*index, str(outcome)[:400], leader)
            else:
                await self._complete(outcome, leader)
        except PeerError as error:  # the step was closed, or the leader does not count it: it is not committed
            logger.warning("step %d, microbatch %s does not count: %s", *index, error)

    async def _complete(self, finished: FinishedJourney, leader: StepLeader) -> None:
        await leader.complete(finished)
        self._context.events.emit(
            JourneyCompleted(
                step=finished.key.step,
                microbatch=finished.key.microbatch,
                tokens=finished.tokens,
                loss_sum=finished.loss_sum,
                route=finished.route,
                seconds=finished.seconds,
            )
        )

    async def _set_aside(self, step: int, microbatch: MicrobatchId, reason: str, leader: StepLeader) -> None:
        """It is nobody's fault but its own: go on with the next."""
        logger.warning("step %d, microbatch %s is set aside: %s", step, microbatch, reason)
        self._taken.set_aside(step, microbatch)
        self._context.events.emit(JourneySetAside(step=step, microbatch=microbatch, reason=reason))
        await leader.set_aside(step, microbatch, reason)

    # --- mail for journeys ---------------------------------------------------------------------------------------

    def _admit_tensor(self, caller: PeerId, body: JourneyMessage, payload_bytes: int) -> None:
        self._find(body)
        what: What = "output" if isinstance(body, Output) else "gradient"
        self._ends.check_size(what, body.step, payload_bytes, caller)

    def _find(self, body: JourneyMessage) -> Journey:
        journey = self._journeys.get((body.step, body.microbatch))
        if journey is None or journey.key.after != body.after:
            raise Refused("no such microbatch is under way here")
        return journey

    async def _on_output(self, caller: PeerId, body: Output, incoming: Incoming) -> Answer[Empty]:
        self._find(body).deliver_output(caller, body.attempt, incoming.payload)
        return TAKEN

    async def _on_gradient(self, caller: PeerId, body: InputGradient, incoming: Incoming) -> Answer[Empty]:
        self._find(body).deliver_gradient(caller, body.attempt, incoming.payload)
        return TAKEN

    async def _on_report(self, caller: PeerId, body: HopReport) -> Empty:
        self._find(body).deliver_report(caller, body)
        return DONE

    async def _on_blocked(self, caller: PeerId, body: Blocked) -> Empty:
        self._find(body).deliver_blocked(caller, body)
        return DONE
