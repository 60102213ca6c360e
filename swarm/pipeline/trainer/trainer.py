"""A trainer feeds the steps: leases quota, keeps journeys in flight, reports each one that came home.

Read :meth:`Trainer.feed` first. Where the run overlaps, a trainer that has nothing left to do in the open step feeds
the next one early, up to a share of it: with the parameters that it has, while the step is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol

from swarm.clock import Clock
from swarm.errors import DeadlineMissed, PeerError, Refused, StateError, Unreachable, WrongStep
from swarm.events import JourneyCompleted, JourneySetAside
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming, Payload
from swarm.pipeline.activity import PipelineActivity
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.messages import (
    ATTEND,
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
    ProbeRequest,
    What,
)
from swarm.pipeline.retention import RETENTION_BYTES, HeldOfMicrobatches
from swarm.pipeline.seals import Across, Sealed
from swarm.pipeline.settle import Assigned, settle
from swarm.pipeline.trainer.audits import HopClaim
from swarm.pipeline.trainer.ends import TrainerEnds
from swarm.pipeline.trainer.flight import InFlight
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.pipeline.trainer.journey import (
    FinishedJourney,
    IssuedMicrobatch,
    Journey,
    JourneyContext,
    JourneyHooks,
    OwnFailure,
    Poisoned,
)
from swarm.pipeline.window import StepWindow
from swarm.schema import Empty
from swarm.security.statements import AuditStatement
from swarm.waiting import first_done

logger = logging.getLogger(__name__)
DONE = Empty()
TAKEN = Answer(DONE)
LOOK_S = 0.5
"""How often is looked whether a stage has a replica again that is there, before more is leased."""
QUESTION_S = 20.0
ANSWER_S = 30.0
"""A question is answered after QUESTION_S; who has not answered after ANSWER_S may be stalled, which is for the hops'
deadlines to find out."""
OWN_FAILURES = 3
"""So many microbatches one after the other fail here before it is not put down to them: to set one after the other
aside would take the shard's whole epoch out of the training."""


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

    async def accuse(self, claim: HopClaim, found: Sequence[AuditStatement]) -> None:
        """Tell what others found that computed a hop again; returns when the leader knows. Raises a PeerError where it
        takes that for no proof, and for a closed step."""

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
        self._issued, self._window = IssuedTable(retention_bytes), StepWindow(ahead=context.early.share > 0.0)
        self._ends = TrainerEnds(context, source, self._window, self._issued)
        self._tasks = TrainerTasks(context, self.lost)
        self._hooks = JourneyHooks(self._tasks.probes.need, self._tasks.begin, self._warn, self._late)
        self._quota, self._own_failures = (0, 0), 0

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
        """Return what is held of microbatches now; with private ends each journey has the graph of its embedding."""
        graphs = 0 if self._context.ends is None else len(self._under_way())
        return HeldOfMicrobatches(graphs, self._issued.retained_bytes)

    def activity(self) -> PipelineActivity:
        """Return what is done now: of a trainer, the journeys under way and whom it leaves out."""
        probation = self._context.replicas.wiring.on_probation(now=self._context.clock.monotonic())
        doing = PipelineActivity(under_way=len(self._under_way()), probation=probation)
        if (audits := self._context.audits) is None:
            return doing
        return replace(doing, audits=audits.counted, checked=audits.checked)

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
        for row in self._issued.drop_before(step):
            row.stop()
        self._context.replicas.follow(stages, since)
        self._in_flight.follow(trainers)
        self._reroute(stages)
        begin = self._issued.first_left(step, ()) or self._source.cursor
        try:
            if cursor is not None and cursor != begin:  # something of the step before comes first
                for row in self._issued.keep(step, 0):
                    row.leased = True  # nobody waits for a lease of what is left
                self._source.seek(cursor)
        finally:
            self._ends.begin = self._issued.first_left(step, ()) or self._source.cursor

    def _reroute(self, stages: Sequence[Sequence[PeerId]]) -> None:
        """What was fed early goes on without those that take part no more."""
        there = {peer for replicas in stages for peer in replicas}
        for peer in {peer for journey in self._under_way() for peer in journey.route if peer not in there}:
            self._lost(peer, "it takes part no more")

    def rewound(self) -> None:
        """A lineage was given up: forget what was taken and what came of it, for its steps come again, and the record
        says where our shard goes on."""
        for row in self._issued.clear():
            row.withdraw()

    def started(self, step: int) -> tuple[MicrobatchId, ...]:
        """The microbatches taken in the step, in that order, those set aside as well, but for those not kept."""
        return self._issued.started(step)

    def keep(self, step: int, count: int) -> None:
        """Only the first ``count`` microbatches started are leased, and count or are set aside. Of the others nothing
        is reported any more, and our shard goes back to the first of them: the one who takes from it takes them again.
        Their journeys go on, each makes but one in a step: taken again in this one, what came of it is reported. What
        the ends added of them is else for :meth:`settle` to reverse."""
        left = self._issued.keep(step, count)
        for row in self._issued.of(step):
            row.leased = True
        for row in left:
            if row.outcome is not None:
                row.stop()
        if left:
            self._forgo_early(step + 1)  # it lies behind them
            self._seek(left[0])

    def drop_early(self, step: int) -> bool:
        """Return what was fed early of a step counts no more: nobody is left who could add it. Its microbatches, and
        those that were taken after them, are taken again. Whether there was something."""
        started = [row for row in self._issued.of(step) if row.standing != "left"]
        early = [row for row in started if row.work.early and row.begun]
        if early:
            self.keep(step, started.index(early[0]))
        for row in early:
            row.withdraw()
        self._quota = 0, self._quota[1]
        return bool(early)

    def _seek(self, first: IssuedMicrobatch) -> None:
        """Have our shard go on at a microbatch that was taken."""
        self._source.seek((first.work.microbatch.epoch, first.work.microbatch.position))

    def cursor_after(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int]:
        """(epoch, position) from which our shard continues when the step closes with these microbatches: the first one
        that was taken and is neither committed nor set aside, else the first that was taken for the next step, else the
        next one."""
        issued = self._issued
        return issued.first_left(step, committed) or issued.first_left(step + 1, ()) or self._source.cursor

    async def settle(self, step: int, assigned: Assigned) -> None:
        """Have exactly the ``assigned`` microbatches, all of them ours, in the private ends' sum of an open step. See
        :func:`~swarm.pipeline.settle.settle`. Raises WrongStep when ``step`` is not open here."""
        ends = self._context.ends
        if ends is not None and not ends.part.is_open(step):
            raise WrongStep(f"step {step} is not open here")
        await settle(self._ends, step, assigned)

    def avoid(self, replica: PeerId) -> None:
        """Give a replica, which was proven wrong, nothing more in the open step where another is there."""
        self._context.replicas.wrong.add(replica)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone: every journey through it is repaired now, without waiting for its deadlines."""
        self._context.suspect(peer, reason)
        self._context.replicas.silence.lost(peer)
        self._lost(peer, reason)

    def _lost(self, peer: PeerId, reason: str) -> None:
        for journey in self._under_way():
            journey.lost(peer, reason)

    def _warn(self) -> None:
        for journey in self._under_way():
            journey.look_again()

    def _late(self, peer: PeerId, since: float) -> None:
        self._in_flight.late(peer, since, self._context.clock.monotonic())

    def _under_way(self) -> list[Journey]:
        return [row.journey for row in self._issued if row.journey is not None]

    # --- feeding -------------------------------------------------------------------------------------------------

    async def feed(self, step: int, leader: StepLeader) -> None:
        """Work on ``step`` for as long as the leader has quota, or may have some again: until cancelled, or until
        another step is opened. Journeys under way are then cancelled, but for those that were fed early of the step
        that was opened.

        No single journey ends it, whatever becomes of it; a bug does, what ``leader`` raises and is no PeerError, and
        StateError when our own part fails at one microbatch after the other, or our shard is not what it was.
        """
        try:
            await first_done(self._feed(step, leader), self._tasks.failed())
        finally:
            await self._tasks.end(but=self._window.step if self._window.step > step else None)

    async def close(self) -> None:
        """End what goes on between two steps. Idempotent."""
        await self._tasks.end()

    async def _feed(self, step: int, leader: StepLeader) -> None:
        changed = self._tasks.changed
        while step >= self._window.step:
            changed.clear()
            room = self._room()
            if room <= 0:
                await first_done(changed.wait(), leader.wait_quota(step))
                if changed.is_set():
                    continue
            way = self._context.replicas.has_way()
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

    def _room(self) -> int:
        """Return how many more may be under way."""
        return self._in_flight.limit() - sum(row.awaited for row in self._issued)

    def _owed(self, step: int) -> int:
        """Return how many that were fed early are not leased yet."""
        return sum(not row.leased for row in self._issued.of(step))

    def _begin_leased(self, step: int, granted: int | None, leader: StepLeader) -> None:
        """Begin as many more as are ``granted``, where that was asked, but for what was begun early before it was
        leased; report of that."""
        started, asked, granted = self._issued.started(step), granted is not None, granted or 0
        if asked and (owed := self._owed(step)):
            self.keep(step, len(started) - max(0, owed - granted))
            granted = max(0, granted - owed)
        for row in [row for row in self._issued.of(step) if row.untold and row.leased]:
            row.untold = False
            if row.outcome is not None:
                self._go_on(row, self._report(row, leader))
        if granted > 0:
            self._forgo_early(step + 1)
        for _ in range(granted):
            early = self._early.exact and len(self._issued.started(step)) < self._quota[0]
            self._issue(step, leader, early=early)

    async def _feed_ahead(self, step: int, leader: StepLeader) -> None:
        """Feed the next step early while there is nothing to do in this one; return when there may be again."""
        again = asyncio.ensure_future(leader.wait_quota(step))
        changed = self._tasks.changed
        try:
            while not again.done() and step >= self._window.step:
                changed.clear()
                left = self._quota[1] - len(self._issued.started(step + 1))
                for _ in range(min(self._room(), left) if self._context.replicas.has_way() else 0):
                    self._issue(step + 1, leader, early=True, leased=False)
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
        if self._issued.started(step):
            rows = self._issued.forgo(step)
            for row in rows:
                row.withdraw()
            self._seek(rows[0])

    def _issue(self, step: int, leader: StepLeader, *, early: bool, leased: bool = True) -> None:
        """Take the next microbatch of our shard for a step, send it on its way and report what comes of it. One that
        was left is on its way or at its end already, as it began."""
        batch = self._source.take()
        row = self._issued.begun(step, batch.id, early=early)
        if row is None:
            work = StepWork(step, batch.id, early)
            row = IssuedMicrobatch(work, batch, self._window.after_of(work))
            self._issued.add(row)
        row.standing, row.leased = "counts", leased
        if row.outcome is not None:
            self._go_on(row, self._report(row, leader))
        elif not row.begun:
            self._in_flight.begins(self._context.target, len(self._issued.started(step)))
            self._go_on(row, self._carry(row, leader))

    def _go_on(self, row: IssuedMicrobatch, doing: Coroutine[Any, Any, None]) -> None:
        """Do something for a microbatch beside."""
        if (task := self._tasks.begin(doing, row.work)) is None:
            return
        row.task = task

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.changed.set()
            if row.task is done:
                row.task = None

        task.add_done_callback(ended)

    async def _carry(self, row: IssuedMicrobatch, leader: StepLeader) -> None:
        """Carry a microbatch all the way, and report what came of it."""
        hooks = replace(self._hooks, accuse=partial(self._accuse, leader))
        journey = row.journey = Journey(self._context, row, hooks)
        try:
            finished = await journey.travel()
        except Poisoned as poison:
            self._check_own_part(poison)
            row.outcome = poison
        except PeerError as error:  # the step was closed
            logger.warning("step %d, microbatch %s does not count: %s", row.work.step, row.work.microbatch, error)
            return
        else:
            row.outcome, self._own_failures = finished, 0
            self._came_home(row, finished, journey.returned_s or finished.seconds)
        finally:
            row.journey = None
        self._tasks.changed.set()
        await self._report(row, leader)

    async def _accuse(self, leader: StepLeader, claim: HopClaim, found: Sequence[AuditStatement]) -> None:
        """Return when the leader knows, or takes it for no proof, or the step is closed. What it does not take is
        named in the log, and so is what it had not answered when this was cancelled."""
        try:
            await leader.accuse(claim, found)
        except PeerError as error:
            logger.warning("step %d, what %s did is not looked at: %s", claim.key.step, claim.accused, error)
        except asyncio.CancelledError:
            logger.warning("step %d, its leader has not said that it knows what %s did", claim.key.step, claim.accused)
            raise

    def _check_own_part(self, poison: Poisoned) -> None:
        self._own_failures += isinstance(poison, OwnFailure)
        if self._own_failures >= OWN_FAILURES:
            raise StateError(
                f"{self._own_failures} microbatches in a row failed on this machine; the last: {poison}. "
                "Check its device and memory, then join again: the shard goes on where it was."
            ) from poison

    def _came_home(self, row: IssuedMicrobatch, finished: FinishedJourney, returned_s: float) -> None:
        """From now on what is retained of it may be dropped for want of space."""
        row.loss_gradient, row.complete = None, True
        self._issued.hold(row)
        self._in_flight.observe(returned_s - finished.queued_s, finished.compute_s)

    async def _report(self, row: IssuedMicrobatch, leader: StepLeader) -> None:
        """Tell the leader what came of a microbatch, if it counts; of one that is not leased yet, when it is."""
        (step, microbatch, *_), outcome = row.work, row.outcome
        if row.standing != "counts":
            return
        if not row.leased:
            row.untold = True
            return
        assert outcome is not None  # noqa: S101 - it is over
        try:
            if isinstance(outcome, Poisoned):
                await self._set_aside(row, str(outcome)[:400], leader)
            else:
                await self._complete(outcome, leader)
        except PeerError as error:  # the step was closed, or the leader does not count it: it is not committed
            logger.warning("step %d, microbatch %s does not count: %s", step, microbatch, error)

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

    async def _set_aside(self, row: IssuedMicrobatch, reason: str, leader: StepLeader) -> None:
        """It is nobody's fault but its own: go on with the next."""
        step, microbatch, *_ = row.work
        logger.warning("step %d, microbatch %s is set aside: %s", step, microbatch, reason)
        row.standing = "set aside"
        self._context.events.emit(JourneySetAside(step=step, microbatch=microbatch, reason=reason))
        await leader.set_aside(step, microbatch, reason)

    # --- mail for journeys ---------------------------------------------------------------------------------------

    def _admit_tensor(self, caller: PeerId, body: JourneyMessage, payload_bytes: int) -> None:
        self._find(body)
        what: What = "output" if isinstance(body, Output) else "gradient"
        self._ends.check_size(what, self._window.work_of(body).ready_in, payload_bytes, caller)

    async def _on_output(self, caller: PeerId, body: Output, incoming: Incoming) -> Answer[Empty]:
        sealed = await self._opened(caller, body, incoming.payload)
        self._find(body).deliver_output(caller, body.attempt, incoming.payload, sealed)
        return TAKEN

    async def _on_gradient(self, caller: PeerId, body: InputGradient, incoming: Incoming) -> Answer[Empty]:
        sealed = await self._opened(caller, body, incoming.payload)
        self._deliver(body, lambda journey: journey.deliver_gradient(caller, body.attempt, incoming.payload, sealed))
        return TAKEN

    async def _opened(self, caller: PeerId, body: Output | InputGradient, payload: Payload) -> Sealed:
        """Return the hash of what came home. Raises Violation."""
        back = isinstance(body, InputGradient)
        across = Across(body.key, -1 if back else self._context.stages, "backward" if back else "forward")
        return await self._context.seals.opened(caller, across, payload, body.seal)

    async def _on_report(self, caller: PeerId, body: HopReport) -> Empty:
        self._deliver(body, lambda journey: journey.deliver_report(caller, body))
        return DONE

    async def _on_blocked(self, caller: PeerId, body: Blocked) -> Empty:
        self._find(body).deliver_blocked(caller, body)
        return DONE

    def _deliver(self, body: JourneyMessage, hand_over: Callable[[Journey], None]) -> None:
        """Hand a message to the journey that it is about; one that has returned with it makes room for another. Raises
        Refused."""
        journey = self._find(body)
        before = journey.returned_s
        hand_over(journey)
        if journey.returned_s != before:
            self._tasks.changed.set()

    def _find(self, body: JourneyMessage) -> Journey:
        """Return the journey that a message is about. Raises Refused."""
        for early in (False, True):
            row = self._issued.find(StepWork(body.step, body.microbatch, early))
            if row is not None and row.journey is not None and row.journey.key.after == body.after:
                return row.journey
        raise Refused("no such microbatch is under way here")


