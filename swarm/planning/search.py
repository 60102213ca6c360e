"""Search the layout in which a step is fastest: stages, their sizes, who is where, microbatches, checkpointing. Pure.

Read :func:`search` first. Every layout that comes out has been judged by :func:`~swarm.planning.predict.predict` and
fits into the memory of everybody in it.

Small cases are searched exactly for the highest pace (:mod:`swarm.planning.cover`): stages of every size, with sets of
peers of every kind. Others begin with the peers dealt out one after the other to the slowest part (longest processing
time first: Graham 1969, SIAM J. Appl. Math. 17). Both are then improved by single changes as long as one helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from swarm.models.spec import even_stages
from swarm.planning.cover import CoverCase, fastest_cover
from swarm.planning.predict import StepForecast, lacking, layers_of, part_memory, predict, replica_seconds
from swarm.planning.workload import PartLayout, PeerClass, Workload

SMALL_CLASSES, SMALL_COUNT, SMALL_LAYERS = 3, 8, 16
"""What is searched exactly."""
MOST_ROWS = 64
"""Of a microbatch that is tried, unless the manifest has more."""
SMALL_IMPROVED, IMPROVED = 64, 8
"""How many of the best beginnings are improved, each with other stages, rows or checkpointing."""
MOST_TRIED, BRIEFLY, THOROUGHLY = 4000, 250, 2
"""Layouts that are tried while one is improved, at most: of large cases ``BRIEFLY`` for each beginning, the most for
so many that are best then, of each kind."""
DEALT_AT_ONCE = 96
"""Of larger classes, into about so many portions each is dealt out."""


Told = Callable[[str, int, int], None]
"""Is told of what is done how much, of how much."""


def _tells_nobody(what: str, done: int, total: int) -> None:
    return None


def search(
    work: Workload,
    classes: Sequence[PeerClass],
    *,
    stages: Sequence[int] = (),
    rows: Sequence[int] = (),
    told: Told = _tells_nobody,
) -> list[StepForecast]:
    """Return the best layouts that were found, the fastest first, each with another number of stages, rows or
    checkpointing; none where no layout fits.

    Args:
        work: What is to be trained.
        classes: Who may train it; not all of them need a place.
        stages: Numbers of stages to choose from; any by default.
        rows: Rows of a microbatch to choose from; by default powers of two, and what the manifest says.
        told: Told how far it is.

    Cost: seconds for a hundred peers.
    """
    peers = sum(one.count for one in classes)
    numbers = work.cuts(stages or range(1, work.layers + 1), peers)
    choices = [CutChoice(*one) for one in itertools.product(numbers, rows or row_choices(work), (False, True))]
    dense, alone = (_begun(work, classes, choices, sparse=sparse, told=told) for sparse in (False, True))
    begun = [one for pair in itertools.zip_longest(dense, alone) for one in pair if one is not None]
    if is_small(work, classes):
        exact = [*_exact(work, classes, numbers, rows or row_choices(work), begun)]
        begun = sorted([*begun, *exact], key=_order)
        better = []
        for number, one in enumerate(chosen := begun[:SMALL_IMPROVED]):
            told("layouts improved", number, len(chosen))
            better.append(improve(work, classes, one))
    else:
        better = [*_improved(work, classes, dense, told), *_improved(work, classes, alone, told)]
    found: dict[tuple[int, int, bool], StepForecast] = {}
    for one in better:
        if not one.problems:
            key = (len(one.layout.stages), one.layout.rows, one.layout.recompute)
            found[key] = min(found.get(key, one), one, key=_order)
    return sorted(found.values(), key=lambda one: (-one.tokens_s * one.available, len(one.layout.stages)))


def _improved(
    work: Workload, classes: Sequence[PeerClass], begun: Sequence[StepForecast], told: Told
) -> Iterator[StepForecast]:
    tried: list[StepForecast] = []
    for one in begun[:IMPROVED]:
        told("layouts improved", len(tried), len(begun[:IMPROVED]))
        tried.append(improve(work, classes, one, BRIEFLY))
    for number, one in enumerate(sorted(tried, key=_order)):
        if number < THOROUGHLY:
            told("best layouts improved further", number, min(len(tried), THOROUGHLY))
        yield improve(work, classes, one) if number < THOROUGHLY else one


def _begun(
    work: Workload, classes: Sequence[PeerClass], choices: Sequence[CutChoice], *, sparse: bool, told: Told
) -> list[StepForecast]:
    """Return what dealing peers out gives, the best first."""
    found: list[StepForecast] = []
    for number, choice in enumerate(choices):
        told("layouts dealt out sparsely" if sparse else "layouts dealt out", number, len(choices))
        if (layout := deal(work, classes, choice, sparse=sparse)) is not None:
            found.append(predict(work, classes, layout))
    return sorted(found, key=_order)


def row_choices(work: Workload) -> list[int]:
    """Return the rows of a microbatch that are worth trying: what divides a step's into whole microbatches."""
    powers = [1 << power for power in range(MOST_ROWS.bit_length())]
    return sorted({size for size in (*powers, work.rows_asked) if size <= work.rows and work.rows % size == 0})


