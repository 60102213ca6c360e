"""Machines that compute and carry in virtual time, without a line of what they compute: one heap of what happens next,
links that messages share, and replicas with the product's own queue of work.

Links behave as :class:`swarm.sim.links.Traffic`: large messages of a machine pass one after the other each way, small
ones overtake. :mod:`swarm.sim.journeys` puts journeys on them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from swarm.ids import MicrobatchId, PartName, PeerId, StepWork
from swarm.pipeline.stage.table import WorkQueue
from swarm.sim.device import WEIGHTS_SHARE
from swarm.sim.links import OVERTAKING_BYTES

FORWARD_SHARE = 1 / 3
"""Of a microbatch's forward and backward."""
UNBOUNDED = 1 << 62

Happening = Callable[[], None]


class Heap:
    """What happens next, in virtual seconds. What is of one moment happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now, self._numbers = 0.0, itertools.count()
        self._events: list[tuple[float, int, Happening]] = []

    @property
    def next_s(self) -> float:
        """Return when something happens next; infinity where nothing does."""
        return self._events[0][0] if self._events else math.inf

    def at(self, when: float, happening: Happening) -> None:
        """Have something happen then."""
        heapq.heappush(self._events, (when, next(self._numbers), happening))

    def turn(self) -> None:
        """Have the next thing happen."""
        self.now, _, happening = heapq.heappop(self._events)
        happening()

    def clear(self) -> None:
        """Nothing of it happens."""
        self._events.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class LinkedMachine:
    """One machine's link: bytes a second each way, its part of the way to another machine (a quarter of the round trip
    between two such), and until when each way is taken."""

    up: float
    down: float
    part_s: float
    up_until: float = 0.0
    down_until: float = 0.0


def send(heap: Heap, source: LinkedMachine, target: LinkedMachine, size: float, then: Happening) -> None:
    """Carry a message; ``then`` happens when its last byte is there."""
    now = heap.now
    if size <= OVERTAKING_BYTES:
        sent = now + size / min(source.up, target.down)
    else:
        source.up_until = max(now, source.up_until) + size / source.up
        target.down_until = max(now, target.down_until) + size / target.down
        sent = max(source.up_until, target.down_until)
    heap.at(sent + source.part_s + target.part_s, then)


WorkName = Literal["forward", "backward", "weights", "again"]
"""``backward`` is the gradient of the input, ``weights`` the rest; ``again`` is all of a microbatch, for one that is
lost."""


@dataclass(frozen=True, slots=True)
class PieceOfWork:
    """What a replica is to do, since when, and what follows: told how long it took and how long it waited."""

    kind: WorkName
    since: float
    then: Callable[[float, float], None]
    extra_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class SimReplica(LinkedMachine):
    """One part's replica: ``whole_s`` is a microbatch, forward and backward. It does one piece at a time, in the order
    of the product's queue. ``added``: microbatches of the open step that it has in its sum, or will have."""

    heap: Heap
    peer: PeerId
    part: PartName
    whole_s: float
    queue: WorkQueue[PieceOfWork] = field(default_factory=lambda: WorkQueue(UNBOUNDED))
    busy: bool = False
    gone: bool = False
    added: int = 0
    waits: int = 0
    """Pieces that are queued, or being done."""

    def seconds(self, piece: PieceOfWork) -> float:
        """Return what a piece of work takes here."""
        backward = (1 - FORWARD_SHARE) * self.whole_s
        shares = {
            "forward": FORWARD_SHARE * self.whole_s,
            "backward": (1 - WEIGHTS_SHARE) * backward,
            "weights": WEIGHTS_SHARE * backward,
            "again": self.whole_s,
        }
        return shares[piece.kind] + piece.extra_s

    def push(self, work: StepWork, piece: PieceOfWork) -> None:
        """Have something done."""
        kind: Literal["forward", "backward", "weights"] = "weights" if piece.kind == "again" else piece.kind
        self.queue.push(kind, work, piece)
        self.waits += 1
        self._next(work.step)

    def stand_still(self, step: int, seconds: float) -> None:
        """Do nothing for so long."""
        self.busy = True
        self.heap.at(self.heap.now + seconds, lambda: self._free(step))

    def _free(self, step: int) -> None:
        self.busy = False
        self._next(step)

    def _next(self, step: int) -> None:
        if self.busy or self.gone or (piece := self.queue.pop(step)) is None:
            return
        self.busy = True
        seconds, waited = self.seconds(piece), self.heap.now - piece.since

        def done() -> None:
            if self.gone:
                return
            self.busy = False
            self.waits -= 1
            piece.then(seconds, waited)
            self._next(step)

        self.heap.at(self.heap.now + seconds, done)


def microbatch(trainer: PeerId, position: int) -> MicrobatchId:
    """The name of a microbatch that nobody reads."""
    return MicrobatchId(trainer, "0" * 16, 0, position)
