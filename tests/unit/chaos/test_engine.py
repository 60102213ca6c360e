"""The engine's client stood in for by a script: what is removed, and who is taken for dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peers.chaos.engine import Engine, EngineError, is_dead, owner
from peers.chaos.nemesis import Nemesis

CFS = "WARNING: Your kernel does not support CPU CFS scheduler. CPU period/quota discarded."
SWAP = "WARNING: Your kernel does not support swap limit capabilities. Memory limited without swap."
# Things lie in files named after their kind; removing obeys what lies in "refuse".
CLIENT = """#!/bin/sh
cd "$(dirname "$0")"
kind=$1
case "$*" in
  *--quiet*) cat "$kind" 2>/dev/null ;;
  *)
    [ "$kind" = rm ] && kind=ps
    if [ -s refuse ]; then
      words=$(head -n 1 refuse)
      sed -i 1d refuse
      [ "$words" = gone ] && : >"$kind"
      echo "$words" >&2
      exit 1
    fi
    : >"$kind"
    ;;
esac
"""


def engine_of(root: Path, refuse: str = "", **things: str) -> Engine:
    client = root / "client"
    client.write_text(CLIENT)
    client.chmod(0o755)
    (root / "refuse").write_text(refuse)
    for kind in ("ps", "network", "volume"):
        (root / kind).write_text(things.get(kind, ""))
    return Engine("play", str(client))


def saying(root: Path, script: str) -> Engine:
    client = root / "client"
    client.write_text(f"#!/bin/sh\n{script}\n")
    client.chmod(0o755)
    return Engine("play", str(client))


def left(root: Path) -> list[str]:
    return [kind for kind in ("ps", "network", "volume") if (root / kind).read_text()]


def test_everything_is_removed_whatever_somebody_else_removes_meanwhile(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "gone\nnot now\n", ps="a b\n", network="c\n", volume="d\n")
    engine.remove_all()
    assert not left(tmp_path)
    assert not (tmp_path / "refuse").read_text()


def test_what_stays_is_said_and_the_rest_is_removed(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "in use\n" * 3, volume="d\n")
    with pytest.raises(EngineError, match="in use"):
        engine.remove_all()
    assert left(tmp_path) == ["volume"]


def test_owner_is_dead_once_its_process_is_gone_and_nowhere_else() -> None:
    assert not is_dead(owner())
    command = [sys.executable, "-c", "from peers.chaos.engine import owner; print(owner())"]
    gone = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert is_dead(gone)
    where, _, process = gone.partition("-")
    assert not is_dead(f"{'0' * len(where)}-{process}")
    assert not is_dead("")


@pytest.mark.parametrize("stream", [1, 2])
def test_limit_that_is_not_set_is_an_error(tmp_path: Path, stream: int) -> None:
    engine = saying(tmp_path, f"echo '{CFS}' >&{stream}")
    with pytest.raises(EngineError, match=r"--cpu-quota 5000\).*quota discarded.*docker info"):
        engine.call("update", "--cpu-period", "20000", "--cpu-quota", "5000", "a")
    assert CFS in engine.call("create", "a") + CFS, "nobody asked for a limit"


def test_warnings_of_other_things_are_none(tmp_path: Path) -> None:
    engine = saying(tmp_path, f"echo id; echo '{SWAP}' >&2")
    assert engine.call("create", "--memory", "64m", "--memory-swap", "64m", "a") == "id"


def test_command_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tmp_path / "client"
    client.write_text('#!/bin/sh\ncase "$1" in exec) exec sh ;; esac\n')
    client.chmod(0o755)
    monkeypatch.setattr("peers.chaos.nemesis.RUN_S", 0.2)
    nemesis = Nemesis(Engine("play", str(client)))
    nemesis.start()
    try:
        assert nemesis.run(["echo there"]) == "there"
        with pytest.raises(EngineError, match="took 0.2 s"):
            nemesis.run(["exec sleep 1000"])
    finally:
        nemesis.close()
