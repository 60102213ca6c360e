"""How much of its devices' time a swarm on thin, long links works, and what it has the rest for.

Whole swarms in one process each, in virtual time: real peers and numbers, devices that take a stated time, payloads
that stand for larger ones (:mod:`tests.benchmarks._wan_swarm`). So a run repeats itself, and a busy machine changes
nothing but how long it takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks._wan_cells import BRIEF, CELLS, MODES, NAMED, Cell, bound, plain_bound, published
from tests.benchmarks._wan_timeline import KINDS, USEFUL
from tests.benchmarks.runner import Result, Size

PLAYED = {Size.SMOKE: NAMED[:1], Size.DEFAULT: NAMED, Size.FULL: CELLS}
SMOKED = ("overlap_int8h",)
SEEDS = {Size.SMOKE: (1,), Size.DEFAULT: (1,), Size.FULL: (1, 2, 3)}
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 9, Size.FULL: 9}
"""The first three are not counted, in a smoke the first; nor is the last."""
KEYS = (
    *(f"{figure}_{mode}_{cell.name}" for cell in NAMED for mode in MODES for figure in ("util", "share_of_bound")),
    *(f"{figure}_{cell.name}" for cell in NAMED for figure in
      ("early_share", *(f"early_share_{mode}" for mode in MODES),
       *(f"lost_{what}" for what in (*MODES, *KINDS)))),
    "lost", "duplicated", "digest_mismatches",
)  # fmt: skip
COLUMNS = (
    "cell", "mode", "seeds", "step_s", "util", "util_range", "bound", "share_of_bound", "swarm_bound",
    "swarm_published", "early", USEFUL, *KINDS, "attempts_failed", "hops_moved", "cpu_s",
)  # fmt: skip


def run(size: Size) -> Result:
    """Share of device time that works between thin machines far apart, and what the rest is lost to."""
    return to_result(PLAYED[size], play_cases("wan", list_cases(size)))


def list_cases(size: Size) -> list[dict[str, Any]]:
    """Return what is played."""
    return [
        {"mode": mode, "cell": asdict(cell), "seed": seed, "steps": STEPS[size]}
        for mode in MODES
        for cell in PLAYED[size]
        if size is Size.FULL or mode in (BRIEF[cell.name] if size is Size.DEFAULT else SMOKED)
        for seed in SEEDS[size]
    ]


def to_result(cells: Sequence[Cell], runs: Sequence[dict[str, Any]]) -> Result:
    """Return the table, a row for each mode in each cell, means over seeds; and the figures of cells with a name."""
    summary: dict[str, Any] = dict.fromkeys(KEYS)
    rows = []
    for cell in cells:
        played = {mode: [run for run in runs if (run["cell"], run["mode"]) == (cell.name, mode)] for mode in MODES}
        means = {mode: _mean(seen) for mode, seen in played.items() if seen}
        if cell in NAMED:
            summary |= _named(cell, means)
        known = {"swarm_bound": plain_bound(cell), "swarm_published": published(cell)}
        rows += [
            [_shown((known | {"bound": bound(cell, mode)} | means[mode]).get(column)) for column in COLUMNS]
            for mode in means
        ]
    for what in ("lost", "duplicated", "digest_mismatches"):
        summary[what] = sum(run.get(what, 0) for run in runs)
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=NOTES)


def _mean(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is a number is the mean over seeds."""
    first = runs[0]
    utils = [run["util"] for run in runs]
    means = {
        name: value if isinstance(value, str) else statistics.fmean(run[name] for run in runs)
        for name, value in first.items()
    }
    return means | {"seeds": len(runs), "util_range": max(utils) - min(utils)}


def _named(cell: Cell, means: dict[str, dict[str, Any]]) -> dict[str, float]:
    """``lost_fill`` and so on are of the first mode."""
    found = {f"{figure}_{mode}": mean[figure] for mode, mean in means.items() for figure in ("util", "share_of_bound")}
    found["early_share"] = max(mean["early"] for mean in means.values())
    found |= {f"early_share_{mode}": mean["early"] for mode, mean in means.items()}
    found |= {f"lost_{mode}": 1.0 - mean[USEFUL] for mode, mean in means.items()}
    found |= {f"lost_{kind}": means[first][kind] for first in MODES[:1] if first in means for kind in KINDS}
    return {f"{name}_{cell.name}": round(value, 4) for name, value in found.items()}


def _shown(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


NOTES = (
    "simulated: virtual time; 4 stages × 2 replicas, 2 trainers with private ends, 64 microbatches a step, 3 steps of "
    "warm-up and 5 counted (smoke: 1 and 1), no copies; optimizer, digests and the ends' compute take no time",
    "cell: Mbit/s of each machine each way, round trip in ms; then, where they are not 568 ms, 1 MB and 10 MB, compute "
    "of a stage's forward and backward, activation and part in float32; a part's sums cross as few large messages",
    "bound: compute ÷ what a microbatch and its share of averaging keep the busiest link for, at most 1; swarm_bound: "
    "the same without averaging; latency is in neither",
    "useful to close: shares of the stage hosts' time from a step's opening to its closing; lost_sync: 1 - useful; "
    "only four cells have keys of their own, those not played are None",
    "a default run leaves out sync_int8h, sync_auto and some modes of the wider and the thinnest link: --full has all",
    "swarm_published: compute ÷ (compute + waiting) on its slides, at 500 Mbit/s, other tensors and latency unknown",
    "sync_int8h: payloads between stages are int8h, averaging is float32; sync_auto: records choose float32 or int8h, "
    "and its bound is int8h's; encoding takes no time; left out: hivemind itself, for which no rig has links of this "
    "kind",
)
