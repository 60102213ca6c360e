"""Do stages that share their layers at first, and then part, learn as much from as many tokens as those that never did?

Simulated runs of the product's own peers (:mod:`tests.benchmarks._delink_case`): one from scratch and one that parts,
with the same text, seed and schedule.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

KEYS = ("switch_difference", "switch_difference_bar", "loss_over_scratch", "loss_over_scratch_bar")
COLUMNS = ("seed", "from scratch", "parted", "÷ scratch", "difference at the switch")
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}
STEPS = {Size.SMOKE: (6, 3), Size.DEFAULT: (200, 40), Size.FULL: (300, 40)}


def run(size: Size) -> Result:
    """Loss at equal tokens of a run that parts ÷ one from scratch, and what the switch changes in a stage's state."""
    steps, at = STEPS[size]
    cases = [{"seed": seed, "steps": steps, "at": one} for seed in range(SEEDS[size]) for one in (at, 0)]
    played = play_cases("delink", cases)
    rows: list[list[Cell]] = []
    for parted, scratch in zip(played[::2], played[1::2], strict=True):
        ratio = parted["loss"] / scratch["loss"]
        rows.append([parted["seed"], scratch["loss"], parted["loss"], ratio, parted["difference"]])
    summary: dict[str, Any] = {
        "switch_difference": max(one["difference"] for one in played[::2]),
        "switch_difference_bar": 0.0,
        "loss_over_scratch": round(max(float(row[3] or 0.0) for row in rows), 4),
        "loss_over_scratch_bar": 1.0,
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=_notes(size))


def _notes(size: Size) -> tuple[str, ...]:
    steps, at = STEPS[size]
    return (
        f"nats a token on text that no run saw, after {steps} steps; stages share their layers for {at} of them",
        "difference: the largest of any weight or moment of any stage from that of a run that goes on sharing, right "
        "after they have parted",
    )
