"""How many journeys a trainer keeps in flight: enough to keep the slowest stage busy, no more. Pure.

By Little's law a trainer's part of the rate of the stage that serves least, times the round trip of a journey, is what
must be under way; and some more wait at the replicas, since journeys do not arrive evenly.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from swarm.ids import PeerId
from swarm.pipeline.wiring import Wiring
from swarm.planning.costs import MIN_IN_FLIGHT, MOST_IN_FLIGHT

WAITING, MOST_WAITING = 3.0, 6.0
"""Journeys that wait at a busy replica, on average, for each that it computes: with none to spare every third of a
replica's seconds is idle. Where replicas are unlike more have to, as many times as the slowest takes longer than the
middle one, since three made .964 of what 50 mixes can do and six .986 (benchmark ``mixes`` at df58d3c1); where they are
alike six only mean more to do again for each that dies (``goodput`` at 1ca82292, with 5 % of
churn: .864, and .872 with three)."""

FAST = 3.0
"""Journeys more for each that comes home, before any turns were late: with one only the first step of a short run was
mostly spent growing."""


def journeys_in_flight(
    round_trip_s: float | None,
    stage_s: Mapping[int, float],
    rates: Sequence[float],
    trainers: int,
    *,
    most: int = MOST_IN_FLIGHT,
    unlike: float = 1.0,
) -> tuple[int, str]:
    """Decide how many journeys to have under way.

    Args:
        round_trip_s: Median seconds of a whole journey *without* queueing; None while unknown.
        stage_s: By stage the seconds that a microbatch is computed, forward and backward together.
        rates: Microbatches a second of each stage, all its replicas together.
        trainers: How many share them.
        unlike: See :meth:`~swarm.pipeline.wiring.Wiring.unlike`.
        most: See :func:`~swarm.planning.costs.most_in_flight`.

    Returns:
        (journeys, reason), between MIN_IN_FLIGHT and ``most``.
    """
    if round_trip_s is None or not stage_s or not rates:
        return min(most, MIN_IN_FLIGHT * 2), "nothing measured yet"
    slowest = min(range(len(rates)), key=lambda stage: rates[stage])
    rate = rates[slowest] / max(trainers, 1)
    waiting_s = min(MOST_WAITING, WAITING * unlike) * sum(stage_s.values())
    wanted = (round_trip_s + waiting_s) * rate
    bounded = min(most, max(MIN_IN_FLIGHT, math.ceil(min(wanted, most)) + 1))
    return bounded, f"stage {slowest} serves {rate:.1f} microbatches/s for a round trip of {round_trip_s:.3f} s"


class CongestionWindow:
    """How many journeys links and queues have carried so far without a turn being late: FAST more with each that comes
    home where no more were under way for its sake (RFC 7661), and half as many once turns of two replicas were late,
    from then on one more with each windowful (as TCP, RFC 5681). One replica alone that is late says something of
    itself. Pure; memory is a number per late replica.

    Before it there was no bound while a link filled: a trainer measured its own queues as a longer way, and put more
    under way for it, until no turn ended in time and each was sent again (50 Mb/s and 8 MB: no step closed)."""

    def __init__(self) -> None:
        self.size = 2.0 * MIN_IN_FLIGHT
        self._grows_fast_to, self._cut = math.inf, -math.inf
        self._late: set[PeerId] = set()

    def came_home(self) -> None:
        """A journey did."""
        self.size += FAST if self.size < self._grows_fast_to else 1.0 / self.size

    def late(self, peer: PeerId, since: float, now: float, *, alone: bool = False) -> None:
        """A replica's turn, which began at ``since``, has passed. What was under way when it was halved last says
        nothing more. ``alone``: its stage has no other replica."""
        if since < self._cut:
            return
        self._late.add(peer)
        if len(self._late) > 1 or alone:
            self._late.clear()
            self._cut = now
            self.size = self._grows_fast_to = max(float(MIN_IN_FLIGHT), self.size / 2)


class InFlight:
    """How many journeys one trainer keeps in flight: ``fixed``, where that is given, else what its own lately tell, and
    what its ``wiring`` knows of the replicas, up to ``most`` and to what its ``window`` has seen carried."""

    def __init__(self, wiring: Wiring, trainers: int, *, most: int = MOST_IN_FLIGHT, fixed: int | None = None) -> None:
        self._wiring, self._most, self._fixed = wiring, most, fixed
        self._round_trips: deque[float] = deque(maxlen=32)
        self._compute_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=32))
        self._trainers = trainers
        self._rates: list[float] | None = None
        self._unlike = 1.0
        self._window = CongestionWindow()

    def follow(self, trainers: int) -> None:
        """There are so many trainers from now on, and maybe other replicas."""
        self._trainers, self._rates = trainers, None

    def observe(self, round_trip_s: float, compute_s: Mapping[int, float]) -> None:
        """A journey took so long, without queueing, and each stage so long for forward and backward."""
        self._rates = None
        if self.limit() >= math.floor(self._window.size):
            self._window.came_home()
        self._round_trips.append(max(0.0, round_trip_s))
        for stage, seconds in compute_s.items():
            self._compute_s[stage].append(seconds)

    def late(self, peer: PeerId, since: float, now: float) -> None:
        """A replica's turn, which began at ``since``, has passed."""
        self._window.late(peer, since, now, alone=self._wiring.is_alone(peer))

    def begins(self, target: int, begun: int) -> None:
        """The ``begun``-th of this trainer's microbatches of a step of ``target`` sets out: have the wiring know how
        much of the step is left, when all trainers have equal shares."""
        rate = min(self._known_rates(), default=0.0) / max(self._trainers, 1)
        left = max(0.0, target / max(self._trainers, 1) - begun) + min(begun, self.limit())
        self._wiring.hurry(left / rate if self._round_trips and rate else math.inf)

    def _known_rates(self) -> list[float]:
        """Looked up once for each journey that comes home: O(replicas)."""
        if self._rates is None:
            self._rates, self._unlike = self._wiring.rates(), self._wiring.unlike()
        return self._rates

    def limit(self) -> int:
        """See :func:`journeys_in_flight`. O(replicas)."""
        if self._fixed is not None:
            return self._fixed
        most = min(self._most, math.floor(self._window.size))
        if not self._round_trips:
            return min(most, MIN_IN_FLIGHT * 2)
        stage_s = {stage: median(recent) for stage, recent in self._compute_s.items()}
        round_trip_s, rates = median(self._round_trips), self._known_rates()
        return journeys_in_flight(round_trip_s, stage_s, rates, self._trainers, most=most, unlike=self._unlike)[0]


# --- what is fed early ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """How much of a step may be fed early: ``share`` of its ``target`` microbatches, in equal shares of all trainers;
    nothing after the ``last`` step. ``exact``: neither more nor less of a trainer's microbatches are early, whenever
    they begin, so that timing changes nothing that is computed."""

    share: float = 0.0
    target: int = 0
    last: int = 0
    exact: bool = False

    def quota(self, step: int, trainers: int) -> int:
        """Return how many microbatches of a step each of so many trainers may feed early."""
        return math.floor(self.share * self.target / max(1, trainers)) if step <= self.last else 0


NOTHING_EARLY = EarlyRules()
