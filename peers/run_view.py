"""What a run looks like, folded from its peers' events: for the progress table, the report and the plot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from peers.watch import Line

Microbatch = tuple[Any, ...]


@dataclass(slots=True)
class StepView:
    """One closed step. ``closed`` is when the first peer wrote so; ``loss`` is nats per target token."""

    step: int
    loss: float
    tokens: int
    microbatches: int
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


@dataclass(slots=True)
class Stopped:
    """A peer's last word about itself."""

    wall: float
    reason: str
    exit_code: int


class RunView:
    """The state of a run. ``add`` takes events in any order between peers, in order within a peer."""

    def __init__(self) -> None:
        self.steps: dict[int, StepView] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.names: dict[str, str] = {}
        self.ready: dict[str, str | None] = {}
        self.stopped: dict[str, Stopped] = {}
        self.lost_peers: dict[str, str] = {}
        self.parameters: int | None = None
        self.checkpoint_steps: set[int] = set()
        self.last_event: float | None = None
        self.mismatches: set[tuple[int, str]] = set()
        self.hops_moved = 0
        self._issued: dict[Microbatch, int] = {}
        self._committed: Counter[Microbatch] = Counter()
        self._bytes: Counter[int] = Counter()
        self._notes: list[str] = []

    def add(self, line: Line) -> None:
        """Take one event into account; kinds that matter to nobody here are passed over."""
        self.last_event = line.wall
        take = getattr(self, f"_on_{line.kind}", None)
        if take is not None:
            take(line, line.fields)

    @property
    def last_step(self) -> int:
        """Number of the newest closed step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def committed(self) -> int:
        """Microbatches that count, each once."""
        return len(self._committed)

    @property
    def duplicated(self) -> int:
        """How often a committed microbatch was committed again."""
        return self._committed.total() - len(self._committed)

    @property
    def lost(self) -> int:
        """Microbatches sent on a journey in a step that closed without them, and in no other step committed."""
        return sum(step in self.steps and batch not in self._committed for batch, step in self._issued.items())

    @property
    def bytes_per_step(self) -> float | None:
        """Mean over closed steps of the bytes all peers sent; None when no peer has reported."""
        sent = [self._bytes[step] for step in self.steps if step in self._bytes]
        return sum(sent) / len(sent) if sent else None

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens of all steps after the first per second between the first and the last closing; with one
        step, of that step's duration. None before."""
        order = [self.steps[step] for step in sorted(self.steps)]
        if len(order) < 2:
            return order[0].tokens_per_s if order else None
        seconds = order[-1].closed - order[0].closed
        return sum(step.tokens for step in order[1:]) / seconds if seconds > 0 else None

    def _on_PeerStarted(self, line: Line, fields: Any) -> None:
        self.addresses[line.name] = tuple(fields["addresses"])
        if "peer" in fields:
            self.names[str(fields["peer"])] = line.name

    def _on_PeerReady(self, line: Line, fields: Any) -> None:
        self.ready[line.name] = fields["part"]

    def _on_PeerStopped(self, line: Line, fields: Any) -> None:
        self.stopped[line.name] = Stopped(line.wall, fields["reason"], fields["exit_code"])

    def _on_PeerLost(self, line: Line, fields: Any) -> None:
        self.lost_peers.setdefault(fields["name"], fields["reason"])
        note = f"{fields['name']} lost: {fields['reason']}"
        if note not in self._notes:
            self._notes.append(note)

    def _on_RunStarted(self, line: Line, fields: Any) -> None:
        self.parameters = fields["parameters"]

    def _on_StepClosed(self, line: Line, fields: Any) -> None:
        number = fields["step"]
        known = self.steps.get(number)
        if known is None:
            keys = ("step", "loss", "tokens", "microbatches", "seconds", "digests")
            known = StepView(closed=line.wall, **{key: fields[key] for key in keys})
            known.bytes_sent = self._bytes[number]
            known.notes, self._notes = self._notes, []
            self.steps[number] = known
        known.peers.add(line.name)
        for part, digest in fields["digests"].items():
            if known.digests.get(part, digest) != digest:
                self.mismatches.add((number, part))

    def _on_LinkUsage(self, line: Line, fields: Any) -> None:
        self._bytes[fields["step"]] += fields["bytes_sent"]
        if fields["step"] in self.steps:
            self.steps[fields["step"]].bytes_sent = self._bytes[fields["step"]]

    def _on_DigestMismatch(self, line: Line, fields: Any) -> None:
        self.mismatches.add((fields["step"], fields["part"]))

    def _on_Committed(self, line: Line, fields: Any) -> None:
        self._committed.update(tuple(batch) for batch in fields["microbatches"])

    def _on_JourneyStarted(self, line: Line, fields: Any) -> None:
        self._issued[tuple(fields["microbatch"])] = fields["step"]

    def _on_HopMoved(self, line: Line, fields: Any) -> None:
        self.hops_moved += 1
        old = self.names.get(fields["old"], str(fields["old"])[-6:])
        new = self.names.get(fields["new"], str(fields["new"])[-6:])
        note = f"stage {fields['stage']}: work of {old} continues on {new} ({fields['reason']})"
        if note not in self._notes:
            self._notes.append(note)

    def _on_CheckpointWritten(self, line: Line, fields: Any) -> None:
        self.checkpoint_steps.add(fields["step"])
