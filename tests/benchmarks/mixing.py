"""How fast strategies mix, in simulation beside what theory says, and beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import STRATEGIES, Strategy
from tests.benchmarks._mixing_plot import mixing_svg
from tests.benchmarks._mixing_rounds import Setting, contraction, distances, rounds_until, theory
from tests.benchmarks.runner import ROOT, Cell, Result, Size

SIZES = {
    Size.SMOKE: (2, 7),
    Size.DEFAULT: (2, 7, 16, 60, 256, 1024),
    Size.FULL: (2, 3, 4, 7, 8, 16, 31, 60, 100, 256, 500, 1000, 1024),
}
FAILING = (0.0, 0.01)
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 20}
MOST = {Size.SMOKE: 2, Size.DEFAULT: 50, Size.FULL: 50}
"""Rounds after which nobody looks further."""
PLOT = ROOT / "swarm" / "averaging" / "mixing.svg"
PLOTTED, PLOTTED_ROUNDS = Setting(replicas=60, failing=0.01, seed=0), 16
PUBLISHED: dict[tuple[int, float], dict[str, tuple[float, float]]] = {
    (512, 0.0): {"everyone": (1.0, 1.0), "push-sum": (47.6, 15.6), "random": (6.1, 3.0), "grid": (8.2, 3.6)},
    (768, 0.005): {"everyone": (28.7, 28.7), "push-sum": (43.2, 14.1), "random": (6.6, 3.0), "grid": (6.6, 3.0)},
    (900, 0.0): {"everyone": (1.0, 1.0), "push-sum": (45.0, 14.7), "random": (6.4, 3.0), "grid": (5.0, 2.9)},
    (900, 0.01): {"everyone": (50.0, 50.0), "push-sum": (45.6, 14.9), "random": (7.0, 3.1), "grid": (6.5, 3.0)},
}
"""Rounds to 1e-9 and to 1e-4 on 32 x 32 cells: the notebook of Moshpit SGD, arXiv 2103.03239; at most 50."""
KEYS = (
    *(f"{whose}_{name}_{replicas}_{failing:g}"
      for (replicas, failing), theirs in PUBLISHED.items() for name in theirs for whose in ("published", "ours")),
    "worst_of_theory",
)  # fmt: skip
COLUMNS = ("strategy", "replicas", "failing", "left_1", "theory_1", "left_2", "theory_2", "rounds_1e-4", "rounds_1e-9")


def run(size: Size) -> Result:
    """Contraction of every averaging strategy per round, beside theory and beside Moshpit's published runs."""
    seeds, most = SEEDS[size], MOST[size]
    rows = [
        _row(strategy, replicas, failing, seeds, most)
        for replicas in SIZES[size]
        for failing in FAILING
        for strategy in strategies()
    ]
    summary = _published(seeds, most) | {"worst_of_theory": max(_beside(row) for row in rows)}
    curves = {one.name: _curve(one) for one in strategies()}
    drawn = mixing_svg(f"{PLOTTED.replicas} replicas, 1 % of them fail in each round", curves)
    if size is not Size.SMOKE:
        PLOT.write_text(drawn, encoding="utf-8")
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary=summary,
        notes=(
            "left: mean squared distance from the mean after that round, as a share of what there was",
            "a group of which one member fails in a round changes nothing in it; what is pushed to it stays",
            "worst_of_theory: the largest |left - theory| over all rows, both as shares of what there was",
            f"published_*: rounds to 1e-9 on 32 x 32 cells, theirs; ours_*: on a grid that fits; most {most}",
            f"curves: {PLOT.relative_to(ROOT)}, which a smoke leaves as it is",
        ),
    )


def strategies() -> list[Strategy | PushSum]:
    """Those that mix differently: a server is everyone, and a hierarchy is exact after three rounds."""
    return [*(STRATEGIES[name] for name in ("everyone", "grid", "butterfly-groups", "random")), PushSum()]


def _row(strategy: Strategy | PushSum, size: int, failing: float, seeds: int, most: int) -> list[Cell]:
    settings = [Setting(replicas=size, failing=failing, seed=seed) for seed in range(seeds)]
    left = [contraction(strategy, setting, 2) for setting in settings]
    first, second = (mean(one[round] for one in left) for round in range(2))
    expected: Sequence[float | None] = theory(strategy, settings[0]) or (None, None)
    until = [mean(rounds_until(strategy, one, bound, most) for one in settings) for bound in (1e-4, 1e-9)]
    return [strategy.name, size, failing, first, expected[0], second, expected[1], *until]


def _beside(row: Sequence[Cell]) -> float:
    pairs = ((row[3], row[4]), (row[5], row[6]))
    return max(
        (abs(float(left) - float(right)) for left, right in pairs if left is not None and right is not None),
        default=0.0,
    )


def _published(seeds: int, most: int) -> dict[str, Any]:
    """Their rounds to 1e-9 and ours, in the published settings."""
    figures: dict[str, Any] = {}
    for (size, failing), theirs in PUBLISHED.items():
        for strategy in strategies():
            if strategy.name not in theirs:
                continue
            settings = [Setting(replicas=size, failing=failing, seed=seed) for seed in range(seeds)]
            key = f"{strategy.name}_{size}_{failing:g}"
            figures[f"published_{key}"] = theirs[strategy.name][0]
            figures[f"ours_{key}"] = round(mean(rounds_until(strategy, one, 1e-9, most) for one in settings), 1)
    return figures


def _curve(strategy: Strategy | PushSum) -> list[float]:
    values = distances(strategy, PLOTTED)
    return [1.0, *(next(values) for _ in range(PLOTTED_ROUNDS))]
