"""Stochastic wiring: which replica takes the next hop (SWARM, arXiv 2301.11913, appendix C).

Interleaved weighted round-robin: every replica has a key, the cumulative time this trainer expects to have kept it
busy; the smallest key is chosen and grows by that replica's average. So a replica twice as fast is chosen twice as
often, and one that slows down is chosen less from the next hop on. Pure but for the seeded tie-break.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from swarm.errors import Refused
from swarm.ids import PeerId

FIRST_GUESS_S = 1e-3
"""Expected seconds of a replica that was never measured, when no other replica of its stage was either: small enough
that every replica is tried once before the first measurement decides anything."""


@dataclass(slots=True)
class _Replica:
    key: float = 0.0
    average_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """What wiring knows of one replica: its key and its moving average, both in seconds."""

    busy_s: float
    average_s: float | None


class Wiring:
    """One trainer's choice of replicas. ``gamma`` is the weight of the newest measurement in the moving average."""

    def __init__(self, stages: Sequence[Sequence[PeerId]], *, seed: int, gamma: float = 0.2) -> None:
        self._gamma = gamma
        self._rng = random.Random(seed)
        self._stages: list[dict[PeerId, _Replica]] = [{} for _ in stages]
        for stage, peers in enumerate(stages):
            for peer in peers:
                self.add(stage, peer)

    def replicas(self, stage: int) -> tuple[PeerId, ...]:
        """The replicas of a stage that may be chosen."""
        return tuple(self._stages[stage])

    def add(self, stage: int, peer: PeerId) -> None:
        """A replica appeared. It starts level with the least busy one, so that it is not flooded."""
        known = self._stages[stage]
        if peer not in known:
            known[peer] = _Replica(key=min((replica.key for replica in known.values()), default=0.0))

    def remove(self, stage: int, peer: PeerId) -> None:
        """A replica is gone."""
        self._stages[stage].pop(peer, None)

    def follow(self, stages: Sequence[Sequence[PeerId]]) -> None:
        """Know exactly these replicas from now on; what is known of those that stay is kept."""
        for stage, peers in enumerate(stages):
            for peer in set(self._stages[stage]) - set(peers):
                self.remove(stage, peer)
            for peer in peers:
                self.add(stage, peer)

    def choose(self, stage: int, exclude: Collection[PeerId] = ()) -> tuple[PeerId, str]:
        """(replica, reason) for the next hop at a stage. Raises Refused when nobody is left. O(replicas)."""
        candidates = {peer: replica for peer, replica in self._stages[stage].items() if peer not in exclude}
        if not candidates:
            raise Refused(f"stage {stage} has no replica left to choose")
        lowest = min(replica.key for replica in candidates.values())
        chosen = self._rng.choice([peer for peer, replica in candidates.items() if replica.key == lowest])
        replica = candidates[chosen]
        expected = self._expected(stage, replica)
        replica.key += expected
        return chosen, f"least busy of {len(candidates)}: {lowest:.3f} s so far, {expected:.3f} s a hop"

    def observe(self, stage: int, peer: PeerId, seconds: float) -> None:
        """A hop took this long, queueing and computing."""
        replica = self._stages[stage].get(peer)
        if replica is None:
            return
        old = replica.average_s
        replica.average_s = seconds if old is None else self._gamma * seconds + (1 - self._gamma) * old

    def typical_seconds(self, stage: int) -> float:
        """Median of the replicas' averages; a first guess before anything was measured."""
        measured = [replica.average_s for replica in self._stages[stage].values() if replica.average_s is not None]
        return median(measured) if measured else FIRST_GUESS_S

    def statistics(self) -> list[dict[PeerId, ReplicaStatistics]]:
        """Per stage and replica, as it is now."""
        return [
            {peer: ReplicaStatistics(replica.key, replica.average_s) for peer, replica in stage.items()}
            for stage in self._stages
        ]

    def _expected(self, stage: int, replica: _Replica) -> float:
        return replica.average_s if replica.average_s is not None else self.typical_seconds(stage)
