"""Predict what a step takes in one layout: memory of each peer, microbatches a second, seconds. Pure.

Read :func:`predict` first. A stage's replica computes while its link carries, so that a microbatch costs it whichever
takes longer; replicas add up, the slowest part sets the pace, and a step begins by filling the pipeline and ends with
an averaging and some round trips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm.planning.costs import GRAPH_SHARE, USUAL_IN_FLIGHT, graphs_under_way
from swarm.planning.workload import PartLayout, PartLoad, PartNeeds, PeerClass, Workload

BACKWARD = 3
"""Forward and backward over a forward (Kaplan et al., arXiv 2001.08361, §2.1); one more where it is computed again."""
HOP_S = 0.004
"""What a peer's own Python takes for a microbatch beside its kernels, forward and backward: the larger, the less."""
UPDATE_S = 5e-9
"""Of the optimizer and the digest, for each parameter of a part."""
CLOSING_ROUND_TRIPS = 5
"""From a step's last microbatch to its record, two of them averaging's own (benchmark ``wan``: round, norm, close)."""
PROCESS_BYTES = 400 << 20
"""Of a peer beside its tensors: torch, the network, its daemon."""
RETURN_S = 60.0
"""Until a peer that takes another's place is called in and begins to download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a part takes at one replica: bytes of training state, of so many ``graphs``, of payloads, and of copies for
    others; ``device`` is what of it lies on a device that is apart from the host."""

    state: float
    graphs: int
    graph_bytes: float
    payloads: float
    copies: float
    device: float

    @property
    def total(self) -> float:
        """Return all of it, the process included."""
        return self.state + self.graphs * self.graph_bytes + self.payloads + self.copies + PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PartForecast:
    """One part: what a replica holds, and how many of the run's microbatches a second all of them serve, of which
    ``load`` pass the part. ``rate`` counts for each replica the slower of computing and carrying; ``compute_rate`` and
    ``link_rate`` each alone."""

    name: str
    stage: int
    layers: int
    load: float
    needs: PartNeeds
    memory: MemoryNeed
    compute_rate: float
    link_rate: float
    rate: float
    averaging_s: float


@dataclass(frozen=True, slots=True)
class PaceLimit:
    """What could set the pace, and the microbatches a second that it allows."""

    name: str
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """A step in one layout. ``problems`` are what keeps it from being used, in words; ``limits`` what could set the
    pace, slowest first. ``chances``: for each part its rate, its replicas, and the chance that one of them is away."""

    layout: PartLayout
    parts: tuple[PartForecast, ...]
    limits: tuple[PaceLimit, ...]
    problems: tuple[str, ...]
    tokens: int
    microbatches: int
    rate: float
    journey_s: float
    filling_s: float
    feeding_s: float
    averaging_s: float
    update_s: float
    closing_s: float
    chances: tuple[tuple[float, int, float], ...]

    @property
    def step_s(self) -> float:
        """Return seconds from one record to the next, all peers there."""
        return self.filling_s + self.feeding_s + self.averaging_s + self.update_s + self.closing_s

    @property
    def tokens_s(self) -> float:
        """Return tokens a second, all peers there."""
        return self.tokens / self.step_s

    @property
    def available(self) -> float:
        """Return the share of the pace that is left on average while peers that left are replaced. Cost: milliseconds
        for parts of many replicas."""
        return expected_pace(self.chances)


def predict(work: Workload, classes: Sequence[PeerClass], layout: PartLayout) -> StepForecast:
    """Predict one layout. It need not be usable: see :attr:`StepForecast.problems`. Cost: some ten microseconds for
    each part and class of peers."""
    count = math.ceil(work.rows / layout.rows)
    step = _StepShape(work, tuple(classes), layout, count)
    parts = tuple(step.part(index) for index in range(len(layout.places)))
    journey_s = step.journey_s
    more = tuple(step.more_limits(journey_s))
    limits = sorted([*_limits(parts), *more], key=lambda limit: limit.rate)
    rate = max(1e-12, min([part.rate for part in parts] + [limit.rate for limit in more]))
    feeding_s = max(count / rate, *(step.busy_s(index) for index in range(len(parts))))
    update_s = UPDATE_S * max(part.needs.parameters for part in parts)
    round_trip_s = max((one.round_trip_s for one, used in zip(classes, step.used, strict=True) if used), default=0.0)
    return StepForecast(
        layout=layout,
        parts=parts,
        limits=tuple(limits),
        problems=tuple(step.problems(parts)),
        tokens=work.tokens,
        microbatches=count,
        rate=rate,
        journey_s=journey_s,
        filling_s=step.filling_s(parts),
        feeding_s=feeding_s,
        averaging_s=max(part.averaging_s for part in parts),
        update_s=update_s,
        closing_s=CLOSING_ROUND_TRIPS * round_trip_s,
        chances=step.chances(parts),
    )


