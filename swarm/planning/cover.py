"""Find the layout whose slowest part is as fast as can be, exactly, for few classes of few peers. Pure.

Read :func:`fastest_cover`. A part needs a set of peers that together make the pace; sets of all parts must be there at
once, and stages may have any sizes that add up to the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.planning.predict import lacking, part_memory, replica_seconds
from swarm.planning.workload import PartLayout, PeerClass, Workload

BISECTIONS = 14
LEAST_PACE = 1e-9

Counts = tuple[int, ...]
"""How many peers of each class."""
Chosen = tuple[tuple[int, ...], tuple[Counts, ...]]
"""Sizes of the first stages, the largest first, and who is there."""
States = dict[int, dict[Counts, Chosen]]
"""By the layers of the first stages: who may be left then, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverCase:
    """Layouts with so many ``stages`` and ``rows`` of a microbatch; ``again``: activations are computed again. Private
    ends alone, or one stage: hosted ones make the first and the last stage unlike the others. Nor are there variants,
    or stages that must have as many layers."""

    work: Workload
    classes: Sequence[PeerClass]
    stages: int
    rows: int
    again: bool

    def seconds(self, at: int, layers: int) -> list[float]:
        """Return the seconds of a microbatch at one peer of each class."""
        needs, again = self.work.part(self.stages, at, layers), self.again and at < self.stages
        crossing = self.work.crossing(self.stages, at)
        return [
            max(replica_seconds(self.work, needs, one, crossing, rows=self.rows, again=again)) for one in self.classes
        ]

    @property
    def everybody(self) -> Counts:
        """Return how many peers there are of each class."""
        return tuple(one.count for one in self.classes)


def fastest_cover(case: CoverCase) -> PartLayout | None:
    """Return a layout whose slowest part is as fast as can be, some peers perhaps without a place; None: none fits.

    Bisects on the pace. Whether a pace can be had follows from what is left of each class after the first stages, of
    which only what is not worse than another is kept (Pareto): few states where classes are few.
    """
    if (case.work.hosted and case.stages > 1) or case.work.loads or case.work.alike:
        return None
    each = case.seconds(0, 1)
    slow, fast = 0.0, sum(one.count / seconds for one, seconds in zip(case.classes, each, strict=True))
    best = _cover(case, LEAST_PACE)
    if best is None:
        return None
    for _ in range(BISECTIONS):
        pace = (slow + fast) / 2
        found = _cover(case, pace)
        slow, fast, best = (slow, pace, best) if found is None else (pace, fast, found)
    return best


def _cover(case: CoverCase, pace: float) -> PartLayout | None:
    """A layout in which each part makes at least this pace."""
    layers, stages = case.work.layers, case.stages
    for trainers in _enough(case, stages, 0, pace, 1):
        sizes = {size: _enough(case, 0, size, pace, sum(trainers)) for size in range(1, layers - stages + 2)}
        states: States = {0: {_minus(case.everybody, trainers): ((), ())}}
        for others in reversed(range(stages)):
            states = _one_more(states, sizes, layers - others)
        for lengths, places in states.get(layers, {}).values():
            return PartLayout(stages=lengths, places=(*places, trainers), rows=case.rows, recompute=case.again)
    return None


def _one_more(states: States, sizes: dict[int, list[Counts]], most: int) -> States:
    """One stage more, no larger than the one before it; ``most`` layers in all, so that others have some."""
    after: States = {}
    for layers, kept in states.items():
        for left, (lengths, places) in kept.items():
            largest = lengths[-1] if lengths else most
            for size in range(1, min(largest, most - layers) + 1):
                for here in sizes.get(size, ()):
                    if not _covers(left, here):
                        continue
                    remains, same = _minus(left, here), after.setdefault(layers + size, {})
                    if remains not in same or same[remains][0][-1] < size:
                        same[remains] = ((*lengths, size), (*places, here))
    return {layers: _kept(found) for layers, found in after.items()}


def _kept(found: dict[Counts, Chosen]) -> dict[Counts, Chosen]:
    """Those of which no other leaves as much of every class, and lets stages to come be as large."""
    kept: dict[Counts, Chosen] = {}
    for left, chosen in sorted(found.items(), reverse=True):
        last = chosen[0][-1]
        if not any(other[0][-1] >= last and _covers(more, left) for more, other in kept.items()):
            kept[left] = chosen
    return kept


def _enough(case: CoverCase, at: int, layers: int, pace: float, trainers: int) -> list[Counts]:
    """The smallest sets of peers that make this pace with a part and have the memory for it."""
    seconds = case.seconds(at, layers)
    found: list[Counts] = []
    for counts in sorted(itertools.product(*(range(number + 1) for number in case.everybody)), key=sum):
        made = sum(number / one for number, one in zip(counts, seconds, strict=True))
        if not any(counts) or made < pace or any(_covers(counts, smaller) for smaller in found):
            continue
        memory = part_memory(case.work, _sketch(case, at, layers, counts, trainers), at)
        placed = [one for one, number in zip(case.classes, counts, strict=True) if number]
        if not any(lacking(memory, one, recompute=case.again) for one in placed):
            found.append(counts)
    return found


def _sketch(case: CoverCase, at: int, layers: int, counts: Counts, trainers: int) -> PartLayout:
    """A layout as far as the memory of one part depends on it: those without a place yet share the copies."""
    stages, nobody = case.stages, (0,) * (len(case.classes) - 1)
    places = [(0, *nobody)] * (stages + 1)
    if stages > 1 or at == stages:
        places[1 if at == 0 else 0] = (max(0, sum(case.everybody) - sum(counts) - trainers), *nobody)
    if at < stages:
        places[stages] = (trainers, *nobody)
    places[at] = counts
    other = max(1, (case.work.layers - layers) // max(1, stages - 1))
    sizes = (layers or other, *[other] * (stages - 1))
    return PartLayout(stages=sizes, places=tuple(places), rows=case.rows, recompute=case.again)


def _minus(whole: Counts, part: Counts) -> Counts:
    return tuple(mine - theirs for mine, theirs in zip(whole, part, strict=True))


def _covers(more: Counts, less: Counts) -> bool:
    return all(mine >= theirs for mine, theirs in zip(more, less, strict=True))
