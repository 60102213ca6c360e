from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.rigs.peers import TEXT, Typed, gone


class Command:
    """``swarm quickstart`` with a fake swarm, in a process of its own and a directory of its own."""

    def __init__(self, directory: Path, *arguments: str, fault: str) -> None:
        self.out = directory / "run"
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        (directory / "text.txt").write_text(TEXT)
        environment = os.environ | {
            "TMPDIR": str(self.scratch),
            "FAKE_FAULT": fault,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
        }
        flags = ["--text", "text.txt", "--out", "run", "--report", "copy.json", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fake_swarm", "quickstart", *flags],
            cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, seconds: float = 300) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; and no process or temporary file may be left."""
        out, err = self.process.communicate(timeout=seconds)
        pids = [event["pid"] for event in self.events() if event["kind"] == "PeerStarted"]
        assert all(gone(pid) for pid in pids)
        assert list(self.scratch.rglob("*")) == []
        return self.process.returncode, out, err

    def events(self) -> list[dict[str, Any]]:
        """All events of all peers."""
        files = self.out.glob("peers/*/events.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def report(self) -> dict[str, Any]:
        """The report, which is written twice."""
        text = (self.out / "report.json").read_text()
        assert (self.out.parent / "copy.json").read_text() == text
        report: dict[str, Any] = json.loads(text)
        return report


def test_quickstart_peer_failing_is_named_and_everything_stopped(tmp_path: Path) -> None:
    peer = "stage-1-1"
    command = Command(tmp_path, "--json", "--steps", "4", "--peers", "2", "--trainers", "1", fault=f"{peer} kill")
    code, out, err = command.finish()
    assert (code, json.loads(out)) == (3, command.report()), "as JSON it prints the report and nothing else"
    assert f"error: {peer} " in err
    assert "was killed by SIGKILL" in err
    assert "memory" in err
    assert "Traceback" not in err
    report = command.report()
    assert (report["exit_reason"], report["failed_peer"], report["steps"]) == ("peer_failed", peer, 1)


AT_ONCE = """
import os, signal, sys
import peers.commands.quickstart as quickstart
from peers.cli import main

number = signal.Signals(int(sys.argv.pop(1)))
victim = sys.argv.pop(1)
original = getattr(quickstart, victim)

def interrupted(*arguments, **named):
    try:
        return original(*arguments, **named)
    finally:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

def fail(run):
    raise quickstart.RunBroken("stage-0-1 died", "stage-0-1")

setattr(quickstart, victim, interrupted)
quickstart.LocalRun.train = fail
main()
"""


def _at_once(directory: Path, moment: str, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    """A quickstart that gets a signal, twice, in the very moment in which a function returns; it fails after that."""
    (directory / "text.txt").write_text(TEXT)
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    flags = ["quickstart", "--text", "text.txt", "--out", "run", "--steps", "60"]
    return subprocess.run(
        [sys.executable, "-c", AT_ONCE, str(int(number)), moment, *flags],
        cwd=directory, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_quickstart_interrupted_between_two_lines_still_says_what_is_kept(tmp_path: Path) -> None:
    result = _at_once(tmp_path, "Progress", signal.SIGTERM)
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stderr == ("interrupted: SIGTERM: all peers stopped, nothing trained; kept run, no checkpoint yet\n")
    assert json.loads((tmp_path / "run" / "report.json").read_text())["exit_reason"] == "interrupted"


def test_quickstart_interrupted_once_it_is_decided_how_it_ended_reports_that(tmp_path: Path) -> None:
    result = _at_once(tmp_path, "build_report", signal.SIGINT)
    assert result.returncode == 3
    assert result.stderr.startswith("error: stage-0-1 died\n")
    assert json.loads((tmp_path / "run" / "report.json").read_text())["failed_peer"] == "stage-0-1"


@pytest.mark.long
def test_quickstart_run_without_a_checkpoint_is_an_error_that_keeps_everything(tmp_path: Path) -> None:
    command = Command(tmp_path, "--steps", "2", "--peers", "2", "--trainers", "1", fault="no-checkpoint")
    code, _, err = command.finish()
    assert code == 1
    assert "has no checkpoint: the run ended before the first was written" in err
    assert (command.report()["exit_reason"], command.report()["steps"]) == ("error", 2)
    assert (command.out / "loss.svg").exists()


def test_quickstart_impossible_request_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed, snapshot: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("one\n\n" * 5)
    (tmp_path / "small.txt").write_text(TEXT[:4000])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("keep me")
    refused = [
        typed(f"quickstart --out {words}")
        for words in (
            "run --peers 1", "run --stages 9 --peers 9", "run --reproducible --local-steps 4", "run --trainers 0",
            "run --text missing.txt", "run --text short.txt --text short.txt --steps 4",
            "run --text small.txt --steps 4", "run --text small.txt short.txt", "run --device banana", "mine",
            "run --minutes 1 --steps 4", "run --minutes 1 --reproducible", "run --minutes 0",
        )
    ]  # fmt: skip
    assert {(one.code, "goes to" in one.out) for one in refused} == {(2, False)}
    assert [one.complaint for one in refused] == snapshot
    assert not (tmp_path / "run").exists()
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["precious"]
