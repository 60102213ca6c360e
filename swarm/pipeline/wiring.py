"""Stochastic wiring: which replica takes the next hop (SWARM, arXiv 2301.11913, appendix C).

Interleaved weighted round-robin: every replica has a key, the cumulative time this trainer expects to have kept it
busy; the smallest key is chosen and grows by the seconds of a microbatch there. So a replica twice as fast is chosen
twice as often, and one that slows down is chosen less from the next hop on. Pure but for the seeded tie-break.

A microbatch takes a replica the longer of two: computing it, forward and backward together, and carrying what it
brings over the replica's link. How long it computes the replica says itself: only it can tell its work from what it
waited, and from the links. One that claims far less than the others is believed as far as this trainer's own clock says
so, too. What its link takes the close record tells all alike.

A replica that failed is left out for a while, twice as long each time, and then tried with one microbatch: success
ends its probation. ``now`` is monotonic seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.pipeline.activity import Probation
from swarm.waiting import LATER_S, ExponentialBackoff

FIRST_GUESS_S = 1e-3
"""Expected seconds of a replica that was never measured, when no other replica of its stage was either: small enough
that every replica is tried once before the first measurement decides anything."""

OVERCLAIM = 1.5
"""Who claims to compute so many times faster than most others of its stage has to be seen to: it gets as many times the
work at most that our own clock says, which is theirs until it was seen. (A claim of 1 ns got 98 % of a stage's work.)
To the clock alone nobody is held: it counts links and others' work, and honest replicas of 50 mixes lost .06."""

FIRST_LEAVE_S = 1.0
LONGEST_LEAVE_S = 60.0
LEAVES_FOR = 8.0
"""Who is waited for longer than LATER_S, in vain, is left out for so many times as long at least: so trying it again
takes a small share of the time, however long that is."""

BUSY_TIMES, BUSY_S = 8, 5.0
"""Who is busy, or refuses, so many times running, for longer than this and than so many microbatches take, while
another replica of its stage does what it is asked, takes part in name only."""

STRAGGLES = 2.0

LEAST_S = 1e-6
"""No microbatch is believed to take less."""


@dataclass(slots=True)
class _Replica:
    """``claims`` are averages of what it said, by direction: one of both would jump as 1 : 2 with every piece.
    ``believed_s`` is what was believed last of a whole microbatch. ``own_s`` is what went by here, a piece of work,
    while it had some of ours; ``heard`` is when it said so last. It turned so many microbatches ``away`` since
    ``away_since``, and has done nothing meanwhile."""

    key: float = 0.0
    claims: dict[str, float] = field(default_factory=dict)
    believed_s: float | None = None
    own_s: float | None = None
    heard: float = -math.inf
    away: int = 0
    away_since: float = math.inf
    leave_s: float = 0.0
    leaves: ExponentialBackoff = field(default_factory=lambda: ExponentialBackoff(FIRST_LEAVE_S, LONGEST_LEAVE_S))
    left_out_until: float = 0.0
    soonest: float = 0.0
    tried: bool = False
    faulty: bool = False
    why: str = ""

    @property
    def on_probation(self) -> bool:
        return self.leave_s > 0


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """What wiring knows of one replica: its key and what it computes a microbatch for, both in seconds, and whether it
    is on probation."""

    busy_s: float
    average_s: float | None
    on_probation: bool = False


class Wiring:
    """One trainer's choice of replicas. ``gamma`` is the weight of the newest measurement in the moving average."""

    def __init__(self, stages: Sequence[Sequence[PeerId]], *, seed: int, gamma: float = 0.2) -> None:
        self._gamma = gamma
        self._rng = random.Random(seed)
        self._links: Mapping[PeerId, float] = {}
        self._variants: Mapping[PeerId, tuple[int, int]] = {}
        self._left_s, self._slowest_s = math.inf, 0.0
        self._stages: list[dict[PeerId, _Replica]] = [{} for _ in stages]
        for stage, peers in enumerate(stages):
            for peer in peers:
                self.add(stage, peer)

    def replicas(self, stage: int, choice: int | None = None) -> tuple[PeerId, ...]:
        """The replicas of a stage, those on probation included; with a ``choice`` those of the variant that it leads
        to."""
        return tuple(peer for peer in self._stages[stage] if choice is None or self._takes(peer, choice))

    def is_alone(self, peer: PeerId) -> bool:
        """Return whether the stage of a replica has no other."""
        return any(replicas.keys() == {peer} for replicas in self._stages)

    def _takes(self, peer: PeerId, choice: int) -> bool:
        variant, of = self._variants.get(peer, (0, 1))
        return choice % of == variant

    def has_way(self, out: Collection[PeerId], choice: int) -> bool:
        """Return whether every stage has a replica for a choice that is not ``out``."""
        return all(set(self.replicas(stage, choice)).difference(out) for stage in range(len(self._stages)))

    def add(self, stage: int, peer: PeerId) -> None:
        """A replica appeared. It starts level with the least busy one, so that it is not flooded."""
        known = self._stages[stage]
        if peer not in known:
            known[peer] = _Replica(key=self._lowest(stage, peer))

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
        believed = (one.believed_s for replicas in self._stages for one in replicas.values())
        self._slowest_s = max((*filter(None, believed), *self._links.values()), default=0.0)

    def know_variants(self, variants: Mapping[PeerId, tuple[int, int]]) -> None:
        """These replicas hold one variant of so many from now on. All of a stage do the same work, so that what one is
        measured with says something of the others; but a microbatch passes one variant's."""
        for known in self._stages:
            for peer in [peer for peer in known if self._variants.get(peer) != variants.get(peer)]:
                del known[peer]
        self._variants = variants

    def know_links(self, seconds: Mapping[PeerId, float]) -> None:
        """A microbatch keeps these replicas' links busy for so long from now on; those of others are not known, and
        taken to be fast enough."""
        self._links = seconds
        self._slowest_s = max(self._slowest_s, *seconds.values(), 0.0)

    def hurry(self, left_s: float) -> None:
        """A step has so many seconds of work left. Who takes STRAGGLES times as long for a microbatch as is usual at
        its stage, and could not be done with two by then, gets none of it: all others would wait for the last one."""
        self._left_s = left_s

    def choose(
        self, stage: int, exclude: Collection[PeerId] = (), *, now: float = 0.0, choice: int = 0
    ) -> tuple[PeerId, str]:
        """(replica, reason) for the next hop at a stage, of the variant that a ``choice`` leads to. O(replicas).

        Where all who may be chosen are left out, the one that may come back first is tried as soon as it was left alone
        for FIRST_LEAVE_S. Raises Refused when nobody may be chosen now.
        """
        there = self.replicas(stage, choice)
        candidates = {peer: self._stages[stage][peer] for peer in there if peer not in exclude}
        free = {peer: replica for peer, replica in candidates.items() if replica.left_out_until <= now}
        if not free and candidates:
            first = min(candidates, key=lambda peer: (candidates[peer].left_out_until, peer))
            free = {first: candidates[first]} if candidates[first].soonest <= now else {}
        if not free:
            raise Refused(f"stage {stage} has no replica left to choose")
        quick = self._without_stragglers(stage, free)
        lowest = min(replica.key for replica in quick.values())
        # What one is left out of is not owed to it: it would be flooded when it is back.
        for peer in ({*exclude, *free} - quick.keys()).intersection(there):
            left_out = self._stages[stage][peer]
            left_out.key = max(left_out.key, lowest)
        chosen = self._rng.choice([peer for peer, replica in quick.items() if replica.key == lowest])
        replica = quick[chosen]
        expected = self._expected(stage, chosen, replica)
        replica.key += expected
        if replica.on_probation:  # one microbatch; if nothing is heard of it, the next after as long a time
            replica.left_out_until, replica.soonest = now + replica.leave_s, now + FIRST_LEAVE_S
            replica.tried = True
            return chosen, f"tried again after {replica.leave_s:g} s"
        return chosen, f"least busy of {len(free)}: {lowest:.3f} s so far, {expected:.3f} s each"

    def _without_stragglers(self, stage: int, free: dict[PeerId, _Replica]) -> dict[PeerId, _Replica]:
        if 2 * self._slowest_s <= self._left_s or len(free) < 2:
            return free
        typical_s = self.typical_seconds(stage)
        seconds = {
            peer: max(replica.believed_s or typical_s, self._links.get(peer, 0.0)) for peer, replica in free.items()
        }
        usual_s = median_low(seconds.values())
        return {
            peer: replica
            for peer, replica in free.items()
            if seconds[peer] <= STRAGGLES * usual_s or 2 * seconds[peer] <= self._left_s
        }

    def claimed(
        self, stage: int, peer: PeerId, seconds: float, work: str, turn: tuple[float, float] | None = None
    ) -> float:
        """Take a replica's claim that it computed this piece of ``work``, a direction, for so many seconds. Not what
        the piece waited: a queue is what trainers sent there, and is gone before a choice made by
        it takes effect. With it, equal replicas got shares of a step that differed by a quarter.

        ``turn`` is from when to when it was its turn here, None where that is not known. Returns what is believed of
        it, in seconds: mostly what it says.
        """
        replica = self._stages[stage].get(peer)
        if replica is None:
            return seconds
        replica.away = 0
        replica.claims[work] = self._moved(replica.claims.get(work), seconds)
        if turn is not None:  # what it has at once it does one after the other
            began, now = turn
            replica.own_s = self._moved(replica.own_s, now - max(began, replica.heard))
            replica.heard = now
        least = self._least(stage, replica)
        replica.believed_s = max(self._computes(stage, replica), least)
        self._slowest_s = max(self._slowest_s, replica.believed_s)
        return max(seconds, least * self._share(stage, (work,)))

    def in_time(self, stage: int, peer: PeerId) -> None:
        """A replica did a hop while it was its turn, which ends its probation. Who answers late, time after time, is
        tried with one microbatch after longer and longer leaves."""
        replica = self._stages[stage].get(peer)
        if replica is None or (replica.faulty and not replica.tried):
            return
        if replica.on_probation:  # what it was left out of is not owed to it
            replica.leave_s = replica.left_out_until = replica.soonest = 0.0
            replica.tried = False
            if not replica.faulty:
                replica.leaves.restart()
            replica.key = max(replica.key, self._lowest(stage, peer))

    def turned_away(self, stage: int, peer: PeerId, *, now: float, verb: str = "busy") -> None:
        """It had no room for a hop, or refused it, which is no fault. Who does nothing else is left out like one that
        failed. ``verb`` says what it did, for people."""
        replica = self._stages[stage].get(peer)
        if replica is None:
            return
        replica.away_since = replica.away_since if replica.away else now
        replica.away += 1
        others = (other.heard for other in self._stages[stage].values() if other is not replica)
        away_s, least_s = now - replica.away_since, max(BUSY_S, BUSY_TIMES * self.typical_seconds(stage))
        if replica.away >= BUSY_TIMES and away_s >= least_s and max(others, default=-math.inf) > replica.away_since:
            why = f"{verb} each of the last {replica.away} times that it was asked, for {away_s:.0f} s"
            self.fail(stage, peer, now=now, reason=why)

    def _moved(self, old: float | None, new: float) -> float:
        return new if old is None else self._gamma * new + (1 - self._gamma) * old

    def fail(
        self, stage: int, peer: PeerId, *, now: float, reason: str = "", faulty: bool = False, waited_s: float = 0.0
    ) -> float:
        """A hop failed there, or was not done in the ``waited_s`` that it had: leave the replica out. Returns for how
        many seconds; 0 for one that is not known. What fails before it was tried again is the same failure. ``reason``
        is for people. Who was ever ``faulty``, and not only late, is left out for longer each time, whatever it does in
        time between."""
        replica = self._stages[stage].get(peer)
        if replica is None:
            return 0.0
        replica.faulty = replica.faulty or faulty
        if replica.on_probation and not replica.tried:
            return replica.leave_s
        replica.leave_s, replica.why = replica.leaves.pause_s(), reason
        if waited_s > LATER_S:
            replica.leave_s = max(replica.leave_s, LEAVES_FOR * waited_s)
        replica.left_out_until, replica.soonest, replica.tried = now + replica.leave_s, now + FIRST_LEAVE_S, False
        return replica.leave_s

    def typical_seconds(self, stage: int) -> float:
        """Return the median of what the replicas compute a microbatch for; a first guess before any has told."""
        told = [self._computes(stage, replica) for replica in self._stages[stage].values() if replica.claims]
        return median(told) if told else FIRST_GUESS_S

    def rates(self) -> list[float]:
        """Return the microbatches a second that each stage computes: all its replicas that are not on probation, those
        that were not measured yet being like the others. Links do not count: short payloads make far ones look thin,
        alike for a stage's replicas, and then too few journeys would be under way. O(replicas)."""
        found = []
        for replicas in self._stages:
            there = [replica for replica in replicas.values() if not replica.on_probation] or replicas.values()
            believed = [one.believed_s for one in there if one.believed_s is not None]
            usual = median(believed) if believed else FIRST_GUESS_S
            each = (usual if one.believed_s is None else one.believed_s for one in there)
            found.append(math.fsum(1 / max(seconds, LEAST_S) for seconds in each))
        return found

    def unlike(self) -> float:
        """Return how many times as long as the middle replica the slowest takes, at the stage where that is most; 1
        before two have told. O(replicas)."""
        told = ([one.believed_s for one in stage.values() if one.believed_s] for stage in self._stages)
        return max((max(stage) / median(stage) for stage in told if stage), default=1.0)

    def on_probation(self, *, now: float) -> tuple[Probation, ...]:
        """Those that are left out, or tried with one microbatch at a time, and why."""
        return tuple(
            Probation(peer=peer, left_s=max(0.0, replica.left_out_until - now), reason=replica.why)
            for stage in self._stages
            for peer, replica in stage.items()
            if replica.on_probation
        )

    def statistics(self) -> list[dict[PeerId, ReplicaStatistics]]:
        """Per stage and replica, as it is now."""
        return [
            {
                peer: ReplicaStatistics(
                    replica.key, self._computes(stage, replica) if replica.claims else None, replica.on_probation
                )
                for peer, replica in replicas.items()
            }
            for stage, replicas in enumerate(self._stages)
        ]

    def _lowest(self, stage: int, like: PeerId) -> float:
        variant, known = self._variants.get(like), self._stages[stage].items()
        keys = [one.key for peer, one in known if not one.on_probation and self._variants.get(peer) == variant]
        return min(keys, default=0.0)

    def _expected(self, stage: int, peer: PeerId, replica: _Replica) -> float:
        computes = self._computes(stage, replica) if replica.claims else self.typical_seconds(stage)
        return max(computes, self._least(stage, replica), self._links.get(peer, 0.0))

    def _computes(self, stage: int, replica: _Replica) -> float:
        """Return the seconds of a microbatch by what the replica told, both directions together."""
        return math.fsum(replica.claims.values()) / self._share(stage, replica.claims)

    def _share(self, stage: int, works: Collection[str]) -> float:
        """Return which part of a microbatch's seconds these directions take at a stage, by the replicas that told of
        more; 1 where none did. O(replicas)."""
        if len(works) > 1:
            return 1.0
        told = [one.claims for one in self._stages[stage].values() if len(one.claims) > 1]
        parts = [
            sum(claims.get(work, 0.0) for work in works) / whole for claims in told if (whole := sum(claims.values()))
        ]
        return median(parts) or 1.0 if parts else 1.0

    def _least(self, stage: int, replica: _Replica) -> float:
        """Return the least seconds of a microbatch for one that overclaims; 0 for others. Our own clock counts
        latency and others' work, too, but for all replicas alike: how they compare is what it tells."""
        others = [one for one in self._stages[stage].values() if one is not replica and one.claims]
        told = {work: [one.claims[work] for one in others if work in one.claims] for work in replica.claims}
        if not any(said and median(said) > OVERCLAIM * replica.claims[work] for work, said in told.items()):
            return 0.0
        typical = median(self._computes(stage, one) for one in others)
        seen = [one.own_s for one in others if one.own_s is not None]
        if replica.own_s is None or not seen or not (usual := median(seen)):
            return typical / OVERCLAIM
        return typical * min(1.0, replica.own_s / usual) / OVERCLAIM
