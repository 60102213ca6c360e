"""Scenarios that come with the project, played among containers through the command line, each with its own verdict.

The liars in each run, and one that the commit draws: all of them take half an hour. ``SCENARIOS="nat oom"`` in the
environment plays these instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.budget import drawn_first
from tests.harness.drawn import commit
from tests.harness.fired import FIRED
from tests.harness.sources import ROOT

LONG_S = 5400
pytestmark = [pytest.mark.docker, pytest.mark.process, pytest.mark.timeout(LONG_S)]

# Of the others three take five to fifteen minutes, and slow-region needs a kernel that delays packets.
DRAWN = (
    "bootstrap-dies", "region-partition", "whole-stage-dies", "odd-faults", "nat", "oom", "disk-full", "joiner-storm",
    "rolling-upgrade", "spot-market", "rebalance", "strangers", "poison",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", os.environ.get("SCENARIOS", "").split() or ["liars", *drawn_first(DRAWN, commit())[:1]]
)
def test_scenario_is_kept(
    name: str, image: str, nemesis: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, "-m", "peers.cli", "chaos", str(ROOT / "docker" / "scenarios" / f"{name}.toml")]
    command += ["--on", "containers", "--image", image, "--out", str(tmp_path / "play")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "play" / "report.json").read_text())
    assert (report["verdict"], report["problems"]) == ("kept", [])
    assert report["faults"] > 0
    record_property(FIRED, report["faults_by_kind"])
    assert (report["lost"], report["duplicated"], report["digest_mismatches"]) == (0, 0, 0)