def replica_seconds(
    work: Workload, needs: PartNeeds, one: PeerClass, crossing: float, *, rows: int, again: bool
) -> tuple[float, float]:
    """Return the seconds for which a microbatch keeps one replica of a part computing, and its link busy, over which
    ``crossing`` bytes come of each row, see :meth:`~swarm.planning.workload.Workload.crossing`."""
    operations = (BACKWARD + again) * needs.flops * rows * work.context
    return operations / one.flops + HOP_S, rows * crossing / one.slower_way


class _StepShape:
    """What is known of one layout before its pace."""

    def __init__(self, work: Workload, classes: tuple[PeerClass, ...], layout: PartLayout, count: int) -> None:
        self._work, self._classes, self._layout, self._count = work, classes, layout, count
        self._stages = len(layout.stages)
        self._parts = work.parts(self._stages)
        self._needs = [work.part(self._stages, one.stage, layers_of(layout, one)) for one in self._parts]
        self._seconds = [
            [self._of_class(at, one) if placed else (0.0, 0.0) for one, placed in zip(classes, here, strict=True)]
            for at, here in enumerate(layout.places)
        ]
        self.used = [sum(column) for column in zip(*layout.places, strict=True)]

    def _of_class(self, at: int, one: PeerClass) -> tuple[float, float]:
        stage = self._parts[at].stage
        again, crossing = self._layout.recompute and stage < self._stages, self._work.crossing(self._stages, stage)
        return replica_seconds(self._work, self._needs[at], one, crossing, rows=self._layout.rows, again=again)

    def part(self, at: int) -> PartForecast:
        """Forecast one part."""
        here, replicas = self._layout.places[at], sum(self._layout.places[at])
        placed = [(number, *self._seconds[at][kind]) for kind, number in enumerate(here) if number]
        slowest = min((self._classes[kind].slower_way for kind, number in enumerate(here) if number), default=1.0)
        crossing, part = 2 * self._work.averaged_bytes * self._needs[at].parameters, self._parts[at]
        return PartForecast(
            name=part.name,
            stage=part.stage,
            layers=layers_of(self._layout, part),
            load=part.load,
            needs=self._needs[at],
            memory=part_memory(self._work, self._layout, at),
            compute_rate=sum(number / compute for number, compute, _ in placed) / part.load,
            link_rate=sum(number / max(link, 1e-12) for number, _, link in placed) / part.load,
            rate=sum(number / max(compute, link) for number, compute, link in placed) / part.load,
            averaging_s=crossing * (replicas - 1) / replicas / slowest if replicas else 0.0,
        )

    def busy_s(self, at: int) -> float:
        """Seconds in which a part's replicas get a step's microbatches done, each of which one does as a whole."""
        each = [(number, max(self._seconds[at][kind])) for kind, number in enumerate(self._layout.places[at]) if number]
        return whole_microbatches_s(passing(self._count, self._parts[at].load), each) if each else math.inf

    def filling_s(self, parts: Sequence[PartForecast]) -> float:
        """Seconds for which the slowest part has nothing to do at a step's two ends.

        Where it computes, that is the forward way of a journey to it: what it waits for at the end it fills with the
        gradients of weights that it has put off. Links have nothing to put off, and wait for the whole way.
        """
        part = min(parts, key=lambda one: one.rate)
        carries, replicas = part.link_rate < part.compute_rate, sum(self._layout.places[parts.index(part)])
        if not part.rate:
            return 0.0
        if carries:
            return max(0.0, self.journey_s - replicas / (part.rate * part.load))
        again = self._layout.recompute
        hop_s = self._mean(lambda kind, compute, link: (link + self._classes[kind].round_trip_s) / 2)
        forward_s = self._mean(lambda kind, compute, link: compute)
        forward_s = [one / (BACKWARD + again) for one in forward_s[:-1]] + forward_s[-1:]
        own_s = forward_s[parts.index(part)]
        way_s = sum(one.load * (forward_s[at] + hop_s[at]) for at, one in enumerate(parts))
        return max(0.0, way_s + hop_s[-1] - own_s)

    def _mean(self, seconds: Callable[[int, float, float], float]) -> list[float]:
        """By part, over its replicas."""
        return [
            sum(number * seconds(kind, *self._seconds[at][kind]) for kind, number in enumerate(here))
            / max(1, sum(here))
            for at, here in enumerate(self._layout.places)
        ]

    @property
    def journey_s(self) -> float:
        """Seconds of one microbatch that meets no other: computing, carrying, and half a round trip at every hop."""
        each = self._mean(lambda kind, compute, link: compute + link + self._classes[kind].round_trip_s)
        return sum(part.load * seconds for part, seconds in zip(self._parts, each, strict=True))

    def more_limits(self, journey_s: float) -> Iterable[PaceLimit]:
        """Yield what limits the pace beside the parts."""
        at_once = min(self._count, self._work.in_flight(self._layout.rows) * max(1, self._layout.trainers))
        if at_once < self._count:
            yield PaceLimit("journeys that trainers have in flight", at_once / max(journey_s, 1e-9))
        for kind, one in enumerate(self._classes):
            if one.together_flops is not None and self.used[kind]:
                busy = 0.0
                for at, here in enumerate(self._layout.places):
                    share = self._parts[at].load * here[kind] / max(1, sum(here))
                    busy += share * self._seconds[at][kind][0] * one.flops / one.together_flops
                if busy:
                    yield PaceLimit(f"the processors that {one.name} share", 1 / busy)

    def problems(self, parts: Sequence[PartForecast]) -> Iterable[str]:
        """Yield in words what keeps the layout from being used."""
        for kind, one in enumerate(self._classes):
            if self.used[kind] > one.count:
                yield f"{self.used[kind]} peers of {one.name} are placed, and there are {one.count}"
        if sum(self._layout.stages) != self._work.layers or min(self._layout.stages) < 1:
            yield f"stages of {self._layout.stages} layers are not the {self._work.layers} of the model"
        for at, part in enumerate(parts):
            if not sum(self._layout.places[at]):
                yield f"nobody has {part.name}"
            for kind, number in enumerate(self._layout.places[at]):
                if number and (lacks := lacking(part.memory, self._classes[kind], recompute=self._layout.recompute)):
                    yield f"{part.name} at {self._classes[kind].name}: {lacks}"

    def chances(self, parts: Sequence[PartForecast]) -> tuple[tuple[float, int, float], ...]:
        """See :class:`StepForecast`."""
        chances = []
        for at, part in enumerate(parts):
            replicas, away = sum(self._layout.places[at]), 0.0
            for kind, number in enumerate(self._layout.places[at]):
                one = self._classes[kind]
                if number and one.stay_s is not None:
                    absent_s = RETURN_S + self._work.copy_bytes * part.needs.parameters / one.down
                    away += number / replicas * absent_s / (absent_s + one.stay_s)
            chances.append((part.rate, replicas, away))
        return tuple(chances)


