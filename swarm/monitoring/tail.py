"""Several peers' event files followed at once, as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.monitoring.reader import Recorded, read_events


@dataclass(frozen=True, slots=True)
class Told:
    """One event, and the name of the file it is from: a peer's, also when it never said what it is called."""

    name: str
    record: Recorded


class EventTail:
    """The event files of a run by name. One that does not exist yet has no events; each event is given once."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._offsets = dict.fromkeys(paths, 0)

    def read(self) -> list[Told]:
        """What is new, at most some 4 MiB of each file, by the writers' wall clocks. Cost: that of what is new, and
        one open per file. Raises OSError for a file that cannot be read."""
        return sorted((told for name in self._paths for told in self._read(name)), key=lambda told: told.record.wall)

    def read_rest(self) -> Iterator[Told]:
        """What is new, however much it is: for after the writers have ended."""
        while told := self.read():
            yield from told

    def _read(self, name: str) -> list[Told]:
        records, self._offsets[name] = read_events(self._paths[name], self._offsets[name])
        return [Told(name, record) for record in records]
