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
KEYS = (
    *(f"{mode}_bytes" for mode in MODES), "full_fp32_bytes_bar", "full_bf16_bytes_bar", "parameters",
)  # fmt: skip
BARS = {"full_fp32_bytes_bar": 17.0, "full_bf16_bytes_bar": 19.0}
COLUMNS = ("mode", "predicted", "holds", "closing", "backward", "part")
WIDTHS = {Size.SMOKE: 256, Size.DEFAULT: 1024, Size.FULL: 2048}


def run(size: Size) -> Result:
    """Bytes a parameter of a part in every mode, and what is predicted."""
    found = {mode: _measured(mode, WIDTHS[size]) for mode in MODES}
    rows = [
        (mode, one["predicted"], one["holds"], one["closing"], one["backward"], f"{one['parameters'] / 1e6:.1f} M")
        for mode, one in found.items()
    ]
    summary: dict[str, Any] = {f"{mode}_bytes": max(one["holds"], one["closing"]) for mode, one in found.items()}
    summary |= BARS | {"parameters": found[MODES[0]]["parameters"]}
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary=summary,
        notes=(
            "bytes a parameter; MODE_bytes is the larger of holds and closing",
            "holds and closing: a peer keeps what backward has freed, so it stays as large as that",
            "the step's mean, 4 bytes, and the round's copy of the sum, 4 more, are the averaging's and not counted",
        ),
    )


def _measured(mode: str, width: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks._memory_part", mode, str(width)]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures
