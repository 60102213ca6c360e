"""Runs ``swarm logs``: what peers of this machine have told, from the events below their homes, as they told it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.console.narrator import EventPrinter
from peers.console.words import CommandError, command_name
from peers.exit_codes import EXIT_UNREACHABLE
from peers.home.places import PlaceInfo
from swarm.clock import SystemClock, moment
from swarm.events import Invited, NullSink
from swarm.monitoring.reader import EventTail, RawEvent, Recorded, RecordedEvent

EVERY_S = 0.5
"""How often files are looked at that somebody follows."""

Said = Callable[[str, str, str], None]
"""Gets a line's time, the peer's name, and the line."""


@dataclass(slots=True)
class _Retold:
    """A peer's lines, with the time and the peer before each: a :class:`~peers.console.voice.Speaker`, and the clock of
    what is retold."""

    name: str
    out: Said
    now: float = 0.0
    terminal: bool = False

    def say(self, text: str) -> None:
        """See :class:`~peers.console.voice.Speaker`."""
        for line in text.splitlines():
            self.out(moment(self.now), self.name, line)

    def update(self, text: str) -> None:
        """Nothing: what the next line replaced is not retold."""

    def close(self) -> None:
        """Nothing: the peer may have been started again in the same files."""

    def monotonic(self) -> float:
        """See :class:`~swarm.clock.Clock`."""
        return self.now

    def wall(self) -> float:
        """See :class:`~swarm.clock.Clock`."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """See :class:`~swarm.clock.Clock`."""
        await SystemClock().sleep(seconds)


class _Retelling:
    """The events of one peer as lines, but for its invite: lines are given to others who help."""

    def __init__(self, name: str, out: Said) -> None:
        self._voice = _Retold(name, out)
        self._printer = EventPrinter(NullSink(), self._voice, self._voice)

    def tell(self, record: Recorded) -> None:
        """Retell an event; one of another version of swarm is passed over."""
        if not isinstance(record.event, RawEvent | Invited):
            self._voice.now = record.wall
            self._printer.emit(record.event)


def retell(places: Sequence[PlaceInfo], *, lines: int, follow: bool, out: Said) -> None:
    """Print the newest ``lines`` of these places' newest sessions in the order of their times, and with ``follow`` all
    that come, until interrupted.

    Raises CommandError where none of them has any.
    """
    files = {place.path.name: Path(place.state.session) / "events.jsonl" for place in places
             if place.state is not None and place.state.session}  # fmt: skip
    if not any(file.is_file() for file in files.values()):
        raise CommandError("no peer of this machine has a log", check="has a peer been started here?",
                           next_=f"{command_name()} status --all", exit_code=EXIT_UNREACHABLE)  # fmt: skip
    names = {place.path.name: place.state.name or place.path.name for place in places if place.state is not None}
    newest: deque[tuple[str, str, str]] = deque(maxlen=lines)
    said: list[Said] = [lambda *line: newest.append(line)]
    tellers = {place: _Retelling(names[place], lambda *line: said[0](*line)) for place in files}
    tail = EventTail(files)
    _tell(tail.read_rest(), tellers)
    for line in newest:
        out(*line)
    said[0] = out
    if follow:
        asyncio.run(_follow(tail, tellers))


def _tell(events: Iterable[RecordedEvent], tellers: Mapping[str, _Retelling]) -> None:
    for told in events:
        tellers[told.name].tell(told.record)


async def _follow(tail: EventTail, tellers: Mapping[str, _Retelling]) -> None:
    clock = SystemClock()
    while True:
        _tell(await asyncio.to_thread(tail.read), tellers)
        await clock.sleep(EVERY_S)