def layers_of(layout: PartLayout, part: PartLoad) -> int:
    """Return how many layers a part has in a layout; none of what trainers hold."""
    return layout.stages[part.stage] if part.stage < len(layout.stages) else 0


def passing(microbatches: int, load: float) -> int:
    """Return how many of a step's microbatches pass a part with this load."""
    return math.ceil(microbatches * load - 1e-9)


def part_memory(work: Workload, layout: PartLayout, at: int) -> MemoryNeed:
    """Return what one replica of a part takes, the product's own rules for graphs and payloads applied
    (``swarm/membership/roles.py``, ``memory.py``)."""
    stages, replicas, trainers = len(layout.stages), max(1, sum(layout.places[at])), max(1, layout.trainers)
    parts, times = work.parts(stages), math.ceil(work.parts(stages)[at].load)  # text may be all of one variant
    stage, count = parts[at].stage, times * math.ceil(work.rows / layout.rows)
    needs = work.part(stages, stage, layers_of(layout, parts[at]))
    crossing = layout.rows * work.crossing(stages, stage)
    logits = min(layout.rows * work.logits_bytes, work.most_logits_bytes)
    if stage == stages:
        graphs = 0 if work.hosted else min(count, work.in_flight(layout.rows))
        each, one_layer = layout.rows * needs.graph, 0.0 if work.hosted else logits
        copies = 0.0
    else:
        in_flight = times * min(USUAL_IN_FLIGHT, work.in_flight(layout.rows)) * trainers
        graphs = graphs_under_way(count, replicas, in_flight)
        each = layout.rows * (needs.thrifty if layout.recompute else needs.graph)
        one_layer = layout.rows * work.layer.graph * 2  # of a backward: what it computes again, and its gradients
        hosts = max(1, layout.peers - layout.trainers)
        duties = 0 if len(parts) == 2 else math.ceil(work.copies * (len(parts) - 1) / hosts)
        others = max((layers_of(layout, one) for one in parts[:-1] if one is not parts[at]), default=0)
        copies = duties * work.copy_bytes * work.part(stages, min(stage, 1), others).parameters if duties else 0.0
        if work.hosted and (stage == stages - 1):
            one_layer += logits
    share = min(count, math.ceil(count / replicas) + trainers - 1)
    payloads = min(work.retention_bytes, share * crossing) if stage < stages or not work.hosted else 0.0
    device = needs.apart + graphs * each + one_layer
    return MemoryNeed(state=needs.held + one_layer, graphs=graphs, graph_bytes=each, payloads=payloads, copies=copies,
                      device=device)  # fmt: skip