def is_small(work: Workload, classes: Sequence[PeerClass]) -> bool:
    """Return whether a case is small enough to be searched exactly."""
    few = len(classes) <= SMALL_CLASSES and all(one.count <= SMALL_COUNT for one in classes)
    return few and work.layers <= SMALL_LAYERS


def _order(one: StepForecast) -> tuple[int, float, int]:
    """Fewest problems first, then the fastest, then the fewest stages."""
    return len(one.problems), -one.tokens_s, len(one.layout.stages)


# --- dealing peers out -----------------------------------------------------------------------------------------------


class CutChoice(NamedTuple):
    """A number of stages, the rows of a microbatch, and whether activations are computed ``again``."""

    stages: int
    rows: int
    again: bool


def deal(work: Workload, classes: Sequence[PeerClass], choice: CutChoice, *, sparse: bool = False) -> PartLayout | None:
    """Give each peer, those with little memory first and of these the fast ones, to the slowest part that it can hold;
    ``sparse``: to each part one alone, the fastest first, since who is alone has nothing to average. None where a part
    is left without any."""
    stages, rows, again = choice
    planned, sizes = work.parts(stages), even_stages(work.layers, stages)
    parts = range(len(planned))
    peers = sum(one.count for one in classes)
    typical = max(1, peers // len(planned))
    alike = PartLayout(stages=sizes, places=((typical,),) * len(planned), rows=rows, recompute=again)
    needs = [work.part(stages, part.stage, layers_of(alike, part)) for part in planned]
    memory, crossing = [part_memory(work, alike, at) for at in parts], [work.crossing(stages, p.stage) for p in planned]
    places, pace = [[0] * len(classes) for _ in parts], [0.0] * len(planned)
    for kind in sorted(range(len(classes)), key=lambda kind: _turn(classes[kind], sparse=sparse)):
        one = classes[kind]
        fits = [at for at in parts if not lacking(memory[at], one, recompute=again)]
        seconds = [  # fmt: skip
            part.load
            * max(replica_seconds(work, needs[at], one, crossing[at], rows=rows, again=again and part.stage < stages))
            for at, part in enumerate(planned)
        ]
        left, portion = one.count, 1 if sparse else max(1, one.count // DEALT_AT_ONCE)
        while left and (fits := [at for at in fits if not (sparse and pace[at])]):
            at = min(fits, key=lambda at: pace[at])
            taken = min(left, portion)
            places[at][kind] += taken
            pace[at] += taken / seconds[at]
            left -= taken
    if not all(pace):
        return None
    return replace(alike, places=tuple(map(tuple, places)))


def _turn(one: PeerClass, *, sparse: bool) -> tuple[float, float]:
    return (0.0 if sparse else one.memory), -one.flops


# --- improving by single changes -------------------------------------------------------------------------------------


def improve(work: Workload, classes: Sequence[PeerClass], begun: StepForecast, most: int = MOST_TRIED) -> StepForecast:
    """Return what single changes make of a layout, as long as one of them helps: peers moved or left out, two that
    change places, a layer moved. Of equally fast layouts the one counts as better whose slow parts are less slow.

    Of a small case the best change is made, of others the first that helps; ``most`` layouts are tried.
    """
    best, rank, left, thorough = begun, _rank(begun), most, is_small(work, classes)
    while left > 0:
        found, better = best, rank
        for layout in itertools.islice(_neighbours(work, best, classes, thorough=thorough), left):
            left -= 1
            tried = predict(work, classes, layout)
            if (ranked := _rank(tried)) > better:
                found, better = tried, ranked
                if not thorough:
                    break
        if found is best:
            return best
        best, rank = found, better
    return best


def _rank(one: StepForecast) -> tuple[int, float, tuple[float, ...]]:
    paces = tuple(float(f"{rate:.6g}") for rate in sorted(part.rate for part in one.parts))
    return -len(one.problems), float(f"{one.tokens_s:.6g}"), paces


def _neighbours(
    work: Workload, one: StepForecast, classes: Sequence[PeerClass], *, thorough: bool
) -> Iterator[PartLayout]:
    """Yield the layouts that are one change away: ``thorough`` all of them, else those alone that change the slowest
    part, or have somebody rest."""
    layout, parts, kinds = one.layout, range(len(one.parts)), range(len(classes))
    slow = min(parts, key=lambda at: one.parts[at].rate)
    lacking_parts = {at for at in parts if any(text.startswith(one.parts[at].name) for text in one.problems)}
    wanting = set(parts) if thorough else {slow, *lacking_parts}
    idle = [cls.count - sum(here[kind] for here in layout.places) for kind, cls in enumerate(classes)]
    for kind, at in itertools.product(kinds, sorted(wanting)):
        for amount in sorted({1, idle[kind]}):
            if 0 < amount <= idle[kind]:
                yield _moved(layout, kind, None, at, amount)
    for kind, at in itertools.product(kinds, parts):
        here = layout.places[at][kind]
        for amount in sorted({1, here, max(1, classes[kind].count // DEALT_AT_ONCE)}):
            if 0 < amount <= here:
                targets = parts if at in wanting else sorted(wanting)
                yield from (_moved(layout, kind, at, to, amount) for to in targets if to != at)
                yield _moved(layout, kind, at, None, amount)
    for here, there in itertools.product(sorted(wanting), parts):
        for mine, theirs in itertools.permutations(kinds, 2):
            if here != there and layout.places[here][mine] and layout.places[there][theirs]:
                yield _moved(_moved(layout, mine, here, there, 1), theirs, there, here, 1)
    yield from _resized(work, layout, {one.parts[at].stage for at in wanting})


def _resized(work: Workload, layout: PartLayout, wanting: set[int]) -> Iterator[PartLayout]:
    stages = range(0 if work.alike else len(layout.stages))
    for here, there in itertools.permutations(stages, 2):
        if layout.stages[here] > 1 and (here in wanting or there in wanting):
            sizes = list(layout.stages)
            sizes[here] -= 1
            sizes[there] += 1
            yield replace(layout, stages=tuple(sizes))


def _moved(layout: PartLayout, kind: int, origin: int | None, target: int | None, amount: int) -> PartLayout:
    places = [list(here) for here in layout.places]
    if origin is not None:
        places[origin][kind] -= amount
    if target is not None:
        places[target][kind] += amount
    return replace(layout, places=tuple(map(tuple, places)))


# --- small cases, exactly --------------------------------------------------------------------------------------------


def _exact(
    work: Workload, classes: Sequence[PeerClass], numbers: Sequence[int], rows: Sequence[int],
    begun: Sequence[StepForecast],
) -> Iterator[StepForecast]:  # fmt: skip
    """Yield for the most promising rows and checkpointing, and for each number of stages, what is fastest."""
    promising = dict.fromkeys((one.layout.rows, one.layout.recompute) for one in begun)
    promising |= dict.fromkeys(itertools.product(rows, (False, True)))
    for size, again in list(promising)[:IMPROVED]:
        for number in numbers:
            layout = fastest_cover(CoverCase(work=work, classes=classes, stages=number, rows=size, again=again))
            if layout is not None:
                yield predict(work, classes, layout)
