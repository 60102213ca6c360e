"""What the leader of a step needs from its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.events import EventSink
from swarm.ids import PeerId
from swarm.optimization.calls import StepCalls
from swarm.optimization.history import History
from swarm.optimization.lead import LeadDesk
from swarm.optimization.live_calls import Liveness
from swarm.optimization.records import Confirmation
from swarm.optimization.rules import StepRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What closing a step needs besides the step itself. ``verify`` says whether a peer signed some bytes. ``waiting``
    is told what the leader waits for, "" for nothing. ``copies`` of every part are kept by peers that hold another;
    ``patience_s`` is how long somebody is waited for who could take over a part that nobody holds any more (None: for
    ever). ``confirmed`` proves that our lineage counts, once it does; ``alone_at`` says when (seconds since the epoch)
    those that are there go on without a majority, None: never."""

    rules: StepRules
    calls: StepCalls
    history: History
    events: EventSink
    desk: LeadDesk
    liveness: Liveness
    clock: Clock
    timeout_s: Callable[[], float]
    verify: Callable[[PeerId, bytes, bytes], bool]
    waiting: Callable[[str], None] = lambda _: None
    confirmed: Callable[[], Confirmation | None] = lambda: None
    alone_at: Callable[[], float | None] = lambda: None
    copies: int = 0
    patience_s: float | None = None
