"""Events of a run: its steps and terms, who is cut off, and the branches that form while no majority is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.events.base import Event
from swarm.ids import MicrobatchId, PartName, PeerId, RunId


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
class WentBack(Event):
    """The run went back to the checkpoint of ``step``, for nobody held a part any more, nor a copy of it, when the step
    ``repeats`` was open: the steps after ``step`` before that one are done again. ``absent`` were lost in it.
    ``returns`` counts how often the run went back, this time too. Told by every peer that takes part then."""

    step: int
    repeats: int
    returns: int
    absent: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsMoved(Event):
    """With this step's record hosts hold other parts, ``moves`` by peer: told by its leader, with the ``reasons`` of
    the plan, of which some may not have moved."""

    step: int
    moves: dict[PeerId, str]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDeclined(Event):
    """A host that was to hold ``part`` from this step's record on stays where it is, for the ``reason`` that it gave or
    because it did not answer: told by the step's leader, in each step in which it is asked."""

    step: int
    peer: PeerId
    part: PartName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed(Event):
    """A close record was decided and this peer swapped. ``digests`` are all groups': of the part that it holds the one
    that it computed itself, of the others the record's. Loss is nats per target token: ``tokens`` are those, of the
    ``computed`` ones of all microbatches. No microbatches: see :class:`StepGivenUp`. ``seconds`` are since the step
    before closed here: of a step that was not seen ``whole``, the first after joining, the rest that this peer took
    part in. ``ended``: the run is over with it, before its last. ``early`` of the microbatches were computed with the
    parameters of the record before."""

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
    early: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMismatch(Event):
    """Replicas of a part did not agree bit for bit after a step."""

    step: int
    part: PartName
    digests: dict[PeerId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesFarOut(Event):
    """So many microbatches of a step have a loss far above the others', or far below, ``loss`` nats a token together;
    the loss that is told of the step is without them. ``peer`` alone had a hand in all and in few others; None where
    nobody had, or several had. Nobody is held to it: text may be easy, or hard."""

    step: int
    microbatches: int
    loss: float
    peer: PeerId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsCapped(Event):
    """The means of these parts were so far out in a step that each was scaled by a factor of its own: somebody's sum
    was corrupt, or a gradient exploded. Told right before the step's closing."""

    step: int
    caps: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecsChanged(Event):
    """From the step after this one on boundaries have these ``codecs``: of activations and of their gradients, from the
    trainers' embedding to their head. ``why``: what the record of this step found out about links."""

    step: int
    codecs: tuple[tuple[str, str], ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUsage(Event):
    """Bytes this peer put on and took off the wire during a step."""

    step: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsed(Event):
    """What this peer's device computed of a step that it saw whole, ``flops_per_s`` from its close to the one before,
    as PaLM counts them (appendix B); ``mfu`` is the share of the device's peak, None where that is not known. Only
    microbatches that counted do."""

    step: int
    part: PartName
    microbatches: int
    flops_per_s: float
    mfu: float | None


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
class ClosedWithout(Event):
    """A step's close is made without replicas that are ``late``, each with the reason: they stay members, and what they
    learnt is averaged later. The leader, who writes it, had waited ``waited_s``, of which ``grace_s`` at most for the
    rest once it had a quorum."""

    step: int
    late: dict[PeerId, str]
    waited_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeldUp(Event):
    """The close of a step waited ``seconds`` for a member where others take ``usual_s``. So many ``times`` lately it
    did, as leaders say; after three of several leaders the run goes on without it. Written by the step's leader."""

    step: int
    peer: PeerId
    seconds: float
    usual_s: float
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutAsSlow(Event):
    """A step was closed without a member that is there, and held up those before it: it may join again from step
    ``until`` on. Each time that is twice as far. Written by the step's leader."""

    step: int
    peer: PeerId
    reason: str
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenWrong(Event):
    """The record of a step carries the proof that what a member computed of a ``microbatch``, or (None) did when its
    ``part`` was averaged, is wrong, or (it is not the ``accused``) that it called that wrong or right, which it is not:
    ``by`` are those that say so, the accused too. It is barred until step ``until``; 0: not yet. Written by the step's
    leader."""

    step: int
    peer: PeerId
    accused: PeerId
    part: PartName
    microbatch: MicrobatchId | None
    by: tuple[PeerId, ...]
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefused(Event):
    """A member proposed a close record that no member can accept. Written once a step and member by each that it asks
    to."""

    step: int
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaTaken(Event):
    """A trainer's microbatches pulled against all others', by the words of replicas of several steps: by ``mean`` from
    −1 to 1 over so many ``microbatches``. The run takes nothing of it until step ``until``; it stays a member. Each
    time that is twice as far."""

    step: int
    peer: PeerId
    mean: float
    microbatches: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp(Event):
    """This peer was late for a step's close, and has the update with which it closed, ``seconds`` after it began to
    ask for it. What it learnt stays in its weights."""

    step: int
    part: PartName
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWorkLost(Event):
    """What a replica did in steps for whose closes it was late, so many ``tokens`` of them, will be averaged with
    nothing: it is in no weights any more."""

    step: int
    peer: PeerId
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff(Event):
    """The run went on without this peer; it gets the newest state and asks to be let in again."""

    step: int
    reason: str


# --- a swarm that is cut in two -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumLost(Event):
    """So few of the voters are there, as this member sees it, that the open step cannot be decided: they wait, until
    ``alone_at`` (seconds since the epoch), when they go on provisionally; None: for as long as it takes."""

    step: int
    there: int
    voters: int
    alone_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumBack(Event):
    """A majority of the voters is there again, after so many seconds."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageBegan(Event):
    """No majority came back: those that are there have closed a step by themselves, and go on. Whether it counts is
    known when the others are back."""

    step: int
    there: int
    voters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageConfirmed(Event):
    """A majority has accepted what was closed without it from a step on: it counts."""

    step: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageGivenUp(Event):
    """What was closed without a majority from a step on does not count: weights and cursors go back."""

    step: int
    microbatches: int
    reason: str
