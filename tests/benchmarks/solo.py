"""What does a machine whose stages take turns on its device reach, beside one with room for all of them?

In real time, with the state of the stages in files; and whether the weights are those of a pipeline, bit for bit. And
what do machines with every part reach on thin links, beside a pipeline of as many: in virtual time.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks._wan_cells import MICROBATCHES
from tests.benchmarks.runner import Cell, Result, Size

BARS = {"over_resident": 0.9, "over_pipeline_50_100": 3.0}
KEYS = (*BARS, "over_pipeline_50_100_100mb", "over_kept_graphs", "max_abs_diff", *(f"{name}_bar" for name in BARS))
COLUMNS = ("stages", "microbatches a step", "microbatches a second")
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 4, Size.FULL: 8}
A_STEP = {Size.SMOKE: 4, Size.DEFAULT: 32, Size.FULL: 64}
PARTS_MB = {Size.SMOKE: (), Size.DEFAULT: (10, 100), Size.FULL: (10, 100)}


def run(size: Size) -> Result:
    """Rates of a machine of which two of four stages are on the device, and of one of which all are."""
    steps, each = STEPS[size], A_STEP[size]
    kinds = ("swapped", "resident", "graphs")
    cases = [*({"kind": kind, "steps": steps, "of": each} for kind in kinds), {"kind": "same", "steps": 2, "of": 4}]
    played = [play_cases("solo", [case])[0] for case in cases]  # one after the other: they share no core
    rates = {kind: one["rate"] for kind, one in zip(kinds, played, strict=False)}
    rows: list[list[Cell]] = [[kind, each, round(rate, 4)] for kind, rate in rates.items()]
    over = {part_mb: _over_pipeline(part_mb, rows) for part_mb in PARTS_MB[size]}
    summary: dict[str, Any] = {
        "over_resident": round(rates["swapped"] / rates["resident"], 3),
        "over_pipeline_50_100": over.get(10),
        "over_pipeline_50_100_100mb": over.get(100),
        "over_kept_graphs": round(rates["swapped"] / rates["graphs"], 3),
        "max_abs_diff": played[-1]["max_abs_diff"],
        **{f"{name}_bar": bar for name, bar in BARS.items()},
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=(_NOTE,))


def _over_pipeline(part_mb: int, rows: list[list[Cell]]) -> float:
    kinds = ("alone", "pipeline")
    played = play_cases("solo", [{"kind": kind, "steps": 3, "of": part_mb} for kind in kinds])
    rows += [
        [f"{kind}, {part_mb} MB", MICROBATCHES, round(one["rate"], 4)] for kind, one in zip(kinds, played, strict=True)
    ]
    return round(played[0]["rate"] / played[1]["rate"], 3)


_NOTE = (
    "swapped: two of four stages on the device (here the memory of a CPU); resident: all four, computed again in the "
    "backward like those; graphs: all four, nothing computed again; alone: eight machines with every part and a "
    "trainer each, 50 Mb/s and 100 ms there and back, parts of 10 and 100 MB; pipeline: two replicas of four stages on "
    "eight such machines, activations of 8 MB in float32, and two trainers on others; virtual time, where moving "
    "stages takes none"
)
