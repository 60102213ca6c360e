"""What a peer does for microbatches, as told to whoever looks at the swarm; nothing is decided by it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from swarm.ids import PeerId
from swarm.pipeline.messages import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Parole:
    """A trainer leaves a replica out for ``left_s`` seconds more, or tries it with one microbatch, for ``reason``."""

    peer: PeerId
    left_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineActivity:
    """``queued`` pieces of work wait for the device; ``under_way`` microbatches have begun and are not done;
    ``microbatches`` were done since the peer took its part. ``compute_s`` is the mean time of the newest ones on the
    device, forward and backward together, 0.0 before the first. ``averaging``: a round of its part goes on."""

    queued: int = 0
    under_way: int = 0
    microbatches: int = 0
    compute_s: float = 0.0
    averaging: bool = False
    parole: tuple[Parole, ...] = ()


class ComputePace:
    """The time that the newest pieces of one replica's work took on its device; ``weights`` are what a backward left to
    do."""

    def __init__(self) -> None:
        self.microbatches = 0
        self._seconds = {work: deque[float](maxlen=32) for work in ("forward", "backward", "weights")}

    def observe(self, work: Direction | Literal["weights"], seconds: float) -> None:
        """A piece is done; with its backward a microbatch is, for those who wait for it."""
        self._seconds[work].append(seconds)
        self.microbatches += work == "backward"

    @property
    def compute_s(self) -> float:
        """Mean seconds of a microbatch, both directions together; 0.0 before the first."""
        return sum(fmean(seconds) for seconds in self._seconds.values() if seconds)
