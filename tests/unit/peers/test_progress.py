from __future__ import annotations

import re

import pytest

from peers.local.progress import Progress, RunView
from swarm.events import PeerLost
from swarm.ids import PeerId
from tests.harness.rigs.peers import closed, told

TEXT = "Python's own documentation: 544 k tokens in 1 private shard, 31.4 k held out"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 60 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.usefixtures("narrow")
def test_progress_on_a_narrow_terminal_breaks_between_words_but_never_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(quiet=False)
    progress.done("text", TEXT, 4.4)
    progress.say("sample: " + "word " * 20, indent=8)
    progress.command("swarm sample " + "x" * 80)
    *broken, command = _lines(capsys)
    assert broken == [
        "  ✓   4.4 s  text        Python's own documentation: 544 k",
        "                         tokens in 1 private shard, 31.4 k",
        "                         held out",
        "sample: word word word word word word word word word word",
        "        word word word word word word word word word word",
    ]
    assert command == "  swarm sample " + "x" * 80


def test_progress_rows_wait_for_the_other_peers_and_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress, view = Progress(quiet=False), RunView()
    view.add(closed(1, wall=10.0))
    progress.update(view, 10.1, 100)
    assert _lines(capsys) == []
    progress.update(view, 11.0, 100)
    assert [line.split()[0] for line in _lines(capsys)] == ["step", "1"]
    view.add(told(PeerLost(peer=PeerId("b"), name="b", reason="no answer"), "a"))
    for step in (2, 3, 4):
        view.add(closed(step, wall=20.0))
    progress.update(view, 20.0, 100, final=True)
    shown = _lines(capsys)
    assert [line.split()[0] for line in shown] == ["2", "4"]
    assert shown[0].endswith("b lost: no answer")