# --- what goes on in the background -----------------------------------------------------------------------------------


class TrainerTasks:
    """What goes on while another feeds the steps, early journeys from one step into the next: who feeds waits for
    :meth:`failed` meanwhile, and ends them with :meth:`end`. ``changed`` is set when something for a microbatch is
    over; ``lost`` is told of a replica whose connection broke."""

    def __init__(self, context: JourneyContext, lost: Callable[[PeerId, str], None]) -> None:
        self.changed = asyncio.Event()
        self.probes = LivenessProbes(context.endpoint, context.clock, self.begin, lost)
        self._tasks: dict[asyncio.Task[None], StepWork | None] = {}
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._ending = False

    def begin(self, doing: Coroutine[Any, Any, None], work: StepWork | None = None) -> asyncio.Task[None] | None:
        """Do something, for this ``work``, until it is over or :meth:`end` ends it; nothing any more while all ends."""
        if self._ending:
            doing.close()
            return None
        task = asyncio.create_task(doing)
        self._tasks[task] = work
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)

    async def failed(self) -> NoReturn:
        """Raise what one of them raised. Wait until one does."""
        raise await self._failures.get()

    async def end(self, but: int | None = None) -> None:
        """End all of it; where something is done for work of the step ``but``, what is done for other work alone.
        Returns when that has ended."""
        kept = any(work is not None and work.step == but for work in self._tasks.values())
        ending = [task for task, work in self._tasks.items() if not kept or (work is not None and work.step != but)]
        self._ending = not kept
        for task in ending:
            task.cancel()
        try:
            await asyncio.gather(*ending, return_exceptions=True)
        finally:
            self._ending = False
        if not kept:
            self.probes.close()


