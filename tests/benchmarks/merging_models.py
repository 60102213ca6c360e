"""Do models that two sites trained apart from one base merge into one that is good for both?

Sites go on from one checkpoint of a simulated run, one with code and one with tables, and ``swarm merge`` makes one
model of theirs by preference (:mod:`tests.benchmarks._merging_models_case`).
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

KEYS = ("worse_than_linear", "worse_than_linear_bar", "unit_equal", "cases", "worst_over_linear", "joint_over_learnt",
        "trained_over_learnt")  # fmt: skip
COLUMNS = ("seed", "preference for code", "model", "code", "tables", "by preference", "÷ linear")
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}
STEPS = {Size.SMOKE: (4, 3), Size.DEFAULT: (60, 120), Size.FULL: (60, 160)}
PREFERENCES = {Size.SMOKE: (0.5,), Size.DEFAULT: (0.3, 0.5, 0.7), Size.FULL: (0.3, 0.5, 0.7)}


def run(size: Size) -> Result:
    """Loss by preference of merged models: learnt ÷ linear, beside the average, joint training and the sites alone."""
    preferences = PREFERENCES[size]
    cases = [{"seed": seed, "steps": STEPS[size], "preferences": preferences} for seed in range(SEEDS[size])]
    played = play_cases("merging_models", cases)
    rows: list[list[Cell]] = []
    of_learnt = dict[str, list[float]](linear=[], joint=[], trained=[])
    for one in played:
        for preference in preferences:
            found = _by_preference(one["losses"], preference)
            linear = found["linear"][2]
            rows += [[one["seed"], preference, name, *losses, losses[2] / linear] for name, losses in found.items()]
            for name, ratios in of_learnt.items():
                ratios.append(found[name][2] / found["learnt"][2])
    over_linear = [1 / ratio for ratio in of_learnt["linear"]]
    summary: dict[str, Any] = {
        "worse_than_linear": sum(ratio > 1.0 for ratio in over_linear),
        "worse_than_linear_bar": 0,
        "unit_equal": int(all(one["unit_equal"] for one in played)),
        "cases": len(over_linear),
        "worst_over_linear": round(max(over_linear), 4),
        "joint_over_learnt": round(max(of_learnt["joint"]), 4),
        "trained_over_learnt": round(max(of_learnt["trained"]), 4),
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=_notes(size))


def _by_preference(losses: dict[str, list[float]], preference: float) -> dict[str, list[float]]:
    """(code, tables, by preference) of each model."""
    names = {
        "base": "base", "site with code": "code", "site with tables": "tables", "average": "linear 0.5",
        "linear": f"linear {preference}", "learnt": f"learnt {preference}", "trained": f"trained {preference}",
        "joint": "joint",
    }  # fmt: skip
    return {
        name: [*losses[key], preference * losses[key][0] + (1 - preference) * losses[key][1]]
        for name, key in names.items()
    }


def _notes(size: Size) -> tuple[str, ...]:
    before, after = STEPS[size]
    return (
        f"nats a token on text that no run saw; the base has {before} steps on prose and a little code, each site "
        f"{after} more on its own text, joint {after} with both texts in batches twice as large: the tokens of both",
        "learnt: what each tensor of each site weighs, on a tenth of each text that no run saw; linear and average use "
        "none of that; trained: the linear merge after as many steps of Adam on the same text, of all weights",
        "joint_over_learnt and trained_over_learnt are the largest: below 1 each is better than the learnt merge",
    )
