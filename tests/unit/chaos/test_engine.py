"""The engine's client stood in for by a script: what it says is taken for, and what it does not do."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from peers.chaos.engine import Engine, EngineError, bind
from peers.chaos.nemesis import Nemesis
from tests.harness.rigs.chaos import client_script

CFS = "WARNING: Your kernel does not support CPU CFS scheduler. CPU period/quota discarded."


def engine_of(root: Path, script: str) -> Engine:
    return Engine("play", str(client_script(root, f"#!/bin/sh\n{script}\n")))


@pytest.mark.parametrize("stream", [1, 2])
def test_limit_that_is_not_set_is_an_error(tmp_path: Path, stream: int) -> None:
    engine = engine_of(tmp_path, f"echo '{CFS}' >&{stream}")
    with pytest.raises(EngineError, match=r"--cpu-quota 5000\).*quota discarded.*docker info"):
        engine.call("update", "--cpu-period", "20000", "--cpu-quota", "5000", "a")
    assert CFS in engine.call("create", "a") + CFS, "nobody asked for a limit"


def test_directories_of_any_name_can_be_mounted() -> None:
    option, value = bind(Path('/a:b/c,d"e'), "/data", "readonly")
    assert option == "--mount"
    assert next(csv.reader([value])) == ["type=bind", 'source=/a:b/c,d"e', "target=/data", "readonly"]


def test_command_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nemesis = Nemesis(engine_of(tmp_path, 'case "$1" in exec) exec sh ;; esac'))
    nemesis.start(tmp_path)
    try:
        assert nemesis.run(["echo there"]) == "there"
        monkeypatch.setattr("peers.chaos.nemesis.RUN_S", 0.2)
        with pytest.raises(EngineError, match="took 0.2 s"):
            nemesis.run(["exec sleep 1000"])
    finally:
        nemesis.close()
