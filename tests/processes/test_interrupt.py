"""Ctrl-C and SIGTERM end a real quickstart, and nothing is left; the moments between are in ``unit/peers``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness.expect import LONG_S, wait_until

PHASES = {
    "it starts its peers": lambda out: told(out, "trainer-0", "PeerStarted"),
    "it trains": lambda out: told(out, "trainer-0", "StepClosed"),
}


def told(out: Path, peer: str, kind: str) -> bool:
    """Whether a peer has written such an event."""
    path = out / "peers" / peer / "events.jsonl"
    return path.exists() and f'"{kind}"' in path.read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("it starts its peers", signal.SIGTERM, marks=pytest.mark.long),
        ("it trains", signal.SIGINT),
    ],
)
def test_quickstart_that_is_interrupted_leaves_nothing(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """As by a terminal's Ctrl-C: every process of the foreground gets the signal."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(f"Paragraph {n} tells of {n * n} owls and {n % 7} mice. " * 30 for n in range(120)))
    temporary = set(os.listdir(tempfile.gettempdir()))
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--out", str(out), "--text", str(text)]
    command += ["--steps", "5000", "--peers", "2", "--trainers", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_until(lambda: PHASES[phase](out) or process.poll() is not None, what=phase)
    for _ in range(2 if phase == "it trains" else 1):
        if process.poll() is None:
            os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    if phase == "it trains":
        assert f"interrupted: {number.name}: all peers stopped" in output
        assert "; kept " in output
        report = json.loads((out / "report.json").read_text())
        assert (report["exit_reason"], report["steps"] > 0) == ("interrupted", True)
    assert set(os.listdir(tempfile.gettempdir())) == temporary
