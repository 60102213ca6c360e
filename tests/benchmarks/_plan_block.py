"""How fast this machine computes a block, for the benchmark ``plan``: ``python -m tests.benchmarks._plan_block MODEL``.

What ``swarm doctor`` measures, in a process of its own: with JSON of a ``[model]`` and of a microbatch's rows it prints
the operations a second of one thread. Several at once tell what the processors have together.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.benchmarks.runner import ROOT

WITHIN_S = 1.5


def measure(model: dict[str, Any], rows: int) -> float:
    """Return operations a second of forward and backward of a block, the best of some."""
    from peers.doctor.compute import DeviceBench
    from swarm.clock import SystemClock
    from swarm.config import parse_manifest
    from swarm.ids import stage_part
    from swarm.models.registry import family_of
    from swarm.planning.costs import training_flops_per_token

    document = {
        "model": model, "split": {"stages": 1}, "batch": {"microbatch_size": rows},
        "tokenizer": {"digest": "0" * 64},
    }  # fmt: skip
    manifest = parse_manifest(document, "the benchmark plan")
    bench = DeviceBench(manifest, "cpu", 1, SystemClock())
    part, family = stage_part(0), family_of(manifest.model)
    spec = next(one for one in family.parts(manifest.split) if one.name == part)
    tokens = rows * manifest.model.context
    operations = tokens * training_flops_per_token(manifest.model, spec, manifest.model.context)
    return operations / bench.speed(part, WITHIN_S).stage_s


def measured_at_once(model: dict[str, Any], rows: int, processes: int) -> list[float]:
    """Return what so many processes find that measure at the same time. Raises RuntimeError where one fails."""
    command = (sys.executable, "-m", "tests.benchmarks._plan_block", json.dumps([model, rows]))
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        told = [one.communicate(timeout=120)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        raise RuntimeError("a block could not be measured: its process says why")
    return [float(json.loads(one.splitlines()[-1])) for one in told]


if __name__ == "__main__":
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
