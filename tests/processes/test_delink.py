"""Stages of real processes share their layers and part, while one is killed in the very close with which they do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.expect import LONG_S
from tests.harness.fired import FIRED

pytestmark = [pytest.mark.process, pytest.mark.long]

SCENARIO = """
name = "delink"
proves = "A host that is killed in the close with which stages part changes nothing."
seed = 3
[swarm]
stages = 2
replicas = 2
trainers = 1
[swarm.manifest.batch]
microbatches_per_step = 4
[swarm.manifest.model]
share = "stages"
delink_at = 5
[until]
steps = 10
[[fault]]
label = "death"
do = "kill"
peers = ["host-1-1"]
on = { event = "SumTaken", peer = "host-1-1", where = { step = 5 } }
[expect]
happened = { PeerLost = 1 }
at_most = { lost = 0, duplicated = 0, digest_mismatches = 0 }
"""


def test_host_killed_as_stages_part_changes_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "delink.toml").write_text(SCENARIO)
    command = [sys.executable, "-m", "peers.cli", "chaos", str(tmp_path / "delink.toml"), "--on", "processes"]
    command += ["--keep", "--out", str(tmp_path / "play"), "--report", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (tmp_path / "r.json").exists(), done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (done.returncode, report["verdict"], report["problems"]) == (0, "kept", []), done.stdout
    record_property(FIRED, report["faults_by_kind"])
    assert (report["faults_by_kind"], report["steps"], report["lost"], report["duplicated"]) == ({"kill": 1}, 10, 0, 0)
    assert report["invariants"]["I3"]["looked"] > 0
    digests = [json.loads(line)["digests"] for line in _closed(tmp_path / "play")]
    cuts = [sorted(one) for one in digests]
    assert cuts == [*[["ends", "shared-2"]] * 4, *[["ends", "stage-0", "stage-1"]] * 6]


def _closed(play: Path) -> list[str]:
    (events,) = (play / "homes" / "trainer-0").rglob("events.jsonl")
    return [line for line in events.read_text().splitlines() if '"kind":"StepClosed"' in line]
