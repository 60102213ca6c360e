"""Events to disk and back, on disks that are full and files that are torn."""

from __future__ import annotations

import errno
import json
import os
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from swarm.events import Committed, DaemonLost, Event, JourneyStarted, LoopLag, PeerLost, PeerReady
from swarm.ids import MicrobatchId, PeerId, stage_part
from swarm.monitoring import reader
from swarm.monitoring.reader import UNREADABLE, RawEvent, Recorded, read_all, read_events
from swarm.monitoring.recorder import Recorder

ME = PeerId("me")
ONE = MicrobatchId(PeerId("t"), "0" * 16, 0, 7)


@dataclass
class StillClock:
    now: float = 12.5

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def lost(code: int) -> DaemonLost:
    return DaemonLost(exit_code=code)


def codes(records: list[Recorded]) -> list[int]:
    return [record.event.exit_code for record in records if isinstance(record.event, DaemonLost)]


def record(path: Path, *events: Event) -> None:
    with Recorder(path, ME, StillClock()) as recorder:
        for event in events:
            recorder.emit(event)


def test_recorder_writes_one_line_per_event_with_its_envelope(path: Path) -> None:
    record(path, lost(9))
    assert json.loads(path.read_text()) == {"t": 1012.5, "m": 12.5, "peer": "me", "kind": "DaemonLost", "exit_code": 9}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("known", Event.kinds().values(), ids=Event.kinds().keys())
def test_reader_gives_every_kind_of_event_back_as_it_was(path: Path, known: type[Event]) -> None:
    hints = typing.get_type_hints(known)
    event = known(**{field.name: _sample(hints[field.name]) for field in fields(known)})
    record(path, event)
    assert read_all(path) == [Recorded(1012.5, 12.5, ME, event)]


def _sample(hint: Any) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    simple: dict[Any, Any] = {int: 3, float: 0.5, str: "x", bool: True, Any: 1, MicrobatchId: ONE}
    if hint in simple:
        return simple[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return inner[0]
    if origin is tuple:
        return tuple(_sample(one) for one in inner if one is not ...)
    if origin is dict:
        return {_sample(inner[0]): _sample(inner[1])}
    return _sample(inner[0])


def test_reader_keeps_a_field_that_is_named_like_the_writer(path: Path) -> None:
    event = PeerLost(peer=PeerId("other"), name="stage-1", reason="gone")
    record(path, event)
    assert read_all(path)[0] == Recorded(1012.5, 12.5, ME, event)
    assert json.loads(path.read_text())["peer"] == "me"


def test_reader_gives_numbers_back_that_json_lacks(path: Path) -> None:
    record(path, LoopLag(p50_ms=float("nan"), p99_ms=float("inf"), max_ms=1.0))
    assert "NaN" not in path.read_text()
    event = read_all(path)[0].event
    assert isinstance(event, LoopLag)
    assert event.p50_ms != event.p50_ms
    assert event.p99_ms == float("inf")


def test_reader_keeps_unknown_kinds_raw(path: Path) -> None:
    path.write_text('{"t":1,"m":2,"peer":"p","kind":"Later","a":[1]}\n{"t":1,"m":2,"peer":"p","kind":"PeerReady"}\n')
    assert [record.event for record in read_all(path)] == [RawEvent("Later", {"a": [1]}), RawEvent("PeerReady", {})]


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"t":1}', '{"t":"x","m":1,"peer":"p","kind":"k"}', "\udcff", "[" * 9999]
)
def test_reader_marks_lines_that_are_no_events(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape") + b"\n")
    record(path, lost(1))
    first, second = read_all(path)
    assert isinstance(first.event, RawEvent)
    assert first.event.kind == UNREADABLE
    assert second.event == lost(1)


def test_reader_leaves_a_torn_last_line_for_later(path: Path) -> None:
    record(path, lost(1), lost(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    events, offset = read_events(path)
    assert codes(events) == [1]
    path.write_bytes(whole)
    events, offset = read_events(path, offset)
    assert codes(events) == [2]
    assert read_events(path, offset) == ([], len(whole))


def test_reader_at_every_torn_length_neither_skips_nor_repeats(path: Path) -> None:
    record(path, lost(1), lost(2), lost(3))
    whole = path.read_bytes()
    seen: list[int] = []
    offset = 0
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        if length >= offset:
            events, offset = read_events(path, offset)
            seen += codes(events)
    assert seen == [1, 2, 3]


def test_reader_of_a_missing_or_restarted_file_starts_over(path: Path) -> None:
    assert read_events(path, 7) == ([], 7)
    record(path, lost(1))
    events, _ = read_events(path, 10_000)
    assert codes(events) == [1]


def test_reader_reads_bounded_pieces_and_lines_longer_than_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 100)
    many = Committed(step=1, microbatches=(ONE,) * 50)
    record(path, lost(1), many, lost(2))
    assert [record.event for record in read_all(path)] == [lost(1), many, lost(2)]


def test_recorder_after_a_kill_in_the_middle_of_a_line_starts_a_new_one(path: Path) -> None:
    record(path, lost(1))
    path.write_bytes(path.read_bytes()[:-3])
    record(path, lost(2))
    assert codes(read_all(path)) == [2]
    assert len(read_all(path)) == 2


def test_recorder_on_a_full_disk_counts_and_tells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [10**6]
    real = os.write

    def write(file: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "no space left")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    recorder = Recorder(path, ME, StillClock())
    recorder.emit(lost(1))
    room[0] = 20
    recorder.emit(lost(2))
    recorder.emit(lost(3))
    assert recorder.dropped == 2
    room[0] = 10**6
    recorder.emit(lost(4))
    recorder.emit(lost(5))
    recorder.close()
    records = read_all(path)
    assert codes(records) == [1, 4, 5]
    assert [record.dropped for record in records if isinstance(record.event, DaemonLost)] == [0, 2, 0]


def test_recorder_that_is_closed_counts_and_does_not_raise(path: Path) -> None:
    recorder = Recorder(path, ME, StillClock())
    recorder.close()
    recorder.close()
    recorder.emit(lost(1))
    assert recorder.dropped == 1
    assert path.read_bytes() == b""


def test_recorder_of_two_peers_on_one_file_tears_nothing(path: Path) -> None:
    recorders = [Recorder(path, PeerId(name), StillClock()) for name in ("a", "b")]
    for step in range(100):
        for recorder in recorders:
            recorder.emit(JourneyStarted(step=step, microbatch=ONE, route=(ME,)))
    for recorder in recorders:
        recorder.close()
    records = read_all(path)
    assert len(records) == 200
    assert all(isinstance(record.event, JourneyStarted) for record in records)


def test_recorder_in_a_missing_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "no" / "events.jsonl", ME, StillClock())


def test_event_samples_cover_optional_fields(path: Path) -> None:
    event = PeerReady(part=None, step=0, reason="trainer", seconds=0.0)
    other = PeerReady(part=stage_part(1), step=0, reason="stage", seconds=0.0)
    record(path, event, other)
    assert [record.event for record in read_all(path)] == [event, other]
