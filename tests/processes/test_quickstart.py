"""The main job as a new user starts it: it trains, reports, leaves what it says, and nothing else."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


@pytest.mark.promise("no process, socket or file is left")
def test_quickstart_trains_reports_and_leaves_nothing_else(tmp_path: Path) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    swarm = Path(sys.executable).with_name("swarm")
    shape = ["--steps", "3", "--peers", "2", "--stages", "2", "--trainers", "1"]
    ended = subprocess.run(
        [swarm, "quickstart", *shape, "--out", out, "--report", tmp_path / "report.json"],
        cwd=tmp_path, env=os.environ | {"TMPDIR": str(scratch)}, capture_output=True, text=True,
    )  # fmt: skip
    logs = "".join(f"\n{log}:\n{log.read_text()[-2000:]}" for log in out.rglob("*.log"))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + logs
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_reason"], report["steps"], report["peers"], report["stages"]) == ("completed", 3, 2, 2)
    none = ("microbatches_lost", "microbatches_duplicated", "replicas_digest_mismatches")
    assert [report[key] for key in none] == [0, 0, 0]
    figures = ("loss_first", "loss_last", "eval_first", "eval_last", "tokens_per_s", "seconds_to_first_step")
    assert all(math.isfinite(report[key]) and report[key] > 0 for key in figures), report
    assert report["microbatches_committed"] > 0
    assert report["bytes_per_step"] > 0
    assert (out / "loss.svg").read_text().startswith("<svg")
    assert "done: 3 steps, training loss" in ended.stdout
    assert "swarm sample " in ended.stdout
    assert ended.stdout.count("look: ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "run", "scratch"]
    assert list(scratch.rglob("*")) == []
