"""A trainer feeds the steps: leases quota, keeps journeys in flight, reports each one that came home.

Read :meth:`Trainer.feed` first. Where the run overlaps, a trainer that has nothing left to do in the open step feeds
the next one early, up to a share of it: with the parameters that it has, while the step is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from swarm.errors import PeerError, WrongStep
from swarm.events import JourneyCompleted, JourneySetAside
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.pipeline.activity import PipelineActivity
from swarm.pipeline.batch import BatchSource
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
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.ends import TrainerEnds
from swarm.pipeline.trainer.flight import InFlight
from swarm.pipeline.trainer.journey import FinishedJourney, Poisoned
from swarm.pipeline.trainer.journey_table import JourneyTable
from swarm.pipeline.trainer.taken import Issued, IssuedMicrobatch
from swarm.pipeline.window import StepWindow
from swarm.schema import Empty
from swarm.waiting import first_done

logger = logging.getLogger(__name__)
DONE = Empty()
TAKEN = Answer(DONE)
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
    retained of the open steps' microbatches."""

    def __init__(
        self,
        context: JourneyContext,
        source: BatchSource,
        *,
        in_flight: InFlight,
        retention_bytes: int = RETENTION_BYTES,
    ) -> None:
        self._context, self._source, self._early = context, source, context.early
        self._in_flight = in_flight
        self._journeys = JourneyTable(context, self._came_home, self.lost)
        self._taken, self._window = Issued(), StepWindow(ahead=context.early.share > 0.0)
        self._quota, self._unleased, self._untold = (0, 0), set[StepWork](), set[StepWork]()
        self._ends = TrainerEnds(context, source, self._window, retention_bytes=retention_bytes)

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
        graphs = 0 if self._context.ends is None else len(self._journeys.travelling)
        return HeldOfMicrobatches(graphs, self._ends.retained_bytes)

    def activity(self) -> PipelineActivity:
        """What is done now: of a trainer, the journeys under way and whom it leaves out."""
        parole = self._context.replicas.wiring.on_parole(now=self._context.clock.monotonic())
        return PipelineActivity(under_way=len(self._journeys.travelling), parole=parole)

    def open_step(
        self,
        step: int,
        stages: Sequence[Sequence[PeerId]],
        trainers: int,
        cursor: tuple[int, int] | None,
        follows: tuple[str, str] = ("", ""),
        since: Mapping[PeerId, int] | None = None,
    ) -> None:
        """Work on ``step`` from now on, among these replicas of each stage and as one of so many trainers. The hash of
        the record that it follows, and that of the one before that, begin as in ``follows``; ``since`` when says which
        replicas joined.

        Journeys of older steps are cancelled at once and what was retained of them is forgotten; what was fed early of
        this one goes on. Continues our shard at ``cursor`` where that is given and another than ours; raises
        ConfigError when it is outside the shard.
        """
        new = (since or {}).get(self._context.endpoint.peer, 0) >= step  # it fed nothing early: it was not there
        may_have_fed = self._quota[1] if step == self._window.step + 1 and not new else 0
        self._quota = may_have_fed, self._early.quota(step + 1, trainers)
        self._window.open_step(step, *follows)
        self._journeys.drop_before(step)
        self._taken.drop_before(step)
        self._unleased = {work for work in self._unleased if work.step >= step}
        self._untold = {work for work in self._untold if work.step >= step}
        self._context.replicas.follow(stages, since)
        self._in_flight.follow(trainers)
        self._reroute(stages)
        begin = self._taken.first_left(step, ()) or self._source.cursor
        try:
            if cursor is not None and cursor != begin:  # something of the step before comes first
                self._taken.keep(step, 0)
                self._source.seek(cursor)
        finally:
            self._ends.open_step(step, self._taken.first_left(step, ()) or self._source.cursor)

    def _reroute(self, stages: Sequence[Sequence[PeerId]]) -> None:
        """What was fed early goes on without those that take part no more."""
        there = {peer for replicas in stages for peer in replicas}
        for peer in {peer for journey in self._journeys for peer in journey.route if peer not in there}:
            self._journeys.lost(peer, "it takes part no more")

    def rewound(self) -> None:
        """A lineage was given up: forget what was taken and what came of it, for its steps come again, and the record
        says where our shard goes on."""
        self._journeys.clear()
        self._taken.clear()
        self._unleased, self._untold = set(), set()
        self._ends.rewound()

    def started(self, step: int) -> tuple[MicrobatchId, ...]:
        """The microbatches taken in the step, in that order, those set aside as well, but for those not kept."""
        return self._taken.started(step)

    def keep(self, step: int, count: int) -> None:
        """Only the first ``count`` microbatches started are leased, and count or are set aside. Of the others nothing
        is reported any more, and our shard goes back to the first of them: whoever takes from it takes them again.
        Their journeys go on, each makes but one in a step: taken again in this one, what came of it is reported. What
        the ends added of them is else for :meth:`settle` to reverse."""
        left = self._taken.keep(step, count)
        self._unleased = {work for work in self._unleased if work.step != step}
        for work in (StepWork(step, microbatch, early) for microbatch in left for early in (False, True)):
            if work in self._journeys.outcomes:
                self._journeys.stop(work)
        if left:
            self._forgo_early(step + 1)  # it lies behind them
            self._source.seek((left[0].epoch, left[0].position))

    def drop_early(self, step: int) -> bool:
        """What was fed early of a step counts no more: nobody is left who could add it. Its microbatches, and those
        that were taken after them, are taken again. Whether there was something."""
        started = self._taken.started(step)
        early = [work for work in (StepWork(step, one, True) for one in started) if work in self._journeys]
        if early:
            self.keep(step, min(started.index(work.microbatch) for work in early))
        for work in early:
            self._journeys.withdraw(work)
        self._quota = 0, self._quota[1]
        return bool(early)

    def cursor_after(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int]:
        """(epoch, position) from which our shard continues when the step closes with these microbatches: the first one
        that was taken and is neither committed nor set aside, else the first that was taken for the next step, else the
        next one."""
        taken = self._taken
        return taken.first_left(step, committed) or taken.first_left(step + 1, ()) or self._source.cursor

    async def settle(self, step: int, assigned: Assigned) -> None:
        """Have exactly the ``assigned`` microbatches, all of them ours, in the private ends' sum of an open step. See
        :func:`~swarm.pipeline.settle.settle`. Raises WrongStep when ``step`` is not open here."""
        ends = self._context.ends
        if ends is not None and not ends.part.is_open(step):
            raise WrongStep(f"step {step} is not open here")
        await settle(self._ends, step, assigned)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone: every journey through it is repaired now, without waiting for its deadlines."""
        self._context.suspect(peer, reason)
        self._context.replicas.silence.lost(peer)
        self._journeys.lost(peer, reason)

    # --- feeding -------------------------------------------------------------------------------------------------

    async def feed(self, step: int, leader: StepLeader) -> None:
        """Work on ``step`` for as long as the leader has quota, or may have some again: until cancelled, or until
        another step is opened. Journeys under way are then cancelled, but for those that were fed early of the step
        that was opened.

        No single journey ends it, whatever becomes of it; a bug does, what ``leader`` raises and is no PeerError, and
        StateError when our own part fails at one microbatch after the other, or our shard is not what it was.
        """
        try:
            await first_done(self._feed(step, leader), self._journeys.failed())
        finally:
            await self._journeys.end(but=self._window.step if self._window.step > step else None)

    async def close(self) -> None:
        """End what goes on between two steps. Idempotent."""
        await self._journeys.end()

    async def _feed(self, step: int, leader: StepLeader) -> None:
        changed = self._journeys.changed
        while step >= self._window.step:
            changed.clear()
            room = self._in_flight.limit() - self._journeys.under_way
            if room <= 0:
                await first_done(changed.wait(), leader.wait_quota(step))
                if changed.is_set():
                    continue
            way = self._has_way()
            # Also for nothing: a new leader waits to hear what was begun.
            wanted = self._owed(step) + max(0, room) if way else 0
            granted = await leader.lease(step, wanted)
            if step < self._window.step:
                return
            self._begin_leased(step, granted if wanted else None, leader)
            if not way:
                await self._context.clock.sleep(LOOK_S)
            elif granted <= 0 < room:
                await self._feed_ahead(step, leader)

    def _owed(self, step: int) -> int:
        """How many that were fed early are not leased yet."""
        return sum(work.step == step for work in self._unleased)

    def _begin_leased(self, step: int, granted: int | None, leader: StepLeader) -> None:
        """Begin as many more as are ``granted``, where that was asked, but for what was begun early before it was
        leased; report of that."""
        started, asked, granted = self._taken.started(step), granted is not None, granted or 0
        if asked and (owed := self._owed(step)):
            self.keep(step, len(started) - max(0, owed - granted))
            granted = max(0, granted - owed)
        for work in [work for work in self._untold if work.step == step and work not in self._unleased]:
            self._untold.discard(work)
            if work in self._journeys.outcomes:
                self._journeys.again(work, lambda work: self._report(work, leader))
        if granted > 0:
            self._forgo_early(step + 1)
        for _ in range(granted):
            early = self._early.exact and len(self._taken.started(step)) < self._quota[0]
            self._start(self._issue(step, early=early), leader)

    async def _feed_ahead(self, step: int, leader: StepLeader) -> None:
        """Feed the next step early while there is nothing to do in this one; return when there may be again."""
        again = asyncio.ensure_future(leader.wait_quota(step))
        changed = self._journeys.changed
        try:
            while not again.done() and step >= self._window.step:
                changed.clear()
                room = self._in_flight.limit() - self._journeys.under_way
                left = self._quota[1] - len(self._taken.started(step + 1))
                for _ in range(min(room, left) if self._has_way() else 0):
                    kept = self._issue(step + 1, early=True)
                    self._unleased.add(kept.work)
                    self._start(kept, leader)
                waiting = asyncio.ensure_future(changed.wait())
                try:
                    await asyncio.wait({again, waiting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
            if again.done():
                again.result()
        finally:
            again.cancel()

    def _forgo_early(self, step: int) -> None:
        """The step before has room for more: what was fed early of this one is taken again, and counts there first. So
        no shard goes on behind what a record leaves out."""
        if taken := self._taken.started(step):
            for work in (StepWork(step, microbatch, True) for microbatch in taken):
                self._journeys.withdraw(work)
                self._unleased.discard(work)
                self._untold.discard(work)
            self._taken.forget(step)
            self._source.seek((taken[0].epoch, taken[0].position))

    def _issue(self, step: int, *, early: bool) -> IssuedMicrobatch:
        """Take the next microbatch of our shard for a step. One that was left is on its way or at its end already, as
        it began."""
        batch = self._source.take()
        begun = StepWork(step, batch.id, not early)
        work = begun if begun in self._journeys else StepWork(step, batch.id, early)
        self._taken.add(step, batch.id)
        return IssuedMicrobatch(step, batch, self._window.after_of(work), work.early)

    def _has_way(self) -> bool:
        """Whether every stage has a replica that is there, as far as we see. What is leased without would be kept from
        those who may see more."""
        return all(self._context.replicas.present(stage) for stage in range(self._context.stages))

    def _start(self, kept: IssuedMicrobatch, leader: StepLeader) -> None:
        """Send a microbatch on its way, and report what comes of it. One that was left is on its way or at its end
        already."""
        work, journeys = kept.work, self._journeys
        if work in journeys.outcomes:
            journeys.again(work, lambda work: self._report(work, leader))
        elif work not in journeys:
            self._ends.keep(kept)
            self._in_flight.begins(self._context.target, len(self._taken.started(work.step)))
            journeys.begin(kept, lambda work: self._report(work, leader))

    def _came_home(self, kept: IssuedMicrobatch, finished: FinishedJourney, returned_s: float) -> None:
        self._ends.came_home(kept)
        self._in_flight.observe(returned_s - finished.queued_s, finished.compute_s)

    async def _report(self, work: StepWork, leader: StepLeader) -> None:
        """Tell the leader what came of a microbatch, if it counts; of one that is not leased yet, when it is."""
        if not self._taken.counts(work.step, work.microbatch):
            return
        if work in self._unleased:
            self._untold.add(work)
            return
        outcome = self._journeys.outcomes[work]
        try:
            if isinstance(outcome, Poisoned):
                await self._set_aside(work.step, work.microbatch, str(outcome)[:400], leader)
            else:
                await self._complete(outcome, leader)
        except PeerError as error:  # the step was closed, or the leader does not count it: it is not committed
            logger.warning("step %d, microbatch %s does not count: %s", work.step, work.microbatch, error)

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
        self._journeys.find(body)
        what: What = "output" if isinstance(body, Output) else "gradient"
        self._ends.check_size(what, self._window.work_of(body).ready_in, payload_bytes, caller)

    async def _on_output(self, caller: PeerId, body: Output, incoming: Incoming) -> Answer[Empty]:
        self._journeys.find(body).deliver_output(caller, body.attempt, incoming.payload)
        return TAKEN

    async def _on_gradient(self, caller: PeerId, body: InputGradient, incoming: Incoming) -> Answer[Empty]:
        self._journeys.deliver(body, lambda journey: journey.deliver_gradient(caller, body.attempt, incoming.payload))
        return TAKEN

    async def _on_report(self, caller: PeerId, body: HopReport) -> Empty:
        self._journeys.deliver(body, lambda journey: journey.deliver_report(caller, body))
        return DONE

    async def _on_blocked(self, caller: PeerId, body: Blocked) -> Empty:
        self._journeys.find(body).deliver_blocked(caller, body)
        return DONE
