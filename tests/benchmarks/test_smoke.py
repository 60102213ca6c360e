"""Every benchmark at its smallest: it runs to its end, and its summary has the figures that its module declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import pytest

from tests.benchmarks.runner import ROOT, declared_keys, discover, modules

KNOWN = discover()
ABOUT = {
    "benchmark", "full", "smoke", "date", "machine", "commit", "command", "seconds", "columns", "rows", "notes",
}  # fmt: skip
"""What the runner adds to every summary; and ``tables`` where there are more than one."""
SAME = {"max_abs_diff": 0.0, "same_digests_in_every_step": True}
MUST: Mapping[str, Mapping[str, object]] = {
    "trajectory": {
        **{f"overlap_{key}": value for key, value in SAME.items()},
        "kills": 2, "kills_with_two_steps_open": 1, "lost": 0, "duplicated": 0, "digest_mismatches": 0,
    },
    "hf": {"swarms_bit_equal": 1, "replicas_killed": 2, "exports_differing": 0},
    "lora": {"runs_bit_equal": 1, "replicas_killed": 2, "bases_changed": 0, "adapters_differing": 0},
    "merging-models": {"unit_equal": 1, "cases": 1},
    "solo": {"max_abs_diff": 0.0},
    "delink": {"switch_difference": 0.0},
    "tensor": {"degrees_equal": 1},
    "variants": {"bytes_over_dense": 1.0},
    "liars": {"lies": 2, "runs_stopped": 0, "honest_accused": 0},
}  # fmt: skip
"""What real processes promise at any size: the bits of the plain loop, and of a run in which nobody dies."""


@pytest.mark.smoke
@pytest.mark.parametrize("name", [module.replace("_", "-") for module in modules()])
def test_smoke_of_a_benchmark_ends_well_and_gives_the_figures_declared(name: str) -> None:
    assert name in KNOWN, f"{name} cannot run here, or has no run"
    declared = declared_keys(KNOWN[name])
    assert declared, f"{name} has no KEYS"
    command = [sys.executable, "-m", "tests.benchmarks", name, "--smoke"]
    # Sockets of hivemind and of torch's memory manager outlive processes that are killed: they go with their directory.
    with tempfile.TemporaryDirectory(prefix="") as scratch:
        environment = os.environ | {"TMPDIR": scratch}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["benchmark"], found["smoke"], found["full"]) == (name, True, False)
    assert found.keys() - {"tables"} == ABOUT | set(declared)
    assert found["rows"]
    assert {key: found[key] for key in MUST.get(name, ())} == MUST.get(name, {})
