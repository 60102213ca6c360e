"""What one late replica costs those that train apart: each close waits for all, or for a quorum and a grace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Result, Size

QUORUM = 0.75
LATE: dict[str, dict[str, float]] = {
    "none": {},
    "paused_2s": {"paused_s": 2.0},
    "paused_4s": {"paused_s": 4.0},
    "thinner_5": {"thinner": 5.0},
    "thinner_20": {"thinner": 20.0},
}
"""By how much the last replica is late at each close."""
SHAPES: dict[Size, dict[str, int]] = {
    Size.SMOKE: {"replicas": 4, "inner": 2, "steps": 4},
    Size.DEFAULT: {"replicas": 8, "inner": 8, "steps": 10},
    Size.FULL: {"replicas": 8, "inner": 8, "steps": 22},
}
KEYS = (
    "steps", "quorum", "lost", "duplicated", "digest_mismatches", "absent",
    *(f"{figure}_{name}" for figure in ("all", "quorum", "faster") for name in LATE),
)  # fmt: skip
COLUMNS = (
    "late", "quorum", "step_s", "tokens_per_s", "of_none_late", "left_out", "late_share", "loss", "lost", "duplicated",
)  # fmt: skip


async def run(size: Size) -> Result:
    """Tokens a second with one replica late at each close, waiting for all beside a quorum and a grace."""
    return to_result(SHAPES[size], await play_cases("merging", list_cases(size)))


def list_cases(size: Size) -> list[dict[str, Any]]:
    """Return what is played: each lateness without a quorum and with it."""
    return [{**SHAPES[size], **late, "quorum": quorum} for late in LATE.values() for quorum in (1.0, QUORUM)]


def to_result(shape: dict[str, int], played: Sequence[dict[str, Any]]) -> Result:
    """Return the table and the summary of what was played, in the order of :func:`list_cases`."""
    names = [name for name in LATE for _ in range(2)]
    best = played[0]["tokens_per_s"]
    rows = [
        [
            name,
            run["quorum"],
            run["step_s"],
            run["tokens_per_s"],
            round(run["tokens_per_s"] / best, 4),
            run["left_out"],
            run["late_share"],
            run["loss"],
            run["lost"],
            run["duplicated"],
        ]
        for name, run in zip(names, played, strict=True)
    ]
    summary: dict[str, Any] = {"steps": shape["steps"], "quorum": QUORUM}
    summary |= {key: sum(run[key] for run in played) for key in ("lost", "duplicated", "digest_mismatches", "absent")}
    for index, name in enumerate(LATE):
        waits, goes_on = played[2 * index], played[2 * index + 1]
        summary[f"all_{name}"] = waits["tokens_per_s"]
        summary[f"quorum_{name}"] = goes_on["tokens_per_s"]
        summary[f"faster_{name}"] = round(goes_on["tokens_per_s"] / waits["tokens_per_s"], 3)
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=NOTES)


NOTES = (
    "simulated: virtual time, one stage, devices that take 0.3 s forward and 0.6 s backward a microbatch, parts of "
    "10 MB, links of 100 Mbit/s and 10 ms; the last replica stands still from each step's last loss on, or has a link "
    "so many times thinner; peers, messages and averaging are the product's own",
    "step_s and tokens_per_s: of all steps but the first, in which nothing is known of links, and the last, whose "
    "close waits for all; a replica that has missed three closes in a row is waited for in the fourth",
    "of_none_late: of the first row; left_out: closes without some; late_share: its share of the microbatches; loss: "
    "of the last step, after the same tokens",
)
