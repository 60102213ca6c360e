"""What a peer does for microbatches, as told to anyone who looks at the swarm; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Probation:
    """A trainer leaves a replica out for ``left_s`` seconds more, or tries it with one microbatch, for ``reason``."""

    peer: PeerId
    left_s: float
    reason: str


class AuditCounts(NamedTuple):
    """How many hops a trainer had computed again by others since it took its part; of these how many were ``wrong``,
    how many ``doubtful``, since one said so alone or what they were computed from could not be had, and how many
    nobody could judge (``unjudged``)."""

    made: int = 0
    wrong: int = 0
    doubtful: int = 0
    unjudged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineActivity:
    """``queued`` pieces of work wait for the device; ``under_way`` microbatches have begun and are not done;
    ``microbatches`` were done since the peer took its part. ``compute_s`` is the mean time of the newest ones on the
    device, forward and backward together, 0.0 before the first. ``averaging``: a round of its part goes on. ``checked``
    is how many hops of each replica a trainer had found right by others, since one last did not count."""

    queued: int = 0
    under_way: int = 0
    microbatches: int = 0
    compute_s: float = 0.0
    averaging: bool = False
    probation: tuple[Probation, ...] = ()
    audits: AuditCounts = AuditCounts()
    checked: Mapping[PeerId, int] = field(default_factory=dict)
