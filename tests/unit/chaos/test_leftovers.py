"""The engine's client stood in for by a script: what is removed, and who is taken for dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peers.chaos import engine, leftovers
from peers.chaos.engine import Engine, EngineError, is_dead, is_of_another_boot, owner
from peers.chaos.leftovers import remove_all, sweep
from tests.harness.rigs.chaos import client_script

# Things lie in files named after their kind, who owns which play in "labelled", which plays run in "running"; removing
# obeys what lies in "refuse". Who is on a network lies in "on": while anybody is, it is not removed.
CLIENT = """#!/bin/sh
cd "$(dirname "$0")"
kind=$1
case "$*" in
  *--quiet*) cat "$kind" ;;
  "ps --all"*) cat labelled ;;
  ps*) cat running ;;
  *ls*) ;;
  "network inspect"*) cat on ;;
  "network disconnect --force c "*) sed -i "s/$5 *//" on ;;
  *)
    [ "$kind" = network ] && [ -s on ] && grep . on >>refuse
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
KINDS = ("ps", "network", "volume")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits before another try."""
    monkeypatch.setattr(leftovers, "PAUSE_S", 0.0)


def engine_of(root: Path, refuse: str = "", **things: str) -> Engine:
    (root / "refuse").write_text(refuse)
    for kind in (*KINDS, "labelled", "running", "on"):
        (root / kind).write_text(things.get(kind, ""))
    return Engine("play", str(client_script(root, CLIENT)))


def left(root: Path) -> list[str]:
    return [kind for kind in KINDS if (root / kind).read_text()]


@pytest.fixture
def gone() -> str:
    """The owner that a process was which has ended."""
    command = [sys.executable, "-c", "from peers.chaos.engine import owner; print(owner())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_network_that_keeps_the_endpoint_of_a_container_that_is_gone_is_removed(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, network="c\n", on="swarm-a swarm-b\n")
    with pytest.raises(EngineError, match="swarm-a swarm-b"):
        engine.call("network", "rm", "c")
    remove_all(engine)
    assert not left(tmp_path)
    assert not (tmp_path / "on").read_text().strip()


def test_who_else_removes_the_same_is_waited_for(tmp_path: Path) -> None:
    remove_all(engine_of(tmp_path, "removal of container a is already in progress\n" * 8 + "gone\n", ps="a\n"))
    assert not left(tmp_path)


def test_what_stays_is_said_and_the_rest_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GONE_S", 0.0)
    with pytest.raises(EngineError, match="play play could not be removed.*in use"):
        remove_all(engine_of(tmp_path, "in use\n", network="c\n", volume="d\n"))
    assert left(tmp_path) == ["network"]


def test_what_stays_of_a_dead_play_is_told_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(leftovers, "SWEPT_S", 0.0)
    engine = engine_of(tmp_path, "has active endpoints\n", labelled=f"old {gone}\n", network="c\n", volume="d\n")
    (told,) = sweep(engine)
    assert "play old could not be removed" in told
    assert "has active endpoints" in told
    assert left(tmp_path) == ["network"]


def test_plays_whose_owner_lives_are_left_alone(tmp_path: Path, gone: str) -> None:
    assert sweep(engine_of(tmp_path, labelled=f"theirs {owner()}\n", ps="a\n")) == []
    assert left(tmp_path) == ["ps"]
    assert sweep(engine_of(tmp_path, labelled=f"theirs {owner()}\nold {gone}\n", ps="a\n")) == []
    assert not left(tmp_path)


@pytest.mark.parametrize(("running", "stays"), [("", []), ("theirs\n", ["ps"])], ids=["over", "of a copied machine"])
def test_play_of_another_boot_is_dead_once_nothing_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str, stays: list[str]
) -> None:
    (tmp_path / "machine").write_text("0123456789abcdef\n")
    monkeypatch.setattr(engine, "_MACHINE", tmp_path / "machine")
    monkeypatch.setattr(engine, "_BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("first-boot\n")
    before = owner()
    assert not is_of_another_boot(before)
    (tmp_path / "boot").write_text("second-boot\n")
    assert is_of_another_boot(before)
    assert sweep(engine_of(tmp_path, labelled=f"theirs {before}\n", running=running, ps="a\n")) == []
    assert left(tmp_path) == stays
    (tmp_path / "machine").write_text("fedcba9876543210\n")
    assert not is_of_another_boot(before)
    (tmp_path / "machine").unlink()
    assert not is_of_another_boot(owner().replace("secondboot", "thirdboot")), "it is not known which machine this is"


def test_owner_is_dead_once_its_process_is_gone_and_nowhere_else(gone: str) -> None:
    assert not is_dead(owner())
    assert is_dead(gone)
    where, _, process = gone.partition("-")
    assert not is_dead(f"{'0' * len(where)}-{process}")
    for nobody in ("", f"boot.{where.rpartition('.')[2]}-{process}"):
        assert not is_dead(nobody)
        assert not is_of_another_boot(nobody)
