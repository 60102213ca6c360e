"""Do adapters train in a swarm whose replicas are killed as they do alone, and load in peft with the same logits?

For three shapes of model and two forms of the frozen weights: a swarm of processes trains adapters, two replicas are
killed, and one process repeats it. Then the frozen weights are hashed again, the adapters are exported and loaded by
peft beside the very weights that were frozen, and the bytes of averaging are compared with those of the adapters.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from swarm.models.lora_config import BaseDType

KEYS = (
    "runs", "runs_bit_equal", "losses_fallen", "bases_changed", "replicas_killed", "adapters_differing",
    "peft_max_abs_diff", "lora_bytes_ratio", "lora_bytes_ratio_bar",
)  # fmt: skip
COLUMNS = ("model", "frozen in", "figure", "value")
BASES: tuple[BaseDType, ...] = ("bfloat16", "nf4")
BAR = 1.02
CLOSE = 1e-4
"""How far peft's logits, whose products it adds in another order, may be from ours in float32."""


def run(size: Size) -> Result:
    """Train each shape with each base."""
    from tests.benchmarks._lora_run import Adapted, adapt
    from tests.benchmarks.hf import TRAINED

    shapes, bases = (TRAINED[:1], BASES[1:]) if size is Size.SMOKE else (TRAINED, BASES)
    steps = {Size.SMOKE: 3, Size.DEFAULT: 6, Size.FULL: 20}[size]
    rows: list[list[Cell]] = []
    found: list[Adapted] = []
    with tempfile.TemporaryDirectory(prefix="lora-") as scratch:
        for name in shapes:
            for base in bases:
                print(f"a swarm trains adapters of {name} beside {base}, and replicas are killed …", file=sys.stderr)
                one = adapt(Path(scratch) / f"{name}-{base}", name, base, steps)
                found.append(one)
                rows += [[name, base, figure, value] for figure, value in one.figures().items()]
    summary: dict[str, Any] = {
        "runs": len(found),
        "runs_bit_equal": sum(one.equal for one in found),
        "losses_fallen": sum(one.compared.last_loss < one.compared.first_loss for one in found),
        "bases_changed": sum(one.bases_changed for one in found),
        "replicas_killed": sum(len(one.killed) for one in found),
        "adapters_differing": sum(one.logits > CLOSE for one in found),
        "peft_max_abs_diff": max(one.logits for one in found),
        "lora_bytes_ratio": max(one.bytes_ratio for one in found),
        "lora_bytes_ratio_bar": BAR,
    }
    notes = [
        "files of random weights; reproducible, so sums are float64 and a reduced vector float32; after steps 1 and 2 "
        "one replica of each stage is killed; weights, losses and digests against one process",
        "lora_bytes_ratio: bytes that replicas sent in the rounds of two over 2(R-1)/R of the adapters at those sizes; "
        "gaps of the flat vector are in it; the largest of all runs",
        "peft: the adapters exported by --adapter, loaded beside step 0 exported by --merge, float32, against our own "
        "model; it is " + ("peft itself" if found[0].by_peft else "not installed here, so merged weights stand for it"),
    ]
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=notes)
