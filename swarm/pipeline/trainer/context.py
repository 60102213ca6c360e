"""What all journeys of one trainer share, and what it lends them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.clock import Clock
from swarm.device import Device
from swarm.events import EventSink
from swarm.ids import PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.trainer.taken import NOTHING_EARLY, EarlyRules


class ReceiptCheck(Protocol):
    """Verifies a signature by a peer."""

    def __call__(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether ``signature`` over ``data`` is ``peer``'s."""


@dataclass(slots=True, kw_only=True)
class JourneyContext:
    """What all journeys of one trainer share. ``suspect`` asks the health watch to look at a peer; ``seed`` is the
    run's, ``specs`` what crosses its boundaries, ``target`` how many microbatches a step has, ``early`` how many of
    them may be fed early."""

    run: RunId
    stages: int
    endpoint: Endpoint
    device: Device
    specs: BoundarySpecs
    ends: EndsCompute | None
    replicas: ReplicaChoice
    events: EventSink
    clock: Clock
    verify: ReceiptCheck
    suspect: Callable[[PeerId, str], None]
    seed: int = 0
    target: int = 0
    early: EarlyRules = NOTHING_EARLY
    send_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class JourneyHooks:
    """What a trainer lends its journeys while it feeds: ``attend`` notices the death of peers, ``spawn`` does small
    things beside, ``warn`` has all its journeys look again."""

    attend: Callable[[Iterable[PeerId]], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    warn: Callable[[], None] = lambda: None
