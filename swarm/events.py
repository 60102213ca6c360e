"""One frozen dataclass per thing that happens. Reports, plots, progress and tests read these, never log lines.

An event is plain data; who wrote it and when is added by the recorder. Fields are named with their units.
A microbatch is written whole, as the list (trainer, shard, epoch, position): its short text would be ambiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.averaging_events import Participation as Participation
from swarm.averaging_events import RoundVoid as RoundVoid
from swarm.averaging_events import SumTaken as SumTaken
from swarm.event import Event as Event
from swarm.event import EventSink as EventSink
from swarm.event import NullSink as NullSink
from swarm.ids import MicrobatchId, PartName, PeerId, RunId
from swarm.lineage_events import LineageBegan as LineageBegan
from swarm.lineage_events import LineageConfirmed as LineageConfirmed
from swarm.lineage_events import LineageGivenUp as LineageGivenUp
from swarm.lineage_events import QuorumBack as QuorumBack
from swarm.lineage_events import QuorumLost as QuorumLost
from swarm.microbatch_events import Accumulated as Accumulated
from swarm.microbatch_events import ContributionReplayed as ContributionReplayed
from swarm.microbatch_events import ContributionReversed as ContributionReversed
from swarm.microbatch_events import HopMoved as HopMoved
from swarm.microbatch_events import JourneyCompleted as JourneyCompleted
from swarm.microbatch_events import JourneySetAside as JourneySetAside
from swarm.microbatch_events import JourneyStarted as JourneyStarted
from swarm.microbatch_events import RetentionDropped as RetentionDropped
from swarm.microbatch_events import WorkExcluded as WorkExcluded
from swarm.microbatch_events import WorkWithdrawn as WorkWithdrawn
from swarm.state_events import CheckpointFailed as CheckpointFailed
from swarm.state_events import CheckpointsSetAside as CheckpointsSetAside
from swarm.state_events import CheckpointWritten as CheckpointWritten
from swarm.state_events import CopyDropped as CopyDropped
from swarm.state_events import CopyHeld as CopyHeld
from swarm.state_events import DiskRefused as DiskRefused
from swarm.state_events import DiskTook as DiskTook
from swarm.state_events import DonorDropped as DonorDropped
from swarm.state_events import StateDownloaded as StateDownloaded

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
    """A part is being downloaded: written at most a few times a second. ``donor`` gave the newest piece; what is
    counted is verified."""

    part: PartName
    step: int
    donor: PeerId
    bytes_received: int
    bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Event):
    """The peer was asked to leave in order and will, at the end of a step; ``reason`` says who asked, ``again`` that
    somebody had before."""

    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionWatch(Event):
    """From now on ``source`` is asked whether this machine is taken back. With a ``problem``: it is asked, but does not
    answer as it should; without a source: nothing is asked."""

    source: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice(Event):
    """``source`` says that this machine is taken back, in ``deadline_s`` seconds; None: it does not say when."""

    source: str
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChanged(Event):
    """A close record let peers join or leave: who, by name and part."""

    step: int
    joined: tuple[dict[str, Any], ...]
    left: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady(Event):
    """The peer holds its part at ``step`` and takes work, ``seconds`` after it entered the run, or, ``again``, after it
    was cut off."""

    part: PartName | None
    step: int
    reason: str
    seconds: float
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(Event):
    """A member of the roster does not answer any more."""

    peer: PeerId
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBack(Event):
    """A member that was lost answers again."""

    peer: PeerId
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonLost(Event):
    """Our own libp2p daemon died; another is started in its place, or the peer ends with the reason why not."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRestarted(Event):
    """Another daemon serves under the same identity, ``seconds`` after the loss; the ``attempts``-th that was tried."""

    pid: int
    seconds: float
    attempts: int


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
class StepGivenUp(Event):
    """Everybody that held one of the parts ``lost`` was lost; nothing of the step counts. ``holders`` hold them now, by
    peer: from a copy, or because they joined. Told right before the step's closing, which has no microbatches."""

    step: int
    lost: tuple[str, ...]
    holders: dict[PeerId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed(Event):
    """A close record was decided and this peer swapped. ``digests`` are all groups': of the part that it holds the one
    that it computed itself, of the others the record's. Loss is nats per target token. No microbatches: see
    :class:`StepGivenUp`. ``seconds`` are since the step before closed here: of a step that was not seen ``whole``, the
    first after joining, the rest that this peer took part in. ``ended``: the run is over with it, before its last."""

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
    whole: bool = True
    ended: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBegan(Event):
    """This peer leads the step from here on, because those before it in the step's succession are gone."""

    step: int
    term: int
    leader: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(Event):
    """An attempt at closing the step was void; nobody applied anything of it, and another is made. Written by its
    leader."""

    step: int
    term: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff(Event):
    """The run went on without this peer; it gets the newest state and asks to be let in again."""

    step: int
    reason: str


# --- averaging, state --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(Event):
    """A group's all-reduce ended here; ``round`` counts those that a step's averaging takes. The group had formed,
    every member being in, ``formed_s`` after this one began it. ``schedule`` is the way that sums travelled, ``reason``
    why that one."""

    step: int
    part: PartName
    members: int
    participating: int
    bytes_sent: int
    seconds: float
    round: int = 0
    formed_s: float = 0.0
    schedule: str = "direct"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Event):
    """A replica that trains apart mixed its weights, after a leg, with those of a group of ``members``, itself counted.
    ``averaged`` versions went into the mean, the oldest of them ``oldest`` legs behind; each ``left_out`` has a
    reason. ``own`` says what became of its own version: added, too old, or alone; with push-sum what became of half its
    mass: pushed, pushed again, or kept, since the one it is for has not answered for an earlier half yet."""

    step: int
    part: PartName
    leg: int
    members: int
    averaged: int
    oldest: int
    own: str
    left_out: dict[PeerId, str]
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLag(Event):
    """Event-loop lag of this peer since the last such event, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
