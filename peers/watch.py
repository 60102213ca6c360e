"""Reading what the local peers write about themselves: every ``events.jsonl`` of a run, as it grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.monitoring.reader import Recorded, read_events


@dataclass(frozen=True, slots=True)
class Told:
    """One event, and the name of the peer whose file it is from."""

    name: str
    record: Recorded


class RunWatch:
    """The event files of all peers of a run; a file that does not exist yet has no events."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._offsets = dict.fromkeys(paths, 0)

    def read(self) -> list[Told]:
        """What is new, in the order of the writers' clocks, which on one machine are the same; some 4 MiB per peer."""
        return sorted((told for name in self._paths for told in self._read(name)), key=lambda told: told.record.wall)

    def read_all(self) -> Iterable[Told]:
        """What is new, however much it is: for after the writers have ended."""
        while told := self.read():
            yield from told

    def _read(self, name: str) -> list[Told]:
        records, self._offsets[name] = read_events(self._paths[name], self._offsets[name])
        return [Told(name, record) for record in records]
