"""Scenarios that come with the project, played among containers through the command line, each with its own verdict.

Three a run, which ones the commit decides: all of them take a quarter of an hour. ``SCENARIOS="nat oom"`` in the
environment plays these instead; ``python -m tests.benchmarks scenarios`` plays every one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.process, pytest.mark.timeout(900)]

# Of the others three take five to fifteen minutes, and slow-region needs a kernel that delays packets.
SHORT = (
    "bootstrap-dies", "region-partition", "whole-stage-dies", "odd-faults", "nat", "oom", "disk-full", "joiner-storm",
    "rolling-upgrade", "spot-market", "rebalance", "strangers",
)  # fmt: skip
AT_A_TIME = 3


def chosen(commit: str) -> list[str]:
    """Return the scenarios that are played for a commit: each is as likely as any other."""
    return sorted(SHORT, key=lambda name: hashlib.sha256(f"{commit} {name}".encode()).digest())[:AT_A_TIME]


def _commit() -> str:
    """Return the commit of this checkout; nothing outside a clone or where there is no git."""
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip()


@pytest.mark.parametrize("name", os.environ.get("SCENARIOS", "").split() or chosen(_commit()))
def test_scenario_is_kept(name: str, image: str, nemesis: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "peers.cli", "chaos", str(ROOT / "docker" / "scenarios" / f"{name}.toml")]
    command += ["--on", "containers", "--image", image, "--out", str(tmp_path / "play")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "play" / "report.json").read_text())
    assert (report["verdict"], report["problems"]) == ("kept", [])
    assert report["faults"] > 0
    assert (report["lost"], report["duplicated"], report["digest_mismatches"]) == (0, 0, 0)
