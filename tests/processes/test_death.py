"""A peer or a daemon that dies ends the run within 10 s, naming it, exit 3, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.expect import wait_until

START_S = 60.0
END_S = 10.0
pytestmark = pytest.mark.process


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """What a peer has written so far; a torn last line is left for the next look."""
    path = out / "peers" / name / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def quickstart(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A long quickstart that has closed its first step."""
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--out", str(out)]
    command += ["--steps", "5000", "--peers", "2", "--trainers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: _closed_a_step(process, out), deadline_s=START_S, what="the first step")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _closed_a_step(process: subprocess.Popen[str], out: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"the quickstart ended early:\n{process.communicate()[0]}")
    return any(event["kind"] == "StepClosed" for event in events(out, "bootstrap"))


def pid_of(out: Path, prefix: str) -> tuple[str, int]:
    """Name and process id of the first peer whose name begins so."""
    for home in sorted((out / "peers").iterdir()):
        if home.name.startswith(prefix):
            started = next(event for event in events(out, home.name) if event["kind"] == "PeerStarted")
            return home.name, int(started["pid"])
    raise AssertionError(f"no peer named {prefix}…")


@pytest.mark.parametrize("role", ["bootstrap", "stage", "trainer"])
def test_peer_killed_ends_the_run_and_is_named(tmp_path: Path, role: str) -> None:
    out = tmp_path / "out"
    with quickstart(out) as process:
        name = next(
            home.name
            for home in sorted((out / "peers").iterdir())
            if any(e["kind"] == "PeerStarted" and e["role"] == role for e in events(out, home.name))
        )
        _, pid = pid_of(out, name)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=START_S)
        assert time.monotonic() - killed < END_S
    assert process.returncode == 3, output
    assert name in output
    assert "SIGKILL" in output
    report = json.loads((out / "report.json").read_text())
    assert report["exit_code"] == 3
    assert report["failed_peer"] == name


def test_daemon_killed_ends_the_run_and_its_peer_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with quickstart(out) as process:
        name, pid = pid_of(out, "stage") if (out / "peers").is_dir() else ("", 0)
        (daemon,) = [child for child in psutil.Process(pid).children() if "p2pd" in child.name()]
        daemon.kill()
        killed = time.monotonic()
        output, _ = process.communicate(timeout=START_S)
        assert time.monotonic() - killed < END_S
    assert process.returncode == 3, output
    assert name in output
    assert any(event["kind"] == "DaemonLost" for event in events(out, name)), "the fault did not fire"


def test_others_notice_a_killed_peer_by_themselves(tmp_path: Path) -> None:
    """Without a parent that watches processes: the launcher is stopped, so only the peers can find out."""
    out = tmp_path / "out"
    with quickstart(out) as process:
        name, pid = pid_of(out, "stage")
        parent = psutil.Process(process.pid)
        others = [home.name for home in sorted((out / "peers").iterdir()) if home.name != name]
        parent.suspend()
        try:
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            for other in others:
                wait_until(
                    lambda other=other: any(e["kind"] == "PeerStopped" for e in events(out, other)),  # type: ignore[misc]
                    deadline_s=END_S - (time.monotonic() - killed),
                    what=f"{other} ending by itself",
                )
        finally:
            parent.resume()
        process.communicate(timeout=START_S)
    for other in others:
        stopped = next(event for event in events(out, other) if event["kind"] == "PeerStopped")
        assert stopped["exit_code"] == 3
        assert name in stopped["reason"]
