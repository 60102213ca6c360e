"""What does an optimizer or a sparse model take for each parameter, and what does it cost in loss?

Optimizers stand beside AdamW: their bytes are counted in a stage of the product's own. A sparse model stands beside
a narrower dense one of as many bytes, which are those of all parts, each at the better of two learning rates. Losses
are of simulated runs of the product's own peers (:mod:`tests.benchmarks._memory_case`) with the same text and steps.
"""

from __future__ import annotations

import itertools
from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")
MODELS = ("sparse", "narrower")
BARS = {"adafactor_over_adamw": 0.55, "adafactor_loss_over_adamw": 1.03, "sparse_loss_over_narrower": 1.0}
KEYS = (*BARS, *(f"{name}_bar" for name in BARS), "sparse_bytes_over_narrower")
COLUMNS = ("seed", "optimizer or model", "learning rate", "bytes a parameter", "loss", "loss ÷", "of")
RATES = (6e-3, 1.2e-2)
"""Of models: a sparse one learns best at higher rates than the others."""
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 150, Size.FULL: 300}


def run(size: Size) -> Result:
    """Bytes of state and gradients a parameter, and loss at equal tokens, by optimizer and by model."""
    names = (*(OPTIMIZERS if size is Size.FULL else OPTIMIZERS[:2]), *MODELS)
    cases: list[dict[str, Any]] = []
    for seed, name in itertools.product(range(SEEDS[size]), names):
        rates = [{"rate": rate} for rate in RATES] if name in MODELS else [{}]
        cases += [{"name": name, "seed": seed, "steps": STEPS[size], **rate} for rate in rates]
    found = sorted(play_cases("memory", cases), key=lambda one: (one["seed"], names.index(one["name"]), one["loss"]))
    played = {(one["name"], one["seed"]): one for one in reversed(found)}
    rows, losses, light = list[list[Cell]](), dict[str, list[float]](), dict[str, float]()
    for one in found:
        name, seed = one["name"], one["seed"]
        beside = played["narrower" if name in MODELS else "adamw", seed]
        rows.append([seed, name, one["rate"], one["bytes"], one["loss"], one["loss"] / beside["loss"], beside["name"]])
        if one is not played[name, seed]:
            continue
        losses.setdefault(name, []).append(one["loss"] / beside["loss"])
        light[name] = one["bytes"] / beside["bytes"]
    summary: dict[str, Any] = {
        "adafactor_over_adamw": round(light["adafactor"], 4),
        "adafactor_loss_over_adamw": round(max(losses["adafactor"]), 4),
        "sparse_loss_over_narrower": round(max(losses["sparse"]), 4),
        "sparse_bytes_over_narrower": round(light["sparse"], 4),
        **{f"{name}_bar": bar for name, bar in BARS.items()},
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=(_NOTE.format(steps=STEPS[size]),))


_NOTE = (
    "bytes: weights, what the optimizer keeps and the sum of gradients, of a stage of width 512; of models those of "
    "all parts, a parameter of the model that the sparse one has some weights of; loss: nats a token on text that no "
    "run saw, after {steps} steps, of models at the better rate, of the largest of seeds in the figure"
)
