"""The journeys of one trainer that are under way, and what came of those that are over.

They go on beside whoever feeds the steps, and early ones from one step into the next: who feeds waits for
:meth:`JourneyTable.failed` meanwhile, and ends them with :meth:`JourneyTable.end`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

from swarm.errors import PeerError, Refused, StateError
from swarm.ids import PeerId, StepWork
from swarm.pipeline.messages import JourneyMessage
from swarm.pipeline.trainer.context import JourneyContext, JourneyHooks
from swarm.pipeline.trainer.journey import FinishedJourney, Journey, OwnFailure, Poisoned
from swarm.pipeline.trainer.liveness import LivenessProbes
from swarm.pipeline.trainer.taken import IssuedMicrobatch

logger = logging.getLogger(__name__)
OWN_FAILURES = 3
"""So many microbatches one after the other fail here before it is not put down to them: to set one after the other
aside would take the shard's whole epoch out of the training."""

Outcome = FinishedJourney | Poisoned
Then = Callable[[StepWork], Coroutine[Any, Any, None]]
"""What is done when a journey is over."""


class JourneyTable:
    """``home`` is told of each microbatch that came home, and after how many seconds its gradient had; ``lost`` of a
    replica whose connection broke.

    Memory: an outcome for each microbatch of the open step that is over.
    """

    def __init__(
        self,
        context: JourneyContext,
        home: Callable[[IssuedMicrobatch, FinishedJourney, float], None],
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self._context, self._home = context, home
        self.travelling: dict[StepWork, Journey] = {}
        self.outcomes: dict[StepWork, Outcome] = {}
        self.changed = asyncio.Event()
        self._tasks: dict[StepWork, asyncio.Task[None]] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._ending = False
        self._own_failures = 0
        probes = LivenessProbes(context.endpoint, context.clock, self._begin, lost)
        self._probes, self._hooks = probes, JourneyHooks(probes.need, self._begin, self._warn)

    def __contains__(self, work: object) -> bool:
        """Whether it is under way, or its outcome is known."""
        return work in self._tasks or work in self.outcomes

    def __iter__(self) -> Iterator[Journey]:
        return iter(list(self.travelling.values()))

    @property
    def under_way(self) -> int:
        """Return the number of journeys; not of those that wait for receipts alone, or are only being reported, to one
        who may have stalled."""
        returned = {work for work, journey in self.travelling.items() if journey.returned_s is not None}
        return sum(work not in self.outcomes and work not in returned for work in self._tasks)

    # --- tasks -----------------------------------------------------------------------------------------------------

    def begin(self, kept: IssuedMicrobatch, then: Then) -> None:
        """Send a microbatch on its way."""
        self._follow(kept.work, self._journey(kept, then))

    def again(self, work: StepWork, then: Then) -> None:
        """Do what is done when a journey is over, once more, of one that is."""
        self._follow(work, then(work))

    def _follow(self, work: StepWork, doing: Coroutine[Any, Any, None]) -> None:
        if (task := self._begin(doing)) is None:
            return
        self._tasks[work] = task

        def ended(done: asyncio.Task[None]) -> None:
            self.changed.set()
            if self._tasks.get(work) is done:
                del self._tasks[work]

        task.add_done_callback(ended)

    def _begin(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Do something beside, until it is over or :meth:`end` ends it; nothing any more while all ends."""
        if self._ending:
            doing.close()
            return None
        task = asyncio.create_task(doing)
        self._beside.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)

    async def failed(self) -> NoReturn:
        """Raise what a journey raised that is none of its own outcomes. Wait until one does."""
        raise await self._failures.get()

    def withdraw(self, work: StepWork) -> None:
        """Nobody wants it any more, nor what came of it."""
        self.outcomes.pop(work, None)
        self.stop(work)

    def stop(self, work: StepWork) -> None:
        """What is done for it now ends; its outcome stays."""
        if (task := self._tasks.get(work)) is not None:
            task.cancel()

    def drop_before(self, step: int) -> None:
        """Forget closed steps: journeys in them end."""
        for work in [work for work in self._tasks if work.step < step]:
            self._tasks[work].cancel()
        self.outcomes = {work: outcome for work, outcome in self.outcomes.items() if work.step >= step}

    def clear(self) -> None:
        """Everything ends, and nothing of it counts."""
        for task in self._tasks.values():
            task.cancel()
        self.outcomes = {}

    async def end(self, but: int | None = None) -> None:
        """End all journeys, and what goes on beside them; those of the step ``but`` go on. Returns when they have
        ended."""
        kept = {task for work, task in self._tasks.items() if work.step == but}
        ending = {task for task in self._tasks.values() if task not in kept} if kept else set(self._beside)
        self._ending = not kept
        for task in ending:
            task.cancel()
        try:
            await asyncio.gather(*ending, return_exceptions=True)
        finally:
            self._ending = False
        if not kept:
            self._probes.close()

    # --- one journey -----------------------------------------------------------------------------------------------

    async def _journey(self, kept: IssuedMicrobatch, then: Then) -> None:
        work = kept.work
        try:
            outcome = await self._travel(kept)
        except PeerError as error:  # the step was closed
            logger.warning("step %d, microbatch %s does not count: %s", work.step, work.microbatch, error)
            return
        self.outcomes[work] = outcome
        self.changed.set()
        await then(work)

    async def _travel(self, kept: IssuedMicrobatch) -> Outcome:
        """Raises WrongStep when the step was closed meanwhile."""
        journey = self.travelling[kept.work] = Journey(self._context, kept, self._hooks)
        try:
            finished = await journey.travel()
        except Poisoned as poison:
            self._check_own_part(poison)
            return poison
        finally:
            if self.travelling.get(kept.work) is journey:
                del self.travelling[kept.work]
        self._own_failures = 0
        self._home(kept, finished, journey.returned_s or finished.seconds)
        return finished

    def _check_own_part(self, poison: Poisoned) -> None:
        self._own_failures += isinstance(poison, OwnFailure)
        if self._own_failures >= OWN_FAILURES:
            raise StateError(
                f"{self._own_failures} microbatches one after the other cannot be computed here; the last: {poison}. "
                "Check this machine's device and memory; then join again: the shard goes on where it was."
            ) from poison

    # --- what concerns them ----------------------------------------------------------------------------------------

    def _warn(self) -> None:
        for journey in self:
            journey.look_again()

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone: every journey through it is repaired now, without waiting for its deadlines."""
        for journey in self:
            journey.lost(peer, reason)

    def deliver(self, body: JourneyMessage, hand_over: Callable[[Journey], None]) -> None:
        """Hand a message to the journey that it is about; one that has returned with it makes room for another. Raises
        Refused."""
        journey = self.find(body)
        before = journey.returned_s
        hand_over(journey)
        if journey.returned_s != before:
            self.changed.set()

    def find(self, body: JourneyMessage) -> Journey:
        """Return the journey that a message is about. Raises Refused."""
        for early in (False, True):
            journey = self.travelling.get(StepWork(body.step, body.microbatch, early))
            if journey is not None and journey.key.after == body.after:
                return journey
        raise Refused("no such microbatch is under way here")
