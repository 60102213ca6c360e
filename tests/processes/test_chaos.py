"""Scenarios played through the command line, as people do, among processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.harness.expect import LONG_S

pytestmark = pytest.mark.process

SCENARIO = """
name = "short"
proves = "A stage host that is killed is done without."
seed = 1
[swarm]
stages = 2
replicas = {replicas}
trainers = 1
[swarm.manifest.batch]
microbatches_per_step = 4
[swarm.manifest.run]
copies = 0
[until]
steps = 9
{rest}
"""
KILL = """
[[fault]]
do = "kill"
peers = ["host-1-1"]
on = { event = "StepClosed", where = { step = 4 } }
[expect]
looked_at = ["I13", "I14"]
happened = { PeerLost = 1 }
at_most = { lost = 0, duplicated = 0, digest_mismatches = 0 }
"""
TOO_MUCH = """
[[fault]]
label = "never"
do = "kill"
peers = ["host-1-0"]
on = { event = "StepClosed", where = { step = 13 } }
[expect]
at_least = { steps = 1000 }
"""


def _play(root: Path, text: str) -> tuple[int, list[str], dict[str, Any]]:
    (root / "short.toml").write_text(text)
    command = [sys.executable, "-m", "peers.cli", "chaos", str(root / "short.toml"), "--on", "processes"]
    command += ["--out", str(root / "play"), "--report", str(root / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (root / "r.json").exists(), done.stdout + done.stderr
    return done.returncode, done.stdout.splitlines(), json.loads((root / "r.json").read_text())


@pytest.mark.long
def test_a_scenario_is_played_judged_and_drawn(tmp_path: Path) -> None:
    code, lines, report = _play(tmp_path, SCENARIO.format(replicas=2, rest=KILL))
    assert (code, report["verdict"], report["problems"]) == (0, "kept", []), lines
    assert report["faults_by_kind"] == {"kill": 1}
    assert (report["faults"], report["steps"], report["lost"], report["duplicated"]) == (1, 9, 0, 0)
    assert report["participation"] > 0.5
    assert report["throughput_retained"] is not None
    assert report["invariants"]["I5"]["looked"] > 0
    struck = next(number for number, line in enumerate(lines) if "kill host-1-1" in line)
    assert any("host-1-1 is missed" in line for line in lines[struck:])
    svg = ElementTree.fromstring((tmp_path / "play" / "picture.svg").read_text())
    titles = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert "kill: kill-1" in titles
    assert not (tmp_path / "play" / "homes").exists(), "what was kept is not looked at"


@pytest.mark.long
def test_a_bar_that_is_missed_and_a_fault_that_does_not_happen_are_told_and_exit_with_1(tmp_path: Path) -> None:
    code, lines, report = _play(tmp_path, SCENARIO.format(replicas=1, rest=TOO_MUCH))
    assert (code, report["verdict"]) == (1, "broken")
    told = "\n".join(report["problems"])
    assert "never: kill did not fire; 0 of 1 events seen" in told
    assert "steps is 9, at least 1000 was expected" in told
    assert any(line.startswith("BROKEN: ") for line in lines)
    assert (tmp_path / "play" / "homes").is_dir(), "evidence stays"


@pytest.mark.long
def test_interrupted_play_ends_everybody_and_writes_its_report(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(SCENARIO.format(replicas=1, rest=""))
    command = [sys.executable, "-m", "peers.cli", "chaos", str(tmp_path / "short.toml"), "--on", "processes"]
    command += ["--out", str(tmp_path / "play")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as play:
        assert play.stdout is not None
        told = next(line for line in play.stdout if "bootstrap" in line)
        os.killpg(play.pid, signal.SIGINT)  # as a terminal does
        rest = play.stdout.read()
        assert play.wait(LONG_S) == 130, told + rest
    assert json.loads((tmp_path / "play" / "report.json").read_text())["verdict"] != "kept"
