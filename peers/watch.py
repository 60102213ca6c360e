"""Reading what the local peers write about themselves: every ``events.jsonl`` of a run, as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One event of one peer: ``wall`` seconds since the Unix epoch, ``name`` the peer's, ``kind`` and ``fields`` as
    in :mod:`swarm.events`."""

    wall: float
    name: str
    kind: str
    fields: Mapping[str, Any]


class EventTail:
    """One peer's event file. A line that is not yet complete is kept for the next reading; one that is no event is
    counted in ``unreadable`` and passed over: the writer may have been killed in the middle of it."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._offset = 0
        self._rest = b""
        self.unreadable = 0

    def read(self) -> list[Line]:
        """Events written since the last call; none while the file does not exist. Reads at most 1 MiB."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        decoded = (self._decode(line) for line in lines if line.strip())
        return [line for line in decoded if line is not None]

    def _decode(self, text: bytes) -> Line | None:
        try:
            fields = json.loads(text)
            return Line(float(fields["t"]), self._name, str(fields["kind"]), fields)
        except (ValueError, KeyError, TypeError):
            self.unreadable += 1
            return None


class RunWatch:
    """All peers of a run."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._tails = [EventTail(name, path) for name, path in paths.items()]

    def read(self) -> list[Line]:
        """What is new, in the order of the writers' clocks, which on one machine are the same."""
        return sorted((line for tail in self._tails for line in tail.read()), key=lambda line: line.wall)

    def read_all(self) -> Iterable[Line]:
        """What is new, however much it is: for after the writers have ended."""
        while lines := self.read():
            yield from lines
