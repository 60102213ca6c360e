"""What is listed and removed, by a stand-in for the engine's client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.in_engine import clear, label, project
from tests.harness.processes import MARKER
from tests.harness.rigs.chaos import client_script

# What is there lies in files named after their kind, a name and its label in each line. With a file "refuses" beside
# them all of it stays.
CLIENT = """#!/bin/sh
cd "$(dirname "$0")"
for word; do last=$word; done
case "$1 $2" in
  "ps --all") grep -F "${last#label=}" ps | cut -d ' ' -f 1 ;;
  *" ls") grep -F "${last#label=}" "$1" | cut -d ' ' -f 1 ;;
  *)
    if [ -e refuses ]; then echo "no, it stays" >&2; exit 1; fi
    if [ "$1" = rm ]; then kind=ps; else kind=$1; fi
    for word; do sed -i "/^$word /d" "$kind"; done
    ;;
esac
exit 0
"""
KINDS = ("ps", "network", "volume", "image")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one of ours and one of somebody else's of each kind."""
    monkeypatch.setenv(MARKER, "ci-1/ab")
    for kind in KINDS:
        (tmp_path / kind).write_text(f"ours-{kind} {label()}\ntheirs-{kind} swarm.test=ci-2\n")
    return client_script(tmp_path, CLIENT)


def test_ours_is_removed_and_told_and_nobody_elses(client: Path) -> None:
    (client.parent / "volume").write_text(f"ours-volume com.docker.compose.project={project()}\ntheirs-volume \n")
    assert clear(str(client)) == ["container ours-ps", "network ours-network", "volume ours-volume"]
    for kind in KINDS:
        assert [line.split()[0] for line in (client.parent / kind).read_text().splitlines()] == [f"theirs-{kind}"]
    assert clear(str(client)) == []


def test_what_cannot_be_removed_is_an_error_in_the_engines_words(client: Path) -> None:
    (client.parent / "refuses").touch()
    with pytest.raises(RuntimeError, match=r"ours-ps: no, it stays"):
        clear(str(client))


def test_nothing_is_removed_without_an_id(client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER)
    with pytest.raises(RuntimeError, match=MARKER):
        clear(str(client))
    assert "ours-ps" in (client.parent / "ps").read_text()
