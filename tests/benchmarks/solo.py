"""What does a machine with every part reach: beside one with room for all of them, and beside a pipeline on thin links?

Beside a pipeline: whole swarms in virtual time, in ``wan``'s cell of 50 Mbit/s and 100 ms with activations of 8 MB, as
many devices in both. Beside a machine with room: real time, weights read from files.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

BARS = {"over_resident": 0.9, "over_pipeline_50_100": 3.0}
KEYS = (*BARS, "over_pipeline_50_100_100mb", "over_kept_graphs", "max_abs_diff", *(f"{name}_bar" for name in BARS))
COLUMNS = ("what", "of", "microbatches a second and device")
FAR = {Size.SMOKE: (), Size.DEFAULT: (10, 100), Size.FULL: (10, 100)}
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 3, Size.FULL: 8}
A_STEP = {Size.SMOKE: 4, Size.DEFAULT: 32, Size.FULL: 64}
"""Microbatches, where time is real."""


def run(size: Size) -> Result:
    """Rates of a machine with every part, of one with room for all of them, and of a pipeline far apart."""
    steps, each = STEPS[size], A_STEP[size]
    far = [{"kind": kind, "steps": steps, "of": mb} for mb in FAR[size] for kind in ("alone", "pipeline")]
    same: list[dict[str, Any]] = [{"kind": "same", "steps": 2, "of": 4}]
    played = play_cases("solo", [*far, *same])
    here = [{"kind": kind, "steps": steps, "of": each} for kind in ("swapped", "resident", "graphs")]
    timed = [play_cases("solo", [case])[0] for case in here]  # one after the other: they share no core
    rates = {
        (case["kind"], case["of"]): one["rate"] for case, one in zip([*far, *here], [*played[:-1], *timed], strict=True)
    }
    rows: list[list[Cell]] = [[kind, of, round(rate, 4)] for (kind, of), rate in rates.items()]
    over = {mb: round(rates["alone", mb] / rates["pipeline", mb], 3) for mb in FAR[size]}
    summary: dict[str, Any] = {
        "over_resident": round(rates["swapped", each] / rates["resident", each], 3),
        "over_pipeline_50_100": over.get(10),
        "over_pipeline_50_100_100mb": over.get(100),
        "over_kept_graphs": round(rates["swapped", each] / rates["graphs", each], 3),
        "max_abs_diff": played[-1]["max_abs_diff"],
        **{f"{name}_bar": bar for name, bar in BARS.items()},
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=(_NOTE,))


_NOTE = (
    "alone and pipeline: simulated, of so many MB a part; moving one to its device takes no time there; two of eight "
    "machines alone are played, which carry and compute what each of eight would; swapped: two of four stages on the "
    "device, resident: all four, computed again in the backward like those; graphs: all four, nothing computed again; "
    "these of so many microbatches a step"
)