class LivenessProbes:
    """Notices at once that a replica died, by an open question to it, whose connection breaks with it. One each until
    :meth:`close`, as tasks that ``begin`` begins. ``lost`` is told who broke off, once, and may call :meth:`need` again
    later. Costs one call in 20 s per replica in use."""

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None] | None],
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self._endpoint, self._clock, self._begin, self._lost = endpoint, clock, begin, lost
        self._asked: dict[PeerId, asyncio.Task[None]] = {}

    def need(self, peers: Iterable[PeerId]) -> None:
        """Attend to these as well; to nobody any more where nothing is begun."""
        for peer in peers:
            if peer not in self._asked and (task := self._begin(self._attend(peer))) is not None:
                self._asked[peer] = task

    def close(self) -> None:
        """Withdraw all questions, until one is needed again."""
        for task in self._asked.values():
            task.cancel()
        self._asked = {}

    async def _attend(self, peer: PeerId) -> None:
        body = ProbeRequest(seconds=QUESTION_S)
        while True:
            try:
                await self._endpoint.call(peer, ATTEND, body, timeout_s=ANSWER_S)
            except DeadlineMissed:
                continue
            except Unreachable as error:
                self._asked.pop(peer, None)
                self._lost(peer, error.reason)
                return
            except PeerError:  # it does not answer such questions, or not now
                await self._clock.sleep(QUESTION_S)
