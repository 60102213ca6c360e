"""One group of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, ranked
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Everyone:
    """All replicas of a part in one group: mixes gradient sums, or parameters, and is exact after a single round.

    Each member sends and receives 2(K-1)/K of the vector whatever K is, but the round waits for the slowest member and
    fails with any: beyond some tens of replicas, swap groups instead.
    Source: reduce-scatter and all-gather, Rabenseifner 2004; Patarasuk and Yuan 2009.
    """

    name: str = "everyone"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """One group, ranked by peer id; step, round and seed change nothing."""
        return (Group(ranked(replicas)),) if replicas else ()

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1

    def left_after(self, rounds: int, replicas: int) -> float:
        """Nothing, once there was a round."""
        return 0.0 if rounds else 1.0
