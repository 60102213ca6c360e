"""What all journeys of one trainer share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from swarm.clock import Clock
from swarm.device import Device
from swarm.events import EventSink
from swarm.ids import PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.trainer.pace import JourneyDeadlines, UnresponsivePeers
from swarm.pipeline.wiring import Wiring


class ReceiptCheck(Protocol):
    """Verifies a signature by a peer."""

    def __call__(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether ``signature`` over ``data`` is ``peer``'s."""


def nobody() -> Collection[PeerId]:
    """Nobody is believed to be gone."""
    return ()


@dataclass(slots=True, kw_only=True)
class JourneyContext:
    """What all journeys of one trainer share. ``suspect`` asks the health watch to look at a peer; ``gone`` are those
    whom it believes to be gone: they are chosen for nothing; ``doubted``, who has not answered it the last time, only
    where nobody else is left. ``seed`` is the run's, ``target`` how many microbatches a step has."""

    run: RunId
    stages: int
    endpoint: Endpoint
    device: Device
    ends: EndsCompute | None
    wiring: Wiring
    events: EventSink
    clock: Clock
    verify: ReceiptCheck
    suspect: Callable[[PeerId, str], None]
    gone: Callable[[], Collection[PeerId]] = nobody
    doubted: Callable[[], Collection[PeerId]] = nobody
    pace: JourneyDeadlines = field(default_factory=JourneyDeadlines)
    silence: UnresponsivePeers = field(default_factory=UnresponsivePeers)
    seed: int = 0
    target: int = 0
    send_timeout_s: float = 30.0
