"""Read events back from disk while their writer goes on: one file, or those of several peers followed at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from swarm.disk import older
from swarm.events import Event
from swarm.ids import PeerId
from swarm.monitoring.recorder import ENVELOPE

READ_BYTES = 4 << 20
"""How much one call reads, unless a single line is longer."""

UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class RawEvent:
    """An event this version does not know, as it was written; or, of kind :data:`UNREADABLE`, a line that is none."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line: ``wall`` seconds since the epoch and ``monotonic`` seconds by the writer's clocks, who wrote it, what
    happened, and how many events before it the writer had to drop."""

    wall: float
    monotonic: float
    peer: PeerId
    event: Event | RawEvent
    dropped: int = 0


def read_events(path: Path, offset: int = 0) -> tuple[list[Recorded], int]:
    """The whole lines from ``offset`` on, at most some 4 MiB of them, and the offset to go on from.

    A last line without its end is left for the next call. A file that is not there yet has no events; one that is
    shorter than ``offset`` was begun anew: what the older one has beyond ``offset`` comes first, then the new one from
    its start. Who looks so rarely that the new one is longer again misses what is between. Raises OSError for a file
    that cannot be read.
    """
    try:
        # Opened first: what is open stays what it is, also when the file is begun anew just then.
        with path.open("rb") as file:
            if offset > os.fstat(file.fileno()).st_size:
                rest, end = _read(older(path), offset)
                if end > offset:
                    return rest, end
                offset = 0
            return _lines(file, offset)
    except FileNotFoundError:
        return [], offset


def _read(path: Path, offset: int) -> tuple[list[Recorded], int]:
    try:
        with path.open("rb") as file:
            return _lines(file, offset)
    except FileNotFoundError:
        return [], offset


def _lines(file: BinaryIO, offset: int) -> tuple[list[Recorded], int]:
    """The whole lines from there on, and where they end; none beyond the file's end."""
    file.seek(offset)
    data = file.read(READ_BYTES)
    if b"\n" not in data:
        data += file.readline()
    whole = data[: data.rfind(b"\n") + 1]
    return [decode_line(line) for line in whole.splitlines() if line], offset + len(whole)


def read_all(path: Path) -> list[Recorded]:
    """All whole lines of a file, and before them those of the older one where it was begun anew."""
    events: list[Recorded] = []
    for file in (older(path), path):
        offset, before = 0, -1
        while offset != before:
            before = offset
            more, offset = _read(file, offset)
            events += more
    return events


def decode_line(text: bytes) -> Recorded:
    """One line as its event's class, or raw. Never raises: the writer may have been killed while writing it."""
    try:
        line = json.loads(text)
        wall, monotonic, dropped = float(line["t"]), float(line["m"]), int(line.get("dropped", 0))
        # Interned: the same few names come with every line, and anyone who folds events keeps them.
        peer, kind = PeerId(sys.intern(str(line["peer"]))), str(line["kind"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Recorded(0.0, 0.0, PeerId(""), RawEvent(UNREADABLE, {"text": text.decode(errors="replace")}))
    fields = {_field_name(key): value for key, value in line.items() if key not in ENVELOPE}
    return Recorded(wall, monotonic, peer, _event(kind, fields), dropped)


def _field_name(key: str) -> str:
    return key[:-1] if key.endswith("_") and key[:-1] in ENVELOPE else key


def _event(kind: str, fields: dict[str, Any]) -> Event | RawEvent:
    adapter = _adapters().get(kind)
    if adapter is not None:
        try:
            return adapter.validate_python(fields)
        except ValidationError:
            return RawEvent(kind, fields)
    return RawEvent(kind, fields)


@cache
def _adapters() -> dict[str, TypeAdapter[Event]]:
    return {kind: TypeAdapter(known) for kind, known in Event.kinds().items()}


# --- following several peers' files as they grow ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event, and the name of the file it is from: a peer's, also when it never said what it is called."""

    name: str
    record: Recorded


class EventTail:
    """The event files of a run by name. One that does not exist yet has no events; each event is given once."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._offsets = dict.fromkeys(paths, 0)

    def read(self) -> list[RecordedEvent]:
        """Return new events, at most about 4 MiB of each file, by the writers' wall clocks. Cost: that of what is new,
        and one open per file. Raises OSError for a file that cannot be read."""
        return sorted((told for name in self._paths for told in self._read(name)), key=lambda told: told.record.wall)

    def read_rest(self) -> Iterator[RecordedEvent]:
        """Return all new events, however many, after the writers have ended."""
        while told := self.read():
            yield from told

    def _read(self, name: str) -> list[RecordedEvent]:
        records, self._offsets[name] = read_events(self._paths[name], self._offsets[name])
        return [RecordedEvent(name, record) for record in records]