def lacking(memory: MemoryNeed, one: PeerClass, *, recompute: bool) -> str:
    """Return what a peer of a class has too little memory for, in words; "" for a part that fits.

    Graphs may take :data:`~swarm.planning.costs.GRAPH_SHARE` of what else is left, as at a peer: it would begin to
    compute activations again where they took more, which is another layout. Of what is computed again they may take
    twice as much.
    """
    share = 1.0 if recompute else GRAPH_SHARE
    graphs = memory.graphs * memory.graph_bytes
    rest = memory.total - graphs
    if one.host_memory is None:
        room = one.memory - rest
        return "" if graphs <= share * room else _too_much(rest + graphs / share, one.memory, "memory")
    apart = memory.device - graphs
    if graphs > share * (one.memory - apart):
        return _too_much(apart + graphs / share, one.memory, "memory of its device")
    return "" if rest <= one.host_memory else _too_much(rest, one.host_memory, "memory of its host")


def _too_much(needed: float, has: float, what: str) -> str:
    return f"it takes {needed / 2**30:.2f} GiB, and has {has / 2**30:.2f} GiB of {what}"


def whole_microbatches_s(count: int, each: Sequence[tuple[int, float]]) -> float:
    """Return how long it takes until peers get so many microbatches done that begin together: ``each`` says how many
    peers there are that take how many seconds for one."""
    seconds = count / sum(number / one for number, one in each)
    while sum(number * math.floor(seconds / one + 1e-9) for number, one in each) < count:
        seconds = min((math.floor(seconds / one + 1e-9) + 1) * one for _, one in each)
    return seconds


def _limits(parts: Sequence[PartForecast]) -> Iterable[PaceLimit]:
    """Yield what parts allow, parts that are alike in one."""
    alike: dict[tuple[str, float], list[str]] = {}
    for part in parts:
        slower = "links of" if part.link_rate < part.compute_rate else "computing of"
        for title, alone in (("computing of", part.compute_rate), ("links of", part.link_rate)):
            rate = part.rate if title == slower else alone
            alike.setdefault((title, float(f"{rate:.3g}")), []).append(part.name)
    for (title, rate), names in alike.items():
        yield PaceLimit(f"{title} {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}", rate)


MANY_REPLICAS = 64
"""Of more nearly the same share is away at any moment."""


def expected_pace(chances: Sequence[tuple[float, int, float]]) -> float:
    """Return the expected pace of the slowest part over the pace with everybody there: for each part its rate, its
    replicas, and the chance that one of them is away at a moment, apart from all others."""
    whole = min(rate for rate, _, _ in chances)
    if whole <= 0.0 or not any(away for _, _, away in chances):
        return 1.0 if whole > 0.0 else 0.0
    levels = {whole}
    for rate, replicas, away in chances:
        there = (1 - away,) if replicas > MANY_REPLICAS else [number / replicas for number in range(1, replicas + 1)]
        levels |= {min(whole, rate * share) for share in there}
    expected, below = 0.0, 0.0
    for level in sorted(levels):
        expected += (level - below) * math.prod(_at_least(level, *chance) for chance in chances)
        below = level
    return expected / whole


def _at_least(level: float, rate: float, replicas: int, away: float) -> float:
    """The chance that the replicas that are there make at least this pace."""
    if replicas > MANY_REPLICAS:
        return float(rate * (1 - away) >= level * (1 - 1e-9))
    needed = math.ceil(level * replicas / rate - 1e-9)
    return sum(math.comb(replicas, there) * (1 - away) ** there * away ** (replicas - there)
               for there in range(needed, replicas + 1))  # fmt: skip
