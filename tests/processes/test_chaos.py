"""A scenario played through the command line, as people do, among processes; verdicts are in ``unit/chaos``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.expect import LONG_S
from tests.harness.fired import FIRED

pytestmark = [pytest.mark.process, pytest.mark.long]

SCENARIO = """
name = "short"
proves = "Links are slow, one host is cut off, one stands still, one is killed: nothing is lost."
seed = 1
[swarm]
stages = 2
replicas = 2
trainers = 1
[swarm.manifest.batch]
microbatches_per_step = 4
[swarm.manifest.run]
copies = 0
[until]
steps = 14
[[fault]]
do = "slow_links"
peers = ["host-*"]
others = ["trainer-*"]
latency_ms = 15
jitter_ms = 5
on = { event = "StepClosed", where = { step = 4 } }
[[fault]]
label = "cut"
do = "partition"
peers = ["host-1-0"]
others = ["bootstrap", "host-0-*", "trainer-*"]
seconds = 1.5
on = { event = "StepClosed", peer = "trainer-0", where = { step = 5 } }
[[fault]]
label = "pause"
do = "pause"
peers = ["host-0-0"]
seconds = 1.5
on = { event = "StepClosed", peer = "trainer-0", nth = 2, after = "cut" }
[[fault]]
label = "death"
do = "kill"
peers = ["host-1-1"]
on = { event = "StepClosed", peer = "trainer-0", nth = 2, after = "pause" }
[expect]
looked_at = ["I13", "I14"]
happened = { PeerLost = 1 }
at_most = { lost = 0, duplicated = 0, digest_mismatches = 0 }
"""


def test_a_scenario_is_played_judged_and_drawn(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    (tmp_path / "short.toml").write_text(SCENARIO)
    command = [sys.executable, "-m", "peers.cli", "chaos", str(tmp_path / "short.toml"), "--on", "processes"]
    command += ["--out", str(tmp_path / "play"), "--report", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (tmp_path / "r.json").exists(), done.stdout + done.stderr
    code, lines, report = done.returncode, done.stdout.splitlines(), json.loads((tmp_path / "r.json").read_text())
    assert (code, report["verdict"], report["problems"]) == (0, "kept", []), lines
    record_property(FIRED, report["faults_by_kind"])
    assert report["faults_by_kind"] == {"kill": 1, "partition": 1, "pause": 1, "slow_links": 1}
    assert (report["faults"], report["steps"], report["lost"], report["duplicated"]) == (4, 14, 0, 0)
    assert report["participation"] > 0.5
    assert report["throughput_retained"] is not None
    assert report["invariants"]["I5"]["looked"] > 0
    struck = next(number for number, line in enumerate(lines) if "kill host-1-1" in line)
    assert any("host-1-1 is missed" in line for line in lines[struck:])
    svg = ElementTree.fromstring((tmp_path / "play" / "picture.svg").read_text())
    titles = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert {"kill: death", "partition: cut", "pause: pause"} <= {*titles}
    assert not (tmp_path / "play" / "homes").exists(), "what was kept is not looked at"
