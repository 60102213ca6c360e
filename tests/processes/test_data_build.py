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

pytestmark = pytest.mark.process
RECORD = json.dumps({"text": "A text of some words, enough for a tokenizer and for very little else. " * 10}) + "\n"


def test_build_that_is_killed_goes_on_and_makes_the_same_shard(tmp_path: Path) -> None:
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
    said = []
    for out in ("shard", "whole"):
        again = [*command, "--out", out]
        said.append(subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, check=True))
    assert b"were kept from a build before this one" in said[0].stderr
    assert not said[1].stderr
    assert json.loads(said[0].stdout)["digest"] == json.loads(said[1].stdout)["digest"]
