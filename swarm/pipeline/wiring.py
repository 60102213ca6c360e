"""Stochastic wiring: which replica takes the next hop (SWARM, arXiv 2301.11913, appendix C).

Interleaved weighted round-robin: every replica has a key, the cumulative time this trainer expects to have kept it
busy; the smallest key is chosen and grows by that replica's average. So a replica twice as fast is chosen twice as
often, and one that slows down is chosen less from the next hop on. Pure but for the seeded tie-break.

How long a replica computes it says itself: only it can tell its work from what it waited, and from the links. One that
claims far less than the others is believed as far as this trainer's own clock says so, too.

A replica that failed is left out for a while, twice as long each time, and then tried with one microbatch: success
ends its parole. ``now`` is monotonic seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.pipeline.activity import Parole
from swarm.waiting import ExponentialBackoff

FIRST_GUESS_S = 1e-3
"""Expected seconds of a replica that was never measured, when no other replica of its stage was either: small enough
that every replica is tried once before the first measurement decides anything."""

BOAST = 1.5
"""Who claims to compute so many times faster than most others of its stage has to be seen to: until then it gets as
many times the work of one of them at most. (A claim of 1 ns got 98 % of a stage's work.)"""

FIRST_LEAVE_S = 1.0
LONGEST_LEAVE_S = 60.0


@dataclass(slots=True)
class _Replica:
    """``average_s`` is of all that it said, ``claims`` by direction; ``own_s`` is what went by here, a piece of work,
    while it had some of ours; ``heard`` is when it said so last."""

    key: float = 0.0
    average_s: float | None = None
    claims: dict[str, float] = field(default_factory=dict)
    own_s: float | None = None
    heard: float = -math.inf
    leave_s: float = 0.0
    leaves: ExponentialBackoff = field(default_factory=lambda: ExponentialBackoff(FIRST_LEAVE_S, LONGEST_LEAVE_S))
    left_out_until: float = 0.0
    soonest: float = 0.0
    tried: bool = False
    why: str = ""

    @property
    def on_parole(self) -> bool:
        return self.leave_s > 0


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """What wiring knows of one replica: its key and its moving average, both in seconds, and whether it is on
    parole."""

    busy_s: float
    average_s: float | None
    on_parole: bool = False


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
        """The replicas of a stage, those on parole included."""
        return tuple(self._stages[stage])

    def add(self, stage: int, peer: PeerId) -> None:
        """A replica appeared. It starts level with the least busy one, so that it is not flooded."""
        known = self._stages[stage]
        if peer not in known:
            known[peer] = _Replica(key=self._lowest(stage))

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

    def choose(self, stage: int, exclude: Collection[PeerId] = (), *, now: float = 0.0) -> tuple[PeerId, str]:
        """(replica, reason) for the next hop at a stage. O(replicas).

        Where all who may be chosen are left out, the one that may come back first is tried as soon as it was left alone
        for FIRST_LEAVE_S. Raises Refused when nobody may be chosen now.
        """
        candidates = {peer: replica for peer, replica in self._stages[stage].items() if peer not in exclude}
        free = {peer: replica for peer, replica in candidates.items() if replica.left_out_until <= now}
        if not free and candidates:
            first = min(candidates, key=lambda peer: (candidates[peer].left_out_until, peer))
            free = {first: candidates[first]} if candidates[first].soonest <= now else {}
        if not free:
            raise Refused(f"stage {stage} has no replica left to choose")
        lowest = min(replica.key for replica in free.values())
        for peer in exclude:  # what it is left out of is not owed to it: it would be flooded when it is back
            if (left_out := self._stages[stage].get(peer)) is not None:
                left_out.key = max(left_out.key, lowest)
        chosen = self._rng.choice([peer for peer, replica in free.items() if replica.key == lowest])
        replica = free[chosen]
        expected = self._expected(stage, replica)
        replica.key += expected
        if replica.on_parole:  # one microbatch; if nothing is heard of it, the next after as long a time
            replica.left_out_until, replica.soonest = now + replica.leave_s, now + FIRST_LEAVE_S
            replica.tried = True
            return chosen, f"tried again after {replica.leave_s:g} s"
        return chosen, f"least busy of {len(free)}: {lowest:.3f} s so far, {expected:.3f} s a hop"

    def observe(self, stage: int, peer: PeerId, seconds: float) -> None:
        """A hop took this long to compute. Ends the parole of whoever was on it.

        Not what it waited: a queue is what trainers sent there, and is gone before a choice made by it takes effect.
        With it, equal replicas got shares of a step that differed by a quarter."""
        replica = self._stages[stage].get(peer)
        if replica is not None:
            self._take(stage, replica, seconds)

    def claimed(
        self, stage: int, peer: PeerId, seconds: float, work: str, turn: tuple[float, float] | None = None
    ) -> float:
        """Take a replica's claim that this piece of ``work``, a direction, took it so many seconds; ``turn`` is from
        when to when it was its turn here, None where that is not known. Returns what is believed of it, in seconds:
        mostly what it says."""
        replica = self._stages[stage].get(peer)
        if replica is None:
            return seconds
        self._take(stage, replica, seconds)
        replica.claims[work] = self._moved(replica.claims.get(work), seconds)
        if turn is not None:  # what it has at once it does one after the other
            began, now = turn
            replica.own_s = self._moved(replica.own_s, now - max(began, replica.heard))
            replica.heard = now
        return max(seconds, self._least(stage, replica))

    def _take(self, stage: int, replica: _Replica, seconds: float) -> None:
        if replica.on_parole:  # what it was left out of is not owed to it
            replica.leave_s = replica.left_out_until = replica.soonest = 0.0
            replica.tried = False
            replica.leaves.restart()
            replica.key = max(replica.key, self._lowest(stage))
        replica.average_s = self._moved(replica.average_s, seconds)

    def _moved(self, old: float | None, new: float) -> float:
        return new if old is None else self._gamma * new + (1 - self._gamma) * old

    def fail(self, stage: int, peer: PeerId, *, now: float, reason: str = "") -> float:
        """A hop failed there, or was not done in time: leave the replica out. Returns for how many seconds; 0 for one
        that is not known. What fails before it was tried again is the same failure. ``reason`` is for people."""
        replica = self._stages[stage].get(peer)
        if replica is None:
            return 0.0
        if replica.on_parole and not replica.tried:
            return replica.leave_s
        replica.leave_s, replica.why = replica.leaves.pause_s(), reason
        replica.left_out_until, replica.soonest, replica.tried = now + replica.leave_s, now + FIRST_LEAVE_S, False
        return replica.leave_s

    def typical_seconds(self, stage: int) -> float:
        """Median of the replicas' averages; a first guess before anything was measured."""
        measured = [replica.average_s for replica in self._stages[stage].values() if replica.average_s is not None]
        return median(measured) if measured else FIRST_GUESS_S

    def on_parole(self, *, now: float) -> tuple[Parole, ...]:
        """Those that are left out, or tried with one microbatch at a time, and why."""
        return tuple(
            Parole(peer=peer, left_s=max(0.0, replica.left_out_until - now), reason=replica.why)
            for stage in self._stages
            for peer, replica in stage.items()
            if replica.on_parole
        )

    def statistics(self) -> list[dict[PeerId, ReplicaStatistics]]:
        """Per stage and replica, as it is now."""
        return [
            {
                peer: ReplicaStatistics(replica.key, replica.average_s, replica.on_parole)
                for peer, replica in stage.items()
            }
            for stage in self._stages
        ]

    def _lowest(self, stage: int) -> float:
        keys = [replica.key for replica in self._stages[stage].values() if not replica.on_parole]
        return min(keys, default=0.0)

    def _expected(self, stage: int, replica: _Replica) -> float:
        if replica.average_s is None:
            return self.typical_seconds(stage)
        return max(replica.average_s, self._least(stage, replica))

    def _least(self, stage: int, replica: _Replica) -> float:
        """Return the seconds believed at least of one that boasts; 0 for others. Our own clock counts latency
        and others' work, too, but for all replicas alike: how they compare is what it tells."""
        others = [one for one in self._stages[stage].values() if one is not replica and one.claims]
        told = {work: [one.claims[work] for one in others if work in one.claims] for work in replica.claims}
        if not any(said and median(said) > BOAST * replica.claims[work] for work, said in told.items()):
            return 0.0
        typical = median(one.average_s or 0.0 for one in others)
        seen = [one.own_s for one in others if one.own_s is not None]
        if replica.own_s is None or not seen or not (usual := median(seen)):
            return typical / BOAST
        return typical * min(1 / BOAST, replica.own_s / usual)
