"""Compute what a replica has admitted: one piece at a time, on the device thread, in the order of its queue."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Generic, Literal, TypeVar

from swarm.errors import BugError, PeerError
from swarm.events import Accumulated, EventSink
from swarm.ids import stage_part
from swarm.models.dropout import dropout_seed
from swarm.pipeline.compute import Contributed, Material
from swarm.pipeline.messages import Direction
from swarm.pipeline.stage.context import StageContext, StageSettings
from swarm.pipeline.stage.handover import Handover
from swarm.pipeline.stage.microbatch_state import Passage, Passages

logger = logging.getLogger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Worker:
    """One replica's queue and what is done with each piece. Handing results on happens beside it (``spawn``), so that
    the next piece starts at once."""

    def __init__(
        self, settings: StageSettings, context: StageContext, passages: Passages, handover: Handover, spawn: Spawn
    ) -> None:
        self._settings, self._context, self._passages = settings, context, passages
        self._handover, self._spawn = handover, spawn
        self._queue: WorkQueue[Passage] = WorkQueue(settings.max_queue)
        self._wake = asyncio.Event()
        self._step = 0

    def full(self, step: int) -> bool:
        """Whether no more forwards of that step are taken."""
        return self._queue.full(step)

    def open_step(self, step: int) -> None:
        """Work on this step, and forget older work."""
        self._step = step
        self._queue.drop_before(step)
        self._wake.set()

    def rewound(self) -> None:
        """What waits belongs to steps that do not count."""
        self._queue.clear()

    async def run(self) -> None:
        """Work until cancelled. Raises BugError, which ends the replica."""
        while True:
            passage = self._queue.pop(self._step)
            if passage is None:
                self._wake.clear()
                await self._wake.wait()
            elif self._passages.current(passage) and not passage.accumulated:
                await self._work(passage)

    # --- what there is to do -------------------------------------------------------------------------------------

    def want_forward(self, passage: Passage) -> None:
        """Queue the forward, when all that it takes is here."""
        if passage.input is None or (self._settings.computes_loss and passage.targets is None):
            return
        passage.arrived = self._context.clock.monotonic()
        self._queue.push("forward", passage.key.step, passage)
        self._wake.set()

    def want_back(self, passage: Passage) -> None:
        """Queue the contribution, once."""
        if passage.queued_back or passage.accumulated:
            return
        if passage.graph is not None:
            self._passages.stay.observe(self._context.clock.monotonic() - passage.arrived)
        passage.queued_back, passage.begun = True, True
        passage.arrived = self._context.clock.monotonic()
        self._queue.push("backward", passage.key.step, passage)
        self._wake.set()

    async def _work(self, passage: Passage) -> None:
        started = self._context.clock.monotonic()
        queued = started - passage.arrived
        back = passage.queued_back or self._settings.computes_loss
        direction: Direction = "backward" if passage.queued_back else "forward"
        try:
            if back:
                await self._contribute(passage, queued)
            elif passage.graph is None:
                await self._forward(passage, queued)
        except BugError:
            raise
        except PeerError as error:
            logger.warning("step %d, microbatch %s: %s", passage.key.step, passage.key.microbatch, error)
            self.give_up(passage, direction, error)
        except Exception as error:  # one poisonous microbatch is its trainer's trouble, not the end of the replica
            logger.exception("step %d, microbatch %s", passage.key.step, passage.key.microbatch)
            self.give_up(passage, direction, PeerError(f"{type(error).__name__}: {error}"))

    def give_up(self, passage: Passage, direction: Direction, error: PeerError) -> None:
        """Nothing was accumulated: forget the microbatch and say so. A new attempt may come."""
        if not self._passages.current(passage):
            return
        key, route = passage.key, passage.route
        self._passages.drop(passage)
        self._spawn(self._handover.report_blocked(key, route, self._settings.stage, direction, error))

    async def _forward(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        payload, seed = passage.input, self._seed(passage)
        if payload is None:
            raise BugError("a forward was queued without its input")
        output, graph = await self._context.device.run(
            lambda: self._context.compute.forward(payload, seed, first=self._settings.first)
        )
        if not self._passages.current(passage):
            return
        passage.graph = graph
        if passage.gradient is not None:  # it came while we computed: the next stage had its input from elsewhere
            self.want_back(passage)
            return
        passage.output = output
        elapsed = self._context.clock.monotonic() - started
        self._spawn(self._handover.report_forward(passage, (queued, elapsed)))
        self._spawn(self._handover.pass_forward(passage, output))

    async def _contribute(self, passage: Passage, queued: float) -> None:
        started = self._context.clock.monotonic()
        if passage.input is None:
            raise BugError("a contribution was queued without its input")
        graph, sender = passage.graph, passage.gradient_sender
        passage.graph = passage.output = None
        material = Material(
            step=passage.key.step,
            microbatch=passage.key.microbatch,
            seed=self._seed(passage),
            first=self._settings.first,
            input=passage.input,
            gradient=passage.gradient,
            targets=passage.targets,
        )

        def compute() -> Contributed:
            result = self._context.compute.contribute(material, graph, sender)
            passage.accumulated = True  # here, so that it is true whoever was cancelled meanwhile
            return result

        passage.in_use += 1
        try:
            result = await self._context.device.run(compute)
        finally:
            passage.in_use -= 1
        if not self._passages.current(passage):  # its lineage was given up meanwhile: nothing of it counts
            return
        passage.loss_sum, passage.tokens = result.loss_sum, result.tokens
        tell_accumulated(self._context.events, self._settings.stage, passage)
        elapsed = self._context.clock.monotonic() - started
        self._spawn(self._handover.report_backward(passage, (queued, elapsed)))
        self._spawn(self._handover.pass_backward(passage, result.gradient))
        self._passages.retention.hold(passage)

    def _seed(self, passage: Passage) -> int:
        return dropout_seed(self._settings.seed, passage.key.microbatch)


def tell_accumulated(events: EventSink, stage: int, passage: Passage) -> None:
    """Write that a microbatch was added."""
    events.emit(Accumulated(step=passage.key.step, microbatch=passage.key.microbatch, part=stage_part(stage)))


# --- work queue ------------------------------------------------------------------------------------------------------
# Backward before forward, oldest first, and only for the open step.


T = TypeVar("T")
Kind = Literal["backward", "forward"]


class WorkQueue(Generic[T]):
    """A pure priority queue, bounded for each step.

    Backward work frees a graph and brings a microbatch home, so it goes first and is never refused: it was paid for
    when its forward was admitted. Forward work of the next step may wait here while the open one is being closed.
    """

    def __init__(self, max_forward: int) -> None:
        self._max_forward = max_forward
        self._ticket = count()
        self._heaps: dict[Kind, list[tuple[int, int, T]]] = {"backward": [], "forward": []}

    def full(self, step: int) -> bool:
        """Whether another forward of that step would be refused: what comes ahead of its step takes no place from the
        open one's. O(n)."""
        return sum(of_step == step for of_step, _, _ in self._heaps["forward"]) >= self._max_forward

    def __len__(self) -> int:
        return sum(len(heap) for heap in self._heaps.values())

    def push(self, kind: Kind, step: int, item: T) -> None:
        """Add work that was admitted. O(log n)."""
        heapq.heappush(self._heaps[kind], (step, next(self._ticket), item))

    def pop(self, open_step: int) -> T | None:
        """The next item of the open step, or None. Older leftovers were dropped by :meth:`drop_before`."""
        for kind in ("backward", "forward"):
            heap = self._heaps[kind]
            if heap and heap[0][0] <= open_step:
                return heapq.heappop(heap)[2]
        return None

    def clear(self) -> None:
        """Forget everything."""
        for heap in self._heaps.values():
            heap.clear()

    def drop_before(self, step: int) -> None:
        """Forget what belongs to steps before ``step``."""
        for kind, heap in self._heaps.items():
            kept = [entry for entry in heap if entry[0] >= step]
            heapq.heapify(kept)
            self._heaps[kind] = kept
