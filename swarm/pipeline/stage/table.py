"""The microbatches of one stage replica: the queue of their work, and the table of all. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from swarm.errors import Refused
from swarm.ids import JourneyKey, PeerId, StepWork
from swarm.pipeline.messages import JourneyMessage, RoutedMessage
from swarm.pipeline.retention import Retention
from swarm.pipeline.stage.microbatch_state import MicrobatchState, Work
from swarm.pipeline.window import StepWindow
from swarm.waiting import AdaptiveDeadline

T = TypeVar("T")
STAY_FLOOR_S, STAY_CEILING_S = 30.0, 300.0
"""Bounds on how long a microbatch may wait here before it makes room for others; until any was measured the second."""


class WorkQueue(Generic[T]):
    """A priority queue, bounded for each step: backward before forward before weights, oldest first, and only what can
    be computed.

    Backward work frees a graph and brings a microbatch home, so it goes first and is never refused. Nobody waits for
    the weights' gradients before the step closes: they fill the time in which there is nothing else to do. Forward work
    of the next step may wait here while the open one is being closed."""

    def __init__(self, max_forward: int) -> None:
        self._max_forward = max_forward
        self._ticket = count()
        self._heaps: dict[Work, list[tuple[int, int, int, T]]] = {"backward": [], "forward": [], "weights": []}

    def full(self, step: int) -> bool:
        """Return whether another forward of that step would be refused. What comes ahead takes no place from it.
        O(n)."""
        return sum(of_step == step for _, of_step, _, _ in self._heaps["forward"]) >= self._max_forward

    def push(self, kind: Work, work: StepWork, item: T) -> None:
        """Add work that was admitted. O(log n)."""
        heapq.heappush(self._heaps[kind], (work.ready_in, work.step, next(self._ticket), item))

    def pop(self, open_step: int) -> T | None:
        """The next item whose parameters are there when that step is open, or None: first of the open step, which
        others wait for, then early work of the next. Older leftovers were dropped by :meth:`drop_before`."""
        ready = [heap for heap in self._heaps.values() if heap and heap[0][0] <= open_step]
        first = min(ready, key=lambda heap: heap[0][1], default=None)
        return None if first is None else heapq.heappop(first)[3]

    def clear(self) -> None:
        """Forget everything."""
        for heap in self._heaps.values():
            heap.clear()

    def drop_before(self, step: int) -> None:
        """Forget what belongs to steps before ``step``."""
        for kind, heap in self._heaps.items():
            kept = [entry for entry in heap if entry[1] >= step]
            heapq.heapify(kept)
            self._heaps[kind] = kept


class MicrobatchTable:
    """All microbatches of one replica, the budget for what they retain, and the open step.

    Args:
        budget_bytes: What may be retained.
        max_queue: How many forwards of a step may wait.
        dropped: Told of each whose tensors were let go to keep the budget, with their bytes.
        ahead: Whether the step after the open one may be fed early, with the parameters of the open one.
        hop: That of all its work: see :class:`~swarm.ids.StepWork`.
    """

    def __init__(
        self,
        budget_bytes: int,
        max_queue: int,
        dropped: Callable[[MicrobatchState, int], None],
        *,
        ahead: bool = False,
        hop: int = 0,
    ) -> None:
        self._known: dict[StepWork, MicrobatchState] = {}
        self._undone: dict[StepWork, MicrobatchState] = {}
        self._budget = budget_bytes
        self.queue: WorkQueue[MicrobatchState] = WorkQueue(max_queue)
        self.window = StepWindow(ahead=ahead, hop=hop)
        self.stay = AdaptiveDeadline(floor_s=STAY_FLOOR_S, ceiling_s=STAY_CEILING_S)
        """How long one waits here for its gradient, as it was with others."""
        self.retention = Retention(budget_bytes, dropped)

    def __iter__(self) -> Iterator[MicrobatchState]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def find(self, work: StepWork) -> MicrobatchState | None:
        """Return what is known of a microbatch, if anything is."""
        return self._known.get(work)

    @property
    def step(self) -> int:
        """Return the open step."""
        return self.window.step

    @property
    def deferred_bytes(self) -> int:
        """Return what is held for gradients of weights that are still to be computed."""
        return sum(state.tensors.rest.bytes for state in self if state.tensors.rest is not None)

    def fed_beside(self, work: StepWork) -> int:
        """Return how many others its trainer has fed of its step, those among them that it took back."""
        step, trainer = work.step, work.microbatch.trainer
        fed = {one for one in (*self._known, *self._undone) if one.step == step and one.microbatch.trainer == trainer}
        return len(fed - {work})

    def of(self, body: JourneyMessage) -> MicrobatchState | None:
        """Return what is known of the one that a message is about."""
        return self.find(self.window.work_of(body))

    def given_up(self, body: JourneyMessage) -> bool:
        """Return whether a message is of a way on which its microbatch is not any more: it was begun anew."""
        undone = self._undone.get(self.window.work_of(body))
        return undone is not None and body.key.way <= undone.key.way

    def note(self, body: RoutedMessage) -> tuple[MicrobatchState, bool]:
        """Return the microbatch, made where it is not known, and whether this is a newer attempt of a known one, whose
        route it takes. Raises as :meth:`MicrobatchState.check`."""
        peers = tuple(map(PeerId, body.route))
        work = self.window.work_of(body)
        state = self.of(body) or self._add(MicrobatchState(body.key, peers, work.early, work.hop))
        return state, state.follow(body, peers)

    def place(self, work: StepWork, route: tuple[PeerId, ...]) -> MicrobatchState:
        """Return a microbatch that is assigned to this replica, along that route whatever was known. One that was
        undone is back, unless it was added anew."""
        key = JourneyKey(work.step, work.microbatch, 0, self.window.after_of(work))
        state = self.find(work)
        undone = self._undone.get(work)
        if undone is not None and undone.undone and not (state is not None and (state.counted or state.in_use)):
            if state is not None:
                self.drop(state, "what was undone counts")
            state = self._add(self._undone.pop(work))
            state.undone, state.dropped = False, ""
        state = state or self._add(MicrobatchState(key, route, work.early, work.hop))
        state.route = route
        return state

    def drop(self, state: MicrobatchState, reason: str) -> None:
        """Forget a microbatch altogether."""
        state.clear()
        self._remove(state, reason)

    def keep(self, state: MicrobatchState) -> None:
        """What it takes to add a microbatch again is not let go until its step is closed: only its trainer says that it
        counts no more. Raises Refused where that is not held, or would be more than may be retained."""
        undone = sum(one.retained_bytes for one in self._undone.values())
        if not state.whole or undone + state.retained_bytes > self._budget:
            raise Refused("what it takes to add it again cannot be kept here")
        state.undone = True

    def undo(self, state: MicrobatchState, reason: str) -> None:
        """Forget a microbatch, but for what the closing of its step may want added again: what :meth:`keep` kept."""
        before = self._undone.get(state.work)
        if not state.undone:
            state.clear()
        self._remove(state, reason)
        if before is not None and not state.undone:
            before.key = state.key
            return
        if before is not None:
            self.retention.forget(before)
        self._undone[state.work] = state
        self.retention.hold(state)

    def clear(self, reason: str) -> None:
        """Forget everything, of steps to come as well."""
        self.queue.clear()
        for state in self._all():
            self._remove(state, reason)

    def open_step(self, step: int, after: str, before: str = "") -> None:
        """Forget what belongs to closed steps, and what came ahead of this one and follows another record than the one
        before it, whose hash begins with ``after``, or early the one before that, ``before``."""
        self.window.open_step(step, after, before)
        self.queue.drop_before(step)
        for state in self._all():
            if state.key.step < step:
                self._remove(state, f"step {state.key.step} is closed")
            elif state.key.step == step and state.key.after != self.window.after_of(state.work):
                self._remove(state, f"step {step} follows another record")

    def _add(self, state: MicrobatchState) -> MicrobatchState:
        return self._known.setdefault(state.work, state)

    def _all(self) -> list[MicrobatchState]:
        return [*self, *self._undone.values()]

    def _remove(self, state: MicrobatchState, reason: str) -> None:
        self.retention.forget(state)
        if self._undone.get(state.work) is state:
            del self._undone[state.work]
        elif not state.dropped:
            state.dropped = reason
            del self._known[state.work]
