"""What a stage replica is, what it works with, and who takes part in its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.device import Device
from swarm.events import EventSink
from swarm.ids import PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.pipeline.compute import BoundarySpecs, StageCompute
from swarm.pipeline.retention import RETENTION_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """One replica's place and limits. ``send_timeout_s`` bounds one hand-over, ``max_under_way`` the graphs and
    payloads held of the open step, of the next one half as many; four times as many may send (hosted) targets ahead.
    ``retention_bytes`` is the budget for what is retained of computed microbatches until their step closes. ``seed`` is
    the run's."""

    run: RunId
    stage: int
    stages: int
    specs: BoundarySpecs
    seed: int = 0
    max_queue: int = 32
    max_under_way: int = 64
    send_timeout_s: float = 30.0
    retention_bytes: int = RETENTION_BYTES

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
    device: Device
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
