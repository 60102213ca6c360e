"""What happens to a microbatch, from its first hop to the step that counts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swarm.events.base import UNSAID, Event
from swarm.ids import MicrobatchId, PartName, PeerId


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
    """A hop was sent to another replica of its stage, with the reason. ``direction`` is ``forward`` or ``backward``;
    ``late``: the old one has not answered in time, and may be well. ``refused``: it says that what it was given is
    wrong, and others may be at fault for that."""

    step: int
    microbatch: MicrobatchId
    stage: int
    old: PeerId
    new: PeerId
    reason: str
    direction: str = "forward"
    late: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HopDiffers(Event):
    """A trainer found that a replica says another thing of a tensor than the one that it got it from or sent it to, and
    has no signature for it, or has signed both. The microbatch is begun anew without it, or set aside."""

    step: int
    microbatch: MicrobatchId
    stage: int
    peer: PeerId
    reason: str


AuditOutcome = Literal["passed", "failed", "disputed", "withheld", "unjudged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HopAudited(Event):
    """A trainer had a hop computed again by others of its stage, ``by`` those that answered, before the microbatch
    counts. ``failed``: most of them found that ``peer`` sent something else. ``disputed``: some did, or the loss is
    another, and nobody knows who is right; ``withheld``: what it got, or sent, cannot be had. In these three the
    microbatch is begun anew without it. ``unjudged``: nobody could say anything, and it counts."""

    step: int
    microbatch: MicrobatchId
    stage: int
    peer: PeerId
    outcome: AuditOutcome
    reason: str
    by: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneySetAside(Event):
    """A trainer gave a microbatch up for good: it cannot be computed, no matter who tries. The reason names nobody, for
    what they got may come of another's work."""

    step: int
    microbatch: MicrobatchId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsFarOut(Event):
    """``peer`` sent this replica of a part several gradients lately that are far longer than is usual, this one so many
    ``times``. They were scaled down before anything was computed with them, and so was what was handed on."""

    step: int
    part: PartName
    peer: PeerId
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated(Event):
    """A replica added one microbatch's gradient to a step: computed, where it was fed ``early``, with the parameters of
    one record before. ``hop`` says for which of the stages that share the part; 0 elsewhere."""

    step: int
    microbatch: MicrobatchId
    part: PartName
    early: bool = False
    hop: int = field(default=0, metadata=UNSAID)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionReplayed(Event):
    """A replica added, at the closing of a step, a microbatch's gradient that another's death had taken along."""

    step: int
    microbatch: MicrobatchId
    part: PartName
    early: bool = False
    hop: int = field(default=0, metadata=UNSAID)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionReversed(Event):
    """A replica took a microbatch's gradient, which does not count here, out of its open step again."""

    step: int
    microbatch: MicrobatchId
    part: PartName
    early: bool = False
    hop: int = field(default=0, metadata=UNSAID)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkWithdrawn(Event):
    """What these trainers had begun or completed in the step does not count: they are gone, or there and got nothing
    done, and do it again when they are back. Written by the step's leader; the others fill the batch."""

    step: int
    trainers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkExcluded(Event):
    """These completed microbatches do not count after all, with the reason: a replica's death took along what a trainer
    that is gone had done, and nobody can compute it again; nor does what that trainer did after it. It does them again
    when it is back. Written by the step's leader; the others fill the batch."""

    step: int
    microbatches: tuple[MicrobatchId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsDropped(Event):
    """A replica's ``device`` had no memory left for a piece of work: it let go of the graphs of so many microbatches
    that waited for their gradient, and computes their forward again. ``reason`` is what the device said."""

    step: int
    part: PartName
    device: str
    graphs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDropped(Event):
    """A peer let go of the tensors it retained for a microbatch that it had computed, with the reason."""

    step: int
    microbatch: MicrobatchId
    part: PartName
    bytes_dropped: int
    reason: str
