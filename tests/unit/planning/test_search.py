from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarm.models.spec import even_stages
from swarm.planning.cover import CoverCase, fastest_cover
from swarm.planning.predict import predict
from swarm.planning.search import CutChoice, deal, is_small, row_choices, search
from swarm.planning.workload import PartLayout, PeerClass, Workload
from tests.unit.planning.test_predict import GIB, PEER, WORK


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to give up to ``total`` peers to so many parts."""
    for counts in itertools.product(range(total + 1), repeat=parts):
        if sum(counts) <= total:
            yield counts


def sizes_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for sizes in itertools.product(range(1, layers + 1), repeat=stages):
        if sum(sizes) == layers and tuple(sorted(sizes, reverse=True)) == sizes:
            yield sizes


def brute(work: Workload, classes: list[PeerClass], stages: int, rows: int) -> Iterator[PartLayout]:
    per_class = [list(compositions(one.count, stages + 1)) for one in classes]
    for sizes in sizes_of(work.layers, stages):
        for chosen in itertools.product(*per_class):
            places = tuple(zip(*chosen, strict=True))
            if all(map(any, places)):
                yield PartLayout(stages=sizes, places=places, rows=rows)


def drawn(seed: int) -> tuple[Workload, list[PeerClass]]:
    draw = random.Random(seed)
    classes = [
        replace(PEER, name=name, count=draw.randint(2, 3), flops=10 ** draw.uniform(8, 10),
                memory=draw.choice([0.6, 0.8, 4.0]) * GIB, up=10 ** draw.uniform(6, 8))
        for name in ("a", "b")
    ]  # fmt: skip
    return replace(WORK, layers=draw.randint(2, 4)), classes


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_nearly_what_trying_everything_finds(seed: int) -> None:
    work, classes = drawn(seed)
    tried = [
        predict(work, classes, layout) for stages in (1, 2) for layout in brute(work, classes, stages, 4)
    ]  # fmt: skip
    best = max((one.tokens_s for one in tried if not one.problems), default=0.0)
    found = search(work, classes, stages=(1, 2), rows=(4,))
    if not best:
        assert all(one.layout.recompute for one in found)
        return
    assert found[0].tokens_s >= 0.97 * best


@pytest.mark.parametrize("seed", range(6))
def test_cover_is_as_fast_as_can_be(seed: int) -> None:
    work, classes = drawn(seed)
    classes = [replace(one, memory=64 * GIB) for one in classes]
    layouts = [predict(work, classes, layout) for layout in brute(work, classes, 2, 4)]
    best = max(min(part.rate for part in one.parts) for one in layouts)
    layout = fastest_cover(CoverCase(work=work, classes=classes, stages=2, rows=4, again=False))
    assert layout is not None
    assert min(part.rate for part in predict(work, classes, layout).parts) == pytest.approx(best, rel=1e-3)


def test_no_plan_lacks_memory_and_none_means_none() -> None:
    for memory in (0.41, 0.5, 1.0):
        classes = [replace(PEER, memory=memory * GIB, count=6)]
        for one in search(WORK, classes):
            assert not one.problems
            assert all(part.memory.total <= memory * GIB for part in one.parts)
    assert not search(WORK, [replace(PEER, memory=0.3 * GIB)])
    assert not search(WORK, [replace(PEER, count=1)])


def test_search_gives_peers_with_little_memory_shorter_stages() -> None:
    work = replace(WORK, layer=replace(WORK.layer, held=500e6))
    classes = [
        replace(PEER, name="large", memory=4 * GIB, count=2),
        replace(PEER, name="small", memory=1.2 * GIB, count=2),
    ]
    best = search(work, classes)[0]
    small = [at for at, here in enumerate(best.layout.places[:-1]) if here[1]]
    assert all(best.layout.stages[at] == 1 for at in small)


@pytest.mark.parametrize("memory", [8.0, 0.55])
def test_search_gives_a_busy_variant_more_hosts(memory: float) -> None:
    work = replace(WORK, loads=((1.0,), (0.6, 0.2, 0.2)))
    found = search(work, [replace(PEER, count=12, memory=memory * GIB)])
    assert {len(one.layout.stages) for one in found} == {2}, "as many as the manifest gives numbers for"
    best = found[0]
    hosts = [sum(here) for here in best.layout.places[:-1]]
    assert hosts[1] > max(hosts[2:4]) >= min(hosts[2:4]) >= 1
    assert min(part.rate for part in best.parts[1:4]) > 0.4 * max(part.rate for part in best.parts[1:4])
    assert not search(work, [replace(PEER, count=4)]), "one for each of four parts, and a trainer"


@pytest.mark.parametrize("shared", [True, False])
def test_stages_that_are_alike_have_as_many_layers(shared: bool) -> None:
    work = replace(WORK, alike=1, shared=shared)
    found = search(work, [replace(PEER, name="a", count=3), replace(PEER, name="b", count=3, flops=3e9)])
    assert {one.layout.stages for one in found} <= {(2, 2), (1, 1, 1, 1)}
    assert all(len(one.layout.places) == (2 if shared else len(one.layout.stages) + 1) for one in found)


def test_large_cases_are_dealt_out() -> None:
    work = replace(WORK, layers=32, rows=2048)
    classes = [replace(PEER, name=f"c{n}", count=60, flops=1e9 * (n + 1)) for n in range(4)]
    assert not is_small(work, classes)
    layout = deal(work, classes, CutChoice(8, 4, False))
    assert layout.peers == 240
    rates = [part.rate for part in predict(work, classes, layout).parts]
    assert min(rates) > 0.9 * max(rates)


def test_rows_divide_a_step() -> None:
    assert row_choices(replace(WORK, rows=24, rows_asked=3)) == [1, 2, 3, 4, 8]
    assert even_stages(7, 3) == (3, 2, 2)
