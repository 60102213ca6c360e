"""What a run looks like while it goes on, folded from its peers' events: for the progress table and the report.

The folds are those of :mod:`swarm.monitoring`; here are only the things that a local run's starter asks by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.events import (
    CheckpointWritten,
    Event,
    HopMoved,
    Participation,
    PeerLost,
    PeerStarted,
    PeerStopped,
    RunStarted,
    StateDownloaded,
    StepClosed,
    StepGivenUp,
)
from swarm.monitoring.microbatches import Microbatches
from swarm.monitoring.reader import RawEvent
from swarm.monitoring.tail import Told
from swarm.monitoring.views import Digests, StepTable, Traffic


@dataclass(frozen=True, slots=True)
class Stopped:
    """A peer's last word about itself."""

    wall: float
    reason: str
    exit_code: int


class RunView:
    """The state of a run. ``add`` takes events in any order between peers, in order within a peer; its cost does not
    grow with the run.

    Public fields: ``steps``, ``traffic``, ``microbatches`` and ``digests``, the general folds; ``addresses`` of peers
    that started, by name; ``stopped``, last words by name; ``lost_peers``, names that others reported gone, in order,
    with the first reason; ``notes``, by step, what happened on the way to it; ``checkpoint_steps``;
    ``bytes_at_start``, what everybody downloaded of the initial weights.
    """

    def __init__(self) -> None:
        self.steps, self.traffic = StepTable(), Traffic()
        self.microbatches, self.digests = Microbatches(), Digests()
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.stopped: dict[str, Stopped] = {}
        self.lost_peers: dict[str, str] = {}
        self.notes: dict[int, tuple[str, ...]] = {}
        self.checkpoint_steps: set[int] = set()
        self.parameters: int | None = None
        self.hops_moved = 0
        self.bytes_at_start = 0
        self._names: dict[str, str] = {}
        self._pending: list[str] = []

    def add(self, told: Told) -> None:
        """Take one event into account."""
        event = told.record.event
        if isinstance(event, StepClosed) and event.step not in self.steps and self._pending:
            self.notes[event.step], self._pending = tuple(self._pending), []
        for view in (self.steps, self.traffic, self.microbatches, self.digests):
            view.add(told.record)
        match event:
            case PeerStarted(addresses=addresses):
                self.addresses[told.name] = addresses
                self._names[told.record.peer] = told.name
            case PeerStopped(reason=reason, exit_code=code):
                self.stopped[told.name] = Stopped(told.record.wall, reason, code)
            case RunStarted(parameters=parameters):
                self.parameters = parameters
            case CheckpointWritten(step=step):
                self.checkpoint_steps.add(step)
            case StateDownloaded(step=0, bytes_received=received):
                self.bytes_at_start += received
            case _:
                self._annotate(event)

    def _annotate(self, event: Event | RawEvent) -> None:
        """Note what happens on the way to the step that closes next."""
        match event:
            case PeerLost(name=name, reason=reason):
                self.lost_peers.setdefault(name, reason)
                self._note(f"{name} lost: {reason}")
            case StepGivenUp() if event.step not in self.steps:
                held = ", ".join(f"{self._name(peer)} holds {part} now" for peer, part in event.holders.items())
                self._note(f"given up, {' and '.join(event.lost)} was lost: {held}")
            case HopMoved():
                self._moved(event)
            case Participation(whole=False) if event.live > 1:
                left_out = "; ".join(f"{self._name(peer)}: {why}" for peer, why in sorted(event.why.items()))
                self._note(f"{event.part}: {event.participating} of {event.live} averaged ({left_out})")

    def _moved(self, event: HopMoved) -> None:
        self.hops_moved += 1
        old, new = self._name(event.old), self._name(event.new)
        if event.late:  # late is not lost: nothing is wrong with a busy machine
            self._note(f"stage {event.stage}: {old} was slow, {new} does some of its work")
        else:
            self._note(f"stage {event.stage}: work of {old} continues on {new} ({event.reason})")

    @property
    def tokens_per_s(self) -> float | None:
        """As :meth:`StepTable.tokens_per_s`; with a single step, of that step's own duration."""
        return self.steps[self.steps.last].tokens_per_s if len(self.steps) == 1 else self.steps.tokens_per_s()

    @property
    def bytes_per_step(self) -> float | None:
        """Mean over closed steps of the bytes that all peers sent, without ``bytes_at_start``, which their counts hold
        in step 1; None when no peer has reported."""
        sent = {step: usage.sent for step, usage in self.traffic.by_step.items() if step in self.steps}
        if 1 in sent:
            sent[1] = max(0, sent[1] - self.bytes_at_start)
        return sum(sent.values()) / len(sent) if sent else None

    def _name(self, peer: str) -> str:
        return self._names.get(peer, peer[-6:])

    def _note(self, note: str) -> None:
        if note not in self._pending:
            self._pending.append(note)
