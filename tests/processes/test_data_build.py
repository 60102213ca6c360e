"""`swarm data build` that is killed and typed again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_shards.journal import JOURNAL_FILE
from data_shards.tokenize import train_tokenizer
from peers.cli.app import run
from peers.exit_codes import EXIT_OK

pytestmark = pytest.mark.process
RECORD = json.dumps({"text": "A text of some words, enough for a tokenizer and for very little else. " * 10}) + "\n"


def test_build_that_is_killed_goes_on_and_makes_the_same_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer([RECORD], 300))
    (tmp_path / "a.jsonl").write_text(RECORD * 6000)
    command = [sys.executable, "-m", "peers.cli", "data", "build", "a.jsonl", "--tokenizer", "tokenizer.json", "--json"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    child = subprocess.Popen([*command, "--out", "shard"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    journal = tmp_path / ".shard.building" / JOURNAL_FILE
    while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    monkeypatch.chdir(tmp_path)
    said = []
    for out in ("shard", "whole"):
        assert run([*command[3:], "--out", out]) == EXIT_OK
        said.append(capsys.readouterr())
    assert "were kept from a build before this one" in said[0].err
    assert not said[1].err
    assert json.loads(said[0].out)["digest"] == json.loads(said[1].out)["digest"]
