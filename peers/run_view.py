"""What a run looks like while it goes on, folded from its peers' events: for the progress table and the report.

Kept up to date event by event where a person watches; what only the report asks for is folded at the end, by
:mod:`swarm.monitoring.views`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.watch import Told
from swarm.events import (
    CheckpointWritten,
    Event,
    HopMoved,
    LinkUsage,
    PeerLost,
    PeerStarted,
    PeerStopped,
    RunStarted,
    StepClosed,
)
from swarm.monitoring import views
from swarm.monitoring.reader import Recorded


@dataclass(slots=True)
class StepView:
    """One closed step. ``closed`` is when the first peer wrote so; ``loss`` is nats per target token."""

    step: int
    loss: float
    tokens: int
    closed: float
    seconds: float
    digests: dict[str, str]
    peers: set[str] = field(default_factory=set)
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Target tokens per second of the step's own duration."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """A peer's last word about itself."""

    wall: float
    reason: str
    exit_code: int


class RunView:
    """The state of a run. ``add`` takes events in any order between peers, in order within a peer.

    Public fields: closed ``steps`` by number; ``addresses`` of peers that started, by name; ``stopped``, last words by
    name; ``lost_peers``, names that others reported gone, in order, with the first reason; ``checkpoint_steps``.
    """

    def __init__(self) -> None:
        self.steps: dict[int, StepView] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.stopped: dict[str, Stopped] = {}
        self.lost_peers: dict[str, str] = {}
        self.checkpoint_steps: set[int] = set()
        self.parameters: int | None = None
        self.hops_moved = 0
        self._records: list[Recorded] = []
        self._names: dict[str, str] = {}
        self._bytes: dict[int, int] = {}
        self._notes: list[str] = []

    def add(self, told: Told) -> None:
        """Take one event into account; kinds that matter to nobody here are kept for the report."""
        self._records.append(told.record)
        event = told.record.event
        match event:
            case StepClosed():
                self._add_step(told.name, told.record.wall, event)
            case LinkUsage(step=step, bytes_sent=sent):
                self._bytes[step] = self._bytes.get(step, 0) + sent
                if step in self.steps:
                    self.steps[step].bytes_sent = self._bytes[step]
            case PeerStopped(reason=reason, exit_code=code):
                self.stopped[told.name] = Stopped(told.record.wall, reason, code)
            case Event():
                self._add_other(told, event)

    @property
    def last_step(self) -> int:
        """Number of the newest closed step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def in_order(self) -> list[StepView]:
        """Closed steps, ascending."""
        return [self.steps[step] for step in sorted(self.steps)]

    @property
    def tokens_per_s(self) -> float | None:
        """As :func:`swarm.monitoring.views.tokens_per_s`; with a single step, of that step's own duration."""
        return self.in_order[0].tokens_per_s if len(self.steps) == 1 else views.tokens_per_s(self._records)

    @property
    def bytes_per_step(self) -> float | None:
        """Mean over closed steps of the bytes that all peers sent; None when no peer has reported."""
        table = views.bytes_by_step(self._records)
        sent = [table[step].sent for step in self.steps if step in table]
        return sum(sent) / len(sent) if sent else None

    def microbatch_account(self) -> views.MicrobatchAccount:
        """Where all microbatches went. Cost: a pass over all events."""
        return views.microbatch_account(self._records)

    def digest_mismatches(self) -> list[views.Mismatch]:
        """Replicas that did not agree. Cost: a pass over all events."""
        return views.digest_mismatches(self._records)

    def _add_step(self, name: str, wall: float, event: StepClosed) -> None:
        known = self.steps.get(event.step)
        if known is None:
            known = StepView(event.step, event.loss, event.tokens, wall, event.seconds, event.digests)
            known.bytes_sent = self._bytes.get(event.step, 0)
            known.notes, self._notes = self._notes, []
            self.steps[event.step] = known
        known.peers.add(name)

    def _add_other(self, told: Told, event: Event) -> None:
        match event:
            case PeerStarted(addresses=addresses):
                self.addresses[told.name] = addresses
                self._names[told.record.peer] = told.name
            case RunStarted(parameters=parameters):
                self.parameters = parameters
            case PeerLost(name=name, reason=reason):
                self.lost_peers.setdefault(name, reason)
                self._note(f"{name} lost: {reason}")
            case HopMoved():
                self.hops_moved += 1
                old, new = self._name(event.old), self._name(event.new)
                self._note(f"stage {event.stage}: work of {old} continues on {new} ({event.reason})")
            case CheckpointWritten(step=step):
                self.checkpoint_steps.add(step)

    def _name(self, peer: str) -> str:
        return self._names.get(peer, peer[-6:])

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
