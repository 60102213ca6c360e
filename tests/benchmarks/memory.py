"""What does an optimizer take for each parameter, and what does it cost in loss, beside AdamW?

Bytes are counted in a stage of the product's own; losses are of simulated runs of its own peers
(:mod:`tests.benchmarks._memory_case`) with the same text, seed and schedule.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

NAMES = ("adamw", "adafactor", "sgd", "muon")
BARS = {"adafactor_over_adamw": 0.55, "adafactor_loss_over_adamw": 1.03}
KEYS = (*BARS, *(f"{name}_bar" for name in BARS))
COLUMNS = ("seed", "optimizer", "bytes a parameter", "loss", "÷ AdamW")
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 150, Size.FULL: 300}


def run(size: Size) -> Result:
    """Bytes of state and gradients a parameter, and loss at equal tokens, by optimizer."""
    names = NAMES if size is Size.FULL else NAMES[:2]
    cases = [{"name": name, "seed": seed, "steps": STEPS[size]} for seed in range(SEEDS[size]) for name in names]
    rows, losses, lightest = list[list[Cell]](), list[float](), 0.0
    played = play_cases("memory", cases)
    for one in played:
        adamw = next(other for other in played if (other["name"], other["seed"]) == ("adamw", one["seed"]))
        rows.append([one["seed"], one["name"], one["bytes"], one["loss"], one["loss"] / adamw["loss"]])
        if one["name"] == "adafactor":
            losses.append(one["loss"] / adamw["loss"])
            lightest = one["bytes"] / adamw["bytes"]
    summary: dict[str, Any] = {
        "adafactor_over_adamw": round(lightest, 4),
        "adafactor_loss_over_adamw": round(max(losses), 4),
        **{f"{name}_bar": bar for name, bar in BARS.items()},
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=(_NOTE.format(steps=STEPS[size]),))


_NOTE = (
    "bytes: weights, what the optimizer keeps and the sum of gradients, of a stage of width 512; loss: nats a token on "
    "text that no run saw, after {steps} steps, of the largest of seeds in the figure"
)
