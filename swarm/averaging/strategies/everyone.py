"""One group of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import BugError
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Everyone:
    """All replicas of a part in one butterfly: mixes gradient sums, and is exact after a single round.

    Fit for ``sync`` and ``overlap``. Each member sends and receives 2(K-1)/K of the vector whatever K is, but the
    round waits for the slowest member and fails with any: beyond some tens of replicas, swap groups instead.
    Source: reduce-scatter and all-gather, Rabenseifner 2004; Patarasuk and Yuan 2009.
    """

    name: str = "everyone"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[tuple[PeerId, ...], ...]:
        """One group, ranked by peer id; step, round and seed change nothing."""
        if len(set(replicas)) != len(replicas):
            raise BugError(f"a replica is listed twice: {sorted(replicas)}")
        return (tuple(sorted(replicas)),) if replicas else ()

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1
