"""What a replica keeps of microbatches, from their admission until the step is closed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarm.errors import Busy, Refused
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.network.protocols import Payload
from swarm.pipeline.compute import Graph
from swarm.pipeline.messages import JourneyMessage
from swarm.pipeline.retention import Retained, Retention, payload_bytes
from swarm.waiting import AdaptiveDeadline

logger = logging.getLogger(__name__)
STAY_FLOOR_S, STAY_CEILING_S = 30.0, 300.0
"""Bounds on how long a microbatch may wait here before it makes room for others; until any was measured the second."""


@dataclass(slots=True, eq=False)
class Passage:
    """One microbatch at one replica. Implements :class:`~swarm.pipeline.retention.Retained`.

    ``forward_attempt`` is that of the admitted forward; ``begun`` says that its payload came, until ``expires`` it, or
    a gradient's, still may. ``input``, ``targets`` and ``gradient`` (of the output) are what the replica received: from
    them it can compute everything again. ``graph`` and ``output`` spare that between forward and backward. ``adopting``
    and ``queued_back`` say that the contribution is being prepared, ``in_use`` how many are computing with it;
    ``taken_out`` that it was added once and taken out again.
    """

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
    expires: float = 0.0
    begun: bool = False
    queued_back: bool = False
    adopting: bool = False
    in_use: int = 0
    accumulated: bool = False
    taken_out: bool = False
    loss_sum: float = 0.0
    tokens: int = 0

    @property
    def index(self) -> tuple[int, MicrobatchId]:
        """What it is found by."""
        return self.key.step, self.key.microbatch

    @property
    def retained_bytes(self) -> int:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        return payload_bytes(self.input, self.targets, self.gradient)

    @property
    def complete(self) -> bool:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        return self.accumulated or (self.taken_out and not self._worked_on)

    @property
    def ahead(self) -> bool:
        """Whether only its targets are here."""
        return self.targets is not None and self.forward_attempt < 0 and not (self.accumulated or self._worked_on)

    @property
    def _worked_on(self) -> bool:
        return self.begun or self.adopting or self.in_use > 0

    def under_way(self, now: float) -> bool:
        """Whether it takes up one of the replica's places: it is worked on, holds a tensor or may soon. Targets that
        came ahead are counted apart."""
        holds = not self.taken_out and (self.input is not None or self.gradient is not None)
        return not self.accumulated and (self.begun or self.adopting or holds or now < self.expires)

    def idle(self, before: float) -> bool:
        """Whether nothing is done with it, and nothing of it came since then."""
        waits = not (self.accumulated or self.queued_back or self.adopting or self.in_use)
        return waits and max(self.arrived, self.expires) < before

    def clear(self) -> None:
        """Let go of everything large."""
        self.input = self.targets = self.output = self.graph = self.gradient = None


class Passages:
    """All passages of one replica, by (step, microbatch), and the budget for what they retain. ``stay`` is how long one
    waits here for its gradient, as it was with others."""

    def __init__(self, budget_bytes: int, dropped: Callable[[Passage, int], None]) -> None:
        self._known: dict[tuple[int, MicrobatchId], Passage] = {}
        self._after = ""
        self.stay = AdaptiveDeadline(floor_s=STAY_FLOOR_S, ceiling_s=STAY_CEILING_S)

        def tell(retained: Retained, size: int) -> None:
            if isinstance(retained, Passage):
                dropped(retained, size)

        self.retention = Retention(budget_bytes, tell)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def find(self, step: int, microbatch: MicrobatchId) -> Passage | None:
        """The passage, if there is one."""
        return self._known.get((step, microbatch))

    def current(self, passage: Passage) -> bool:
        """Whether it is still wanted: its step is open and it was not given up."""
        return self._known.get(passage.index) is passage

    def under_way(self, step: int, now: float) -> int:
        """How many places of that step are taken."""
        return sum(one.key.step == step and one.under_way(now) for one in self)

    def give_way(self, step: int, now: float) -> bool:
        """Forget the microbatch of that step which has waited for longest, if it is longer than any should: whose
        trainer is gone, or has gone on without us and could not say so. Nothing is lost: who still wants it brings the
        gradient, and the input is fetched. False when there is none."""
        before = now - self.stay.seconds()
        idle = [one for one in self if one.key.step == step and one.under_way(now) and one.idle(before)]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.arrived)
        logger.info("step %d, microbatch %s makes room: nothing came of it for too long", *oldest.index)
        self.drop(oldest)
        return True

    def note(self, body: JourneyMessage, route: tuple[str, ...]) -> Passage:
        """The passage, made where there is none; a higher attempt brings its route. Raises Refused for an attempt that
        was superseded, or that leads elsewhere than it did: only a new attempt changes a route."""
        peers = tuple(PeerId(peer) for peer in route)
        passage = self.find(body.step, body.microbatch)
        if passage is None:
            passage = self._known[body.step, body.microbatch] = Passage(body.key, peers)
        self.check(passage, body, peers)
        passage.key, passage.route = body.key, peers
        return passage

    @staticmethod
    def check(passage: Passage, body: JourneyMessage, route: tuple[str, ...]) -> None:
        """Raises Refused as :meth:`note` does; Busy where the passage is of another lineage: it came ahead of its step,
        which will show whose that is."""
        if body.after != passage.key.after:
            raise Busy("not open yet")
        if body.attempt < passage.key.attempt:
            raise Refused(f"attempt {body.attempt} was superseded by {passage.key.attempt}")
        if body.attempt == passage.key.attempt and route != passage.route:
            raise Refused("this attempt leads elsewhere than it did before")

    def place(self, step: int, microbatch: MicrobatchId, route: tuple[PeerId, ...]) -> Passage:
        """The passage of a microbatch that is assigned to this replica, along that route whatever was known."""
        passage = self.find(step, microbatch)
        if passage is None:
            passage = self._known[step, microbatch] = Passage(JourneyKey(step, microbatch, 0, self._after), route)
        passage.route = route
        return passage

    def drop(self, passage: Passage) -> None:
        """Forget a microbatch altogether."""
        passage.clear()
        self.retention.forget(passage)
        if self.current(passage):
            del self._known[passage.index]

    def clear(self) -> None:
        """Forget everything, of steps to come as well. What is being computed of it ends without effect."""
        for passage in list(self):
            self.retention.forget(passage)
            del self._known[passage.index]

    def open_step(self, step: int, after: str) -> None:
        """Forget what belongs to closed steps, and what came ahead of this one by its number and follows another record
        than it does. What is being computed of that ends without effect."""
        self._after = after
        stale = [one for one in self if one.key.step < step or (one.key.step == step and one.key.after != after)]
        for passage in stale:
            self.retention.forget(passage)
            del self._known[passage.index]
