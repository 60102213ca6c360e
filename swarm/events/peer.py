"""Events of one peer's life: started, reachable, waiting, ready, leaving, and whom it sees come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.events.base import Event
from swarm.ids import PartName, PeerId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChosen(Event):
    """The peer computes on this ``device``: ``why`` says what ``auto`` found, or that it was named."""

    device: str
    why: str


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
    """The manifest is here and its digest is the run id. ``source`` served it; ``admission`` is who may join."""

    run: RunId
    name: str
    stages: int
    steps: int
    wire: int
    source: PeerId
    admission: str = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited(Event):
    """The run's founder can be reached: ``invite`` is what others join with, where ``admission`` is open; else it only
    says where the run is."""

    invite: str
    admission: str = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability(Event):
    """How others reach this peer: ``direct``, ``relayed``, ``local`` (this machine only) or ``near`` (as far as is
    known), in words and addresses."""

    how: str
    detail: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUpgraded(Event):
    """There is a direct connection now with a peer that was connected through a relay, where both are behind NAT by a
    punched hole: calls to ``target`` take it from here on. ``address`` is its other end."""

    target: PeerId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayServing(Event):
    """What a relay of no run does, once a minute where that has changed: peers with a ``slot``, the runs that they are
    of, circuits now; bytes passed on and requests refused since its start."""

    slots: int
    runs: int
    circuits: int
    relayed_bytes: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardServed(Event):
    """A page about the run is at ``address``; ``token`` says where the token is that it takes, "" where it takes
    none."""

    address: str
    token: str


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
class LimitTooLow(Event):
    """This peer's owner limits it to ``rate`` bytes a second, with which the averaging of its part is not done in time:
    that would take ``needed``, as far as is known now. Its rounds fail, and it is left out of the run."""

    part: PartName
    rate: int
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSlows(Event):
    """This peer's owner limits it to ``rate`` bytes a second, and its share of a step is about ``step_bytes`` each way,
    where replicas share the work evenly and averaging has no codec: a step takes one over the other, for everybody."""

    part: PartName
    rate: int
    step_bytes: int


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
    somebody had before, ``bound`` in words by when it ends all the same, "" where nothing bounds its time."""

    reason: str
    again: bool = False
    bound: str = ""


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
class PauseWatch(Event):
    """A ``condition`` for a pause cannot be checked, and why; no ``problem``: it can again. Until then what the last
    check said stands, and after some failures that it does not hold."""

    condition: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """The peer leaves in order, as this ``reason`` for a pause holds, and comes back by itself."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The peer has come back by itself, ``seconds`` after what is the ``reason`` that it was away."""

    reason: str
    seconds: float


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
class DataOpened(Event):
    """A trainer's text: the tokens that it reads of it, in so many microbatches, ``times`` over in the whole run.
    ``unused`` is of how much text they are, and what of its records is not in them, in words. Of text that is
    ``held_out`` the loss is measured."""

    tokens: int
    microbatches: int
    times: float
    unused: str = ""
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss(Event):
    """A trainer measured the loss of rows that nobody learns from, in nats a token, with the parameters after ``step``:
    of so many tokens, in ``microbatches`` of the ``most`` that it would have taken. ``reason`` says why of no more; the
    loss is None where that is of none, or it is no number."""

    step: int
    loss: float | None
    tokens: int
    microbatches: int
    most: int
    reason: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLag(Event):
    """Event-loop lag of this peer since the last such event, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
