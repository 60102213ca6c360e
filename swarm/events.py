"""One frozen dataclass per thing that happens. Reports, plots, progress and tests read these, never log lines.

An event is plain data; who wrote it and when is added by the recorder. Fields are named with their units.
A microbatch is written whole, as the list (trainer, shard, epoch, position): its short text would be ambiguous.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from swarm.ids import MicrobatchId, PartName, PeerId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``kind`` is the class name."""

    _kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(Event, cls).__init_subclass__(**kwargs)
        Event._kinds[cls.__name__] = cls

    @staticmethod
    def kinds() -> dict[str, type[Event]]:
        """All event classes by kind, for whoever reads events back."""
        return dict(Event._kinds)

    @property
    def kind(self) -> str:
        """Name under which the event is stored."""
        return type(self).__name__

    def fields(self) -> dict[str, Any]:
        """The event's own fields as plain data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class EventSink(Protocol):
    """Where events go. Never blocks and never raises for a full disk: it counts what it dropped."""

    def emit(self, event: Event) -> None:
        """Append one event."""


class NullSink:
    """Throws events away."""

    def emit(self, event: Event) -> None:
        """See :class:`EventSink`."""


# --- a peer's life -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStarted(Event):
    """The endpoint is open and announced."""

    role: str
    name: str
    pid: int
    addresses: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound(Event):
    """The manifest is here and its digest is the run id. ``source`` served it."""

    run: RunId
    name: str
    stages: int
    steps: int
    wire: int
    source: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited(Event):
    """The run's founder can be reached: ``invite`` is what others join with."""

    invite: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability(Event):
    """How others reach this peer: ``direct``, ``relayed`` or ``local`` (this machine only), in words and addresses."""

    how: str
    detail: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """The peer cannot go on until something else happens; written when what it waits for changes."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAssigned(Event):
    """Which part this peer holds from now on, and why; None for a peer that holds nothing."""

    part: PartName | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProgress(Event):
    """A part is being downloaded: written at most a few times a second."""

    part: PartName
    step: int
    donor: PeerId
    bytes_received: int
    bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Event):
    """The peer was asked to leave in order and will, at the end of a step; ``reason`` says who asked."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChanged(Event):
    """A close record let peers join or leave: who, by name and part."""

    step: int
    joined: tuple[dict[str, Any], ...]
    left: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady(Event):
    """The peer holds its part at ``step`` and takes work."""

    part: PartName | None
    step: int
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(Event):
    """A member of the roster does not answer any more."""

    peer: PeerId
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonLost(Event):
    """Our own libp2p daemon died."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStopped(Event):
    """The last event of a peer that ends in order."""

    reason: str
    exit_code: int


# --- a run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The first record of the run's history was accepted here."""

    run: RunId
    stages: int
    roster: tuple[dict[str, Any], ...]
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed(Event):
    """A close record was decided and this peer swapped. ``digests`` are all groups'; loss is nats per target token."""

    step: int
    loss: float
    tokens: int
    microbatches: int
    grad_norm: float
    clip: float
    lr: float
    digests: dict[str, str]
    leader: PeerId
    record: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMismatch(Event):
    """Replicas of a part did not agree bit for bit after a step."""

    step: int
    part: PartName
    digests: dict[PeerId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUsage(Event):
    """Bytes this peer put on and took off the wire during a step."""

    step: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The microbatches a close record counts; written by the step's leader only."""

    step: int
    microbatches: tuple[MicrobatchId, ...]


# --- a microbatch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneyStarted(Event):
    """A trainer sent a microbatch on its way."""

    step: int
    microbatch: MicrobatchId
    route: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneyCompleted(Event):
    """Forward and backward are done and the leader acknowledged the record."""

    step: int
    microbatch: MicrobatchId
    tokens: int
    loss_sum: float
    route: tuple[PeerId, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HopMoved(Event):
    """A hop was sent to another replica of its stage, with the reason."""

    step: int
    microbatch: MicrobatchId
    stage: int
    old: PeerId
    new: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated(Event):
    """A replica added one microbatch's gradient to its open step."""

    step: int
    microbatch: MicrobatchId
    part: PartName


# --- averaging, state --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(Event):
    """A group's all-reduce ended here."""

    step: int
    part: PartName
    members: int
    participating: int
    bytes_sent: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDownloaded(Event):
    """A part was downloaded and its digest matches the record."""

    part: PartName
    step: int
    donor: PeerId
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    """A part is on disk, synced and renamed into place."""

    part: PartName
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLag(Event):
    """Event-loop lag of this peer since the last such event, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
