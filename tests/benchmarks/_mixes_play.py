"""A pipeline of unlike replicas over unlike links, in virtual time: one heap, with the product's wiring and flight
control, and nothing else of a swarm.

What is drawn follows the question: does a trainer that knows only what replicas tell it keep all of them busy?
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

REGIONS = 3
FASTEST = 10.0
FORWARD_S, BACKWARDS = 0.2, 2.0
"""Of the slowest replica; and forwards in a backward."""
MBIT_PER_S = (100, 200, 500, 1_000)
TRAINER_BYTES_PER_S = 1.25e9
BOUNDARY_BYTES = (250_000, 1_000_000)
NEAR_S, FAR_S = 0.003, (0.02, 0.15)
JITTER = 0.1
"""What a piece of work takes varies by as much either way."""


@dataclass(frozen=True, slots=True)
class MixHost:
    """One replica: seconds of a forward, where it is, and bytes a second of its link, each way."""

    stage: int
    forward_s: float
    region: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Mix:
    """One swarm. ``latency_s`` is from region to region; ``trainers`` are where they are."""

    seed: int
    boundary_bytes: int
    latency_s: tuple[tuple[float, ...], ...]
    hosts: tuple[MixHost, ...]
    trainers: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max(host.stage for host in self.hosts)

    def rate(self, host: MixHost) -> float:
        """Return the microbatches a second of one: it computes, and sends an activation and a gradient."""
        return _rate(host.forward_s, host.bytes_per_s, self.boundary_bytes)

    @property
    def bound(self) -> float:
        """Microbatches a second of the slowest stage when none of its replicas ever waits."""
        return min(
            math.fsum(self.rate(host) for host in self.hosts if host.stage == stage) for stage in range(self.stages)
        )


def drawn(seed: int) -> Mix:
    """Draw 2 to 6 stages of 3 to 8 replicas on average, 1 to 10 times as fast as the slowest, on links of 100 to 1,000
    Mbit/s, and 2 to 4 trainers, over three regions. Who is strongest goes first to the stage that has least."""
    rng = random.Random(f"mix|{seed}")
    stages = rng.randint(2, 6)
    size, trainers = rng.choice(BOUNDARY_BYTES), rng.randint(2, 4)
    latency = [[NEAR_S] * REGIONS for _ in range(REGIONS)]
    for one, other in itertools.combinations(range(REGIONS), 2):
        latency[one][other] = latency[other][one] = rng.uniform(*FAR_S)
    found = [
        (FORWARD_S / FASTEST ** rng.random(), rng.randrange(REGIONS), rng.choice(MBIT_PER_S) * 125_000.0)
        for _ in range(stages * rng.randint(3, 8))
    ]
    capacity, hosts = [0.0] * stages, []
    for forward_s, region, bytes_per_s in sorted(found, key=lambda one: -_rate(one[0], one[2], size)):
        stage = min(range(stages), key=lambda stage: capacity[stage])
        capacity[stage] += _rate(forward_s, bytes_per_s, size)
        hosts.append(MixHost(stage, forward_s, region, bytes_per_s))
    where = tuple(rng.randrange(REGIONS) for _ in range(trainers))
    return Mix(seed, size, tuple(map(tuple, latency)), tuple(hosts), where)


def _rate(forward_s: float, bytes_per_s: float, size: int) -> float:
    return min(1 / (forward_s * (1 + BACKWARDS)), bytes_per_s / (2 * size))


@dataclass(slots=True, kw_only=True)
class _Machine:
    """Where it is, and until when its link is taken each way."""

    region: int
    bytes_per_s: float
    sends_until: float = 0.0
    receives_until: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Host(_Machine):
    name: str
    stage: int
    forward_s: float
    busy: bool = False
    waiting: list[tuple[int, int, float, _Trip]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Feeder(_Machine):
    wiring: Any
    flight: Any
    under_way: int = 0


@dataclass(slots=True)
class _Trip:
    """One microbatch: the way it takes, when it began, when its trainer saw the turn of the replica that has it
    begin, and how long it waited at replicas."""

    feeder: _Feeder
    number: int
    route: Sequence[_Host]
    began: float
    turn: float
    waited: float = 0.0
    computed: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, slots=True)
class MixFigures:
    """Microbatches a second over the bound; the share of hops between regions; journeys under way on average, of all
    trainers."""

    share: float
    far: float
    under_way: float


class MixPlay:
    """Plays one mix: trainers that always have a microbatch to begin, from an empty pipeline on."""

    def __init__(self, mix: Mix) -> None:
        from swarm.ids import PeerId
        from swarm.pipeline.retention import RETENTION_BYTES
        from swarm.pipeline.trainer.flight import InFlight
        from swarm.pipeline.wiring import Wiring
        from swarm.planning.costs import most_in_flight
        from swarm.step.boundary_codecs import FILLED_SHARE

        self._mix, self._rng = mix, random.Random(f"play|{mix.seed}")
        self._now, self._numbers = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._hosts = {
            f"{number:03}": _Host(
                name=f"{number:03}",
                stage=host.stage,
                forward_s=host.forward_s,
                region=host.region,
                bytes_per_s=host.bytes_per_s,
            )
            for number, host in enumerate(mix.hosts)
        }
        stages = [[PeerId(one.name) for one in self._hosts.values() if one.stage == s] for s in range(mix.stages)]
        carried = 2 * mix.boundary_bytes / FILLED_SHARE
        links = {PeerId(one.name): carried / one.bytes_per_s for one in self._hosts.values()}
        most = most_in_flight(2 * mix.boundary_bytes, RETENTION_BYTES)
        self._feeders = []
        for number, region in enumerate(mix.trainers):
            wiring = Wiring(stages, seed=mix.seed * 10 + number)
            wiring.know_links(links)
            flight = InFlight(wiring, len(mix.trainers), most=most)
            self._feeders.append(_Feeder(region=region, bytes_per_s=TRAINER_BYTES_PER_S, wiring=wiring, flight=flight))
        self._ended: list[_Trip] = []

    def run(self, *, until_s: float, from_s: float) -> MixFigures:
        """Play so many virtual seconds, of which those after ``from_s`` count. Cost: some 20 microseconds an event."""
        for feeder in self._feeders:
            self._feed(feeder)
        counted, under_way, hops, far = 0, 0, 0, 0
        while self._events and self._events[0][0] < until_s:
            self._now, _, happens = heapq.heappop(self._events)
            happens()
            for trip in self._ended:
                if self._now > from_s:
                    counted += 1
                    under_way += sum(feeder.under_way for feeder in self._feeders)
                    way = (trip.feeder, *trip.route, trip.feeder)
                    far += sum(one.region != other.region for one, other in itertools.pairwise(way))
                    hops += len(way) - 1
            self._ended.clear()
        rate = counted / (until_s - from_s)
        return MixFigures(rate / self._mix.bound, far / max(1, hops), under_way / max(1, counted))

    # --- trainers ----------------------------------------------------------------------------------------------------

    def _feed(self, feeder: _Feeder) -> None:
        while feeder.under_way < feeder.flight.limit():
            route = [self._hosts[feeder.wiring.choose(stage)[0]] for stage in range(self._mix.stages)]
            trip = _Trip(feeder, next(self._numbers), route, self._now, self._now)
            feeder.under_way += 1
            self._send(feeder, route[0], lambda trip=trip: self._arrived(trip, 0, backward=False))  # type: ignore[misc]

    def _home(self, trip: _Trip) -> None:
        feeder = trip.feeder
        feeder.under_way -= 1
        feeder.flight.observe(self._now - trip.began - trip.waited, trip.computed)
        self._ended.append(trip)
        self._feed(feeder)

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _arrived(self, trip: _Trip, stage: int, *, backward: bool) -> None:
        host = trip.route[stage]
        heapq.heappush(host.waiting, (not backward, trip.number, self._now, trip))
        if not host.busy:
            self._work(host)

    def _work(self, host: _Host) -> None:
        if not host.waiting:
            return
        forward, _, since, trip = heapq.heappop(host.waiting)
        host.busy = True
        trip.waited += self._now - since
        seconds = host.forward_s * (1.0 if forward else BACKWARDS) * (1 + JITTER * self._rng.uniform(-1, 1))
        self._at(self._now + seconds, lambda: self._worked(host, trip, seconds, forward=bool(forward)))

    def _worked(self, host: _Host, trip: _Trip, seconds: float, *, forward: bool) -> None:
        host.busy = False
        trip.computed[host.stage] += seconds
        told = self._now + self._mix.latency_s[host.region][trip.feeder.region]
        self._at(told, lambda: self._reported(host, trip, seconds, forward=forward))
        onwards = host.stage + (1 if forward else -1)
        if 0 <= onwards < self._mix.stages:
            self._send(host, trip.route[onwards], lambda: self._arrived(trip, onwards, backward=not forward))
        elif forward:  # the trainer has the head, which takes it no time, and sends the gradient back
            back = host.stage
            self._send(
                host,
                trip.feeder,
                lambda: self._send(trip.feeder, host, lambda: self._arrived(trip, back, backward=True)),
            )
        else:
            self._send(host, trip.feeder, lambda: self._home(trip))
        self._work(host)

    def _reported(self, host: _Host, trip: _Trip, seconds: float, *, forward: bool) -> None:
        turn, trip.turn = (trip.turn, self._now), self._now
        trip.feeder.wiring.claimed(host.stage, host.name, seconds, "forward" if forward else "backward", turn)

    # --- links -------------------------------------------------------------------------------------------------------

    def _send(self, sender: _Machine, receiver: _Machine, then: Callable[[], None]) -> None:
        """A payload goes out when those before it have, and comes in as its bytes arrive, after those before it."""
        size = self._mix.boundary_bytes
        sender.sends_until = max(self._now, sender.sends_until) + size / sender.bytes_per_s

        def arrive() -> None:
            takes = size / receiver.bytes_per_s
            receiver.receives_until = max(self._now, receiver.receives_until + takes)
            self._at(receiver.receives_until, then)

        self._at(sender.sends_until + self._mix.latency_s[sender.region][receiver.region], arrive)

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happens))
