"""What a trained part weighs a parameter, by kind and for every optimizer and precision, measured in processes of
their own.

A stage takes two steps from one microbatch each, as a replica does: forward, backward, accumulate, prepare, swap. What
it *holds* is the resident set with the step open, less that before the part was made; *closing* is the largest resident
set from prepare to swap, less the step's mean. *Backward* is the largest with one microbatch's gradients.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.benchmarks.runner import ROOT, Result, Size

MODES = ("full_fp32", "full_bf16", "sgd_fp32", "muon_fp32")
ADAPTED = ("lora_bf16", "lora_nf4")
"""Adapters of rank 8 beside frozen weights: per frozen weight."""
BARS = {"full_fp32_bytes_bar": 17.0, "full_bf16_bytes_bar": 19.0, "lora_nf4_base_bytes_bar": 0.7}
KEYS = (
    *(f"{mode}_bytes" for mode in MODES), *(f"{mode}_base_bytes" for mode in ADAPTED), *BARS, "parameters",
)  # fmt: skip
COLUMNS = ("mode", "predicted", "frozen", "holds", "closing", "backward", "part")
WIDTHS = {Size.SMOKE: 256, Size.DEFAULT: 1024, Size.FULL: 2048}


def run(size: Size) -> Result:
    """Bytes a parameter of a part in every mode, and what is predicted."""
    found = {mode: _measured(mode, WIDTHS[size]) for mode in (*MODES, *ADAPTED)}
    kinds = ("predicted", "base", "holds", "closing", "backward")
    rows = [
        (mode, *(one.get(kind) for kind in kinds), f"{one['parameters'] / 1e6:.1f} M") for mode, one in found.items()
    ]
    summary: dict[str, Any] = {f"{mode}_bytes": max(found[mode]["holds"], found[mode]["closing"]) for mode in MODES}
    summary |= {f"{mode}_base_bytes": found[mode]["base"] for mode in ADAPTED}
    summary |= BARS | {"parameters": found[MODES[0]]["parameters"]}
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary=summary,
        notes=(
            "bytes a parameter; MODE_bytes is the larger of holds and closing",
            "lora_*: in bfloat16; frozen and predicted are the frozen weights alone, the others all that is held",
            "holds and closing: a peer keeps what backward has freed, so it stays as large as that",
            "the step's mean, 4 bytes, and the round's copy of the sum, 4 more, are the averaging's and not counted",
        ),
    )


def _measured(mode: str, width: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks._memory_part", mode, str(width)]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures
