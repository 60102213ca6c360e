"""A peer of weeks: its events take bounded room, and anyone who follows them misses none when a file is begun anew."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from peers.home.last_events import last_event
from swarm.disk import older
from swarm.events import RunFound, Waiting
from swarm.ids import PeerId, RunId
from swarm.monitoring.reader import read_all, read_events
from swarm.monitoring.recorder import Recorder
from tests.harness.rigs.clocks import FakeClock

ME = PeerId("me")
FOUND = RunFound(run=RunId("5a" * 32), name="tiny", stages=2, steps=9, wire=2, source=ME)


def said(events: list) -> list[str]:
    return [one.event.what for one in events if isinstance(one.event, Waiting)]


def test_files_are_bounded_and_a_follower_gets_each_event_once(tmp_path: Path) -> None:
    path, most = tmp_path / "events.jsonl", 2000
    offset, followed, begun_anew = 0, [], set()
    with Recorder(path, ME, FakeClock(), max_bytes=most) as recorder:
        recorder.emit(FOUND)
        for number in range(200):
            recorder.emit(Waiting(what=f"number {number}"))
            begun_anew.add(path.stat().st_ino)
            if number % 7 == 0:
                before = -1
                while before != offset:
                    before = offset
                    events, offset = read_events(path, offset)
                    followed += events
            assert path.stat().st_size <= most + 500
        for _ in range(2):
            events, offset = read_events(path, offset)
            followed += events
    assert older(path).stat().st_size <= most + 500
    assert len(begun_anew) > 1, "it was begun anew"
    assert said(followed) == [f"number {number}" for number in range(200)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.older.jsonl"]


def test_last_of_a_kind_is_found_however_long_ago_it_was(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Recorder(path, ME, FakeClock(), max_bytes=1000) as recorder:
        recorder.emit(FOUND)
        for number in range(100):
            recorder.emit(Waiting(what=f"number {number}"))
    assert (last_event(path, "RunFound", whole=True) or {})["steps"] == 9
    everything = said(read_all(path))
    assert everything == [f"number {number}" for number in range(100 - len(everything), 100)], "in order, of two files"
    assert len(everything) > 10


def test_file_that_cannot_be_put_aside_grows_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Path] = []

    def refuse(source: Path, target: Path) -> None:
        tries.append(source)
        raise PermissionError

    path = tmp_path / "events.jsonl"
    with Recorder(path, ME, FakeClock(), max_bytes=1000) as recorder:
        monkeypatch.setattr(os, "replace", refuse)
        for number in range(100):
            recorder.emit(Waiting(what=f"number {number}"))
    assert 1 < len(tries) < 20, "not at every event"
    assert said(read_all(path)) == [f"number {number}" for number in range(100)]


def test_recorder_that_goes_on_with_a_full_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for life in range(3):
        with Recorder(path, ME, FakeClock(), max_bytes=300) as recorder:
            for number in range(3):
                recorder.emit(Waiting(what=f"number {life}.{number}"))
    assert path.stat().st_size <= 300
    assert older(path).is_file()


def test_reader_that_has_opened_the_file_before_it_is_begun_anew_gets_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really, begun = tmp_path / "events.jsonl", Path.open, list[str]()
    with Recorder(path, ME, FakeClock(), max_bytes=math.inf) as recorder:
        for number in range(3):
            recorder.emit(Waiting(what=f"number {number}"))
        _, offset = read_events(path)
        recorder.emit(Waiting(what="its last"))

        def open_just_before(self: Path, *given: str) -> object:
            file = really(self, *given)
            if not begun:
                begun.append(self.name)
                recorder._max_bytes = 1
                recorder.emit(Waiting(what="anew"))
            return file

        monkeypatch.setattr(Path, "open", open_just_before)
        rest, offset = read_events(path, offset)
        assert begun, "it was begun anew while it was read"
        new, _ = read_events(path, offset)
    assert (said(rest), said(new)) == (["its last"], ["anew"])


def test_torn_end_of_the_older_file_keeps_nobody_from_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    older(path).write_bytes(b"x" * 10_000)
    with Recorder(path, ME, FakeClock()) as recorder:
        recorder.emit(Waiting(what="new"))
    events, _ = read_events(path, 5_000)
    assert said(events) == ["new"]


@pytest.mark.parametrize("fails", ["open", "second replace"])
def test_file_that_cannot_be_begun_anew_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    failed, really_open, really_replace = list[str](), os.open, os.replace

    def no_more_files(path: Path, *given: int) -> int:
        if fails == "open" and path.name == ".events.jsonl.new":
            failed.append(path.name)
            raise OSError(24, "too many open files")
        return really_open(path, *given)

    def refuse(source: Path, target: Path) -> None:
        if fails == "second replace" and source.name == ".events.jsonl.new":
            failed.append(source.name)
            raise OSError(5, "an input or output error")
        really_replace(source, target)

    monkeypatch.setattr(os, "open", no_more_files)
    monkeypatch.setattr(os, "replace", refuse)
    path = tmp_path / "events.jsonl"
    with Recorder(path, ME, FakeClock(), max_bytes=1000) as recorder:
        for number in range(100):
            recorder.emit(Waiting(what=f"number {number}"))
    assert failed
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]
    assert said(read_all(path)) == [f"number {number}" for number in range(100)]
