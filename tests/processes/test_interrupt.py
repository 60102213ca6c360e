"""Ctrl-C and SIGTERM in every phase of a real quickstart: it ends, and nothing is left."""

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

CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM)}
"""Exit codes of an interrupt; the negative ones of the first tenth of a second, before our own code runs."""
PHASES = {
    "its interpreter starts": lambda out: True,
    "it prepares its data": lambda out: out.exists(),
    "it starts its peers": lambda out: told(out, "trainer-0", "PeerStarted"),
    "it trains": lambda out: told(out, "trainer-0", "StepClosed"),
    "it is over": lambda out: told(out, "trainer-0", "PeerStopped"),
}


def told(out: Path, peer: str, kind: str) -> bool:
    """Whether a peer has written such an event."""
    path = out / "peers" / peer / "events.jsonl"
    return path.exists() and f'"{kind}"' in path.read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("phase", "number", "whom"),
    [
        pytest.param("its interpreter starts", signal.SIGTERM, "one", marks=pytest.mark.long),
        pytest.param("it prepares its data", signal.SIGINT, "group", marks=pytest.mark.long),
        pytest.param("it starts its peers", signal.SIGTERM, "group", marks=pytest.mark.long),
        ("it trains", signal.SIGINT, "group"),
        pytest.param("it is over", signal.SIGTERM, "one", marks=pytest.mark.long),
    ],
)
def test_quickstart_interrupted_in_any_phase_leaves_nothing(
    tmp_path: Path, phase: str, number: signal.Signals, whom: str
) -> None:
    """``group`` is what a terminal's Ctrl-C does: every process of the foreground gets the signal."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(f"Paragraph {n} tells of {n * n} owls and {n % 7} mice. " * 30 for n in range(120)))
    temporary = set(os.listdir(tempfile.gettempdir()))
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--out", str(out), "--text", str(text)]
    command += ["--steps", "3" if phase == "it is over" else "5000", "--peers", "2", "--trainers", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_until(lambda: PHASES[phase](out) or process.poll() is not None, what=phase)
    for _ in range(2 if phase == "it trains" else 1):
        if process.poll() is None:
            (os.killpg if whom == "group" else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode in (*CODES[number], 0), output
    assert process.returncode != 0 or phase == "it is over", output
    if process.returncode > 0:
        assert "Traceback" not in output
    if phase == "it trains":
        assert f"interrupted: {number.name}: all peers stopped" in output
        assert "; kept " in output
        report = json.loads((out / "report.json").read_text())
        assert (report["exit_reason"], report["steps"] > 0) == ("interrupted", True)
    assert set(os.listdir(tempfile.gettempdir())) == temporary
