"""A local run that cannot go on without a peer that died ends, named, and nothing is left. A daemon may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.by_hand import Written
from tests.harness.expect import LONG_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]


written = cache(Written)


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """What a peer has written so far."""
    return written(out / "peers" / name / "events.jsonl").events()


@contextmanager
def quickstart(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A long quickstart that has closed its first step."""
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--out", str(out)]
    command += ["--steps", "5000", "--peers", "2", "--trainers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: _closed_a_step(process, out), what="the first step")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def closed_steps(out: Path, name: str = "bootstrap") -> int:
    """How many steps a peer has seen close."""
    return sum(event["kind"] == "StepClosed" for event in events(out, name))


def _closed_a_step(process: subprocess.Popen[str], out: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"the quickstart ended early:\n{process.communicate()[0]}")
    return closed_steps(out) > 0


def pid_of(out: Path, prefix: str) -> tuple[str, int]:
    """Name and process id of the first peer whose name begins so."""
    for home in sorted((out / "peers").iterdir()):
        if home.name.startswith(prefix):
            started = next(event for event in events(out, home.name) if event["kind"] == "PeerStarted")
            return home.name, int(started["pid"])
    raise AssertionError(f"no peer named {prefix}…")


def left_with(event: dict[str, Any]) -> list[str]:
    """The names of those that a record leaves out."""
    return [one["name"] for one in event["left"]] if event["kind"] == "RosterChanged" else []


def ends_naming(process: subprocess.Popen[str], out: Path, *killed: str) -> None:
    """The run ends, and names one that was killed."""
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 3, output
    assert "SIGKILL" in output
    report = json.loads((out / "report.json").read_text())
    assert report["exit_code"] == 3
    assert report["failed_peer"] in killed
    assert report["failed_peer"] in output


def test_daemon_and_bootstrap_killed_take_nothing_along_and_the_last_trainer_killed_ends_the_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with quickstart(out) as process:
        name, pid = pid_of(out, "stage")
        (daemon,) = [child for child in psutil.Process(pid).children() if "p2pd" in child.name()]
        daemon.kill()
        restarted = wait_until(
            lambda: next((event for event in events(out, name) if event["kind"] == "DaemonRestarted"), None),
            what="the next daemon",
        )
        assert [event["exit_code"] for event in events(out, name) if event["kind"] == "DaemonLost"] == [-signal.SIGKILL]
        assert psutil.Process(pid).children() == [psutil.Process(restarted["pid"])]
        # Whether others miss it meanwhile goes by how soon this machine starts a daemon; what follows does not.
        closed = closed_steps(out, name)
        wait_until(lambda: closed_steps(out, name) >= closed + 2, what="two more steps, closed by the same peer")
        assert process.poll() is None

        name, pid = pid_of(out, "bootstrap")
        os.kill(pid, signal.SIGKILL)
        # Who notices first differs; a record says it to all, maybe before others have found out by themselves.
        wait_until(
            lambda: any(name in left_with(event) for event in events(out, "trainer-0")),
            what="a record without the bootstrap",
        )
        closed = closed_steps(out, "trainer-0")
        wait_until(lambda: closed_steps(out, "trainer-0") >= closed + 3, what="three more steps")
        assert process.poll() is None

        trainer, pid = pid_of(out, "trainer")
        os.kill(pid, signal.SIGKILL)
        ends_naming(process, out, name, trainer)
