from __future__ import annotations

from pathlib import Path

from peers.local.launch import PeerExit
from peers.local.progress import ExitNotice
from peers.local.run import PeerFailure, blame, last_words


def _exit(name: str, code: int) -> PeerExit:
    return PeerExit(name=name, pid=7, code=code)


def test_blame_killed_peer_before_those_that_lost_it() -> None:
    stopped = {"b": ExitNotice(1.0, "a is gone", 3)}
    found = blame([_exit("b", 3), _exit("a", -9)], stopped, {"a": "no answer"}, {})
    assert found == PeerFailure("a", "(pid 7) was killed by SIGKILL")


def test_blame_mute_crash_brings_its_last_words() -> None:
    found = blame([_exit("b", 3), _exit("a", 1)], {"b": ExitNotice(1.0, "a is gone", 3)}, {}, {"a": "ValueError: x"})
    assert found == PeerFailure("a", "(pid 7) exited with 1: ValueError: x")


def test_blame_stalled_peer_that_others_report() -> None:
    found = blame([_exit("b", 3)], {"b": ExitNotice(1.0, "a is gone", 3)}, {"a": "no answer for 4 s"}, {})
    assert found == PeerFailure("a", "was lost: no answer for 4 s")


def test_blame_earliest_of_the_last_words() -> None:
    stopped = {"b": ExitNotice(2.0, "late", 3), "a": ExitNotice(1.0, "early", 1), "c": ExitNotice(0.0, "fine", 0)}
    assert blame([], stopped, {}, {}) == PeerFailure("a", "ended the run: early (exit code 1)")


def test_blame_nothing_wrong_is_nobody() -> None:
    assert blame([_exit("a", 0)], {"a": ExitNotice(1.0, "done", 0)}, {}, {}) is None


def test_last_words_are_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "peer.log"
    assert last_words(log) == ""
    log.write_text("Traceback\n  File\nValueError: x\n\n")
    assert last_words(log) == "ValueError: x"
