"""Where a dashboard sees a run from, without taking part in it: the files of its peers, and a peer of this machine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from peers.console.words import CommandError
from peers.control.client import ask
from peers.dashboard.overview import Overview
from peers.home.places import PlaceInfo, PlaceState, look_at_place
from peers.home.run_directory import RunDirectory
from peers.home.sessions import HISTORY
from swarm.consensus.history import HistoryLine
from swarm.errors import ConfigError
from swarm.events import StepClosed, WentBack
from swarm.monitoring.reader import EventTail, Recorded

EVENTS = "events.jsonl"
LOOK_S = 4.0
"""How long a peer of this machine may take to ask all others."""
PIECE_BYTES = 4 << 20

Look = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""What is the case now (:class:`~peers.control.status.SwarmLook` as plain data); None where nobody can say."""


class RunSource(Protocol):
    """A run to look at."""

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """Give ``overview`` what is new. Unless ``watched`` nobody looks, and nothing is asked of other peers."""


class HistoryTail:
    """The records of a history file, from its first on, while its writer goes on."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._file_id = path, 0, 0

    def read(self) -> Iterator[HistoryLine]:
        """Give what is new, some 4 MiB at most. A file that was begun anew is read from its start; what no peer has
        written ends it for good. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if status.st_ino != self._file_id or status.st_size < self._offset:
                    self._offset, self._file_id = 0, status.st_ino
                file.seek(self._offset)
                data = file.read(PIECE_BYTES)
                if b"\n" not in data:
                    data += file.readline()
        except FileNotFoundError:
            return
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                decoded = HistoryLine.decode(line)
            except ValueError:
                return
            self._offset += len(line)
            yield decoded


class FilesSource:
    """The event files of some peers by name, and the history of one of them. ``look`` says what is the case now, where
    somebody is there who can; ``silent`` is what to say where it cannot."""

    def __init__(
        self, events: Mapping[str, Path], history: Path | None, look: Look | None = None, silent: str = ""
    ) -> None:
        self._events, self._look, self._silent = [EventTail(events)], look, silent
        self._history = None if history is None else HistoryTail(history)
        self._looking: asyncio.Task[Mapping[str, Any] | None] | None = None

    def add(self, events: Mapping[str, Path], history: Path | None) -> None:
        """Read the events of more peers, and this history where there was none to read."""
        if events:
            self._events.append(EventTail(events))
        if self._history is None and history is not None:
            self._history = HistoryTail(history)

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`RunSource`."""
        told, lines = await asyncio.to_thread(self._read)
        for record in told:
            returned = isinstance(record.event, WentBack)
            if not returned:  # what happened later is told later
                overview.event(record)
            for line in _due(record.event, lines):
                overview.record(line.record)
            if returned:  # its record said who was lost, and the event says that nobody is
                overview.event(record)
        for line in lines:
            overview.record(line.record)
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            if watched and (found := looked.result()) is not None:
                overview.look(found)
            elif watched:
                overview.pulse.missed("stalled", self._silent)
        if (
            watched and self._look is not None and self._looking is None
        ):  # it may take seconds: steps are shown meanwhile
            self._looking = asyncio.ensure_future(self._look())

    def _read(self) -> tuple[list[Recorded], deque[HistoryLine]]:
        told = [one.record for tail in self._events for one in tail.read()]
        told.sort(key=lambda record: record.wall)
        return told, deque(() if self._history is None else self._history.read())


def _due(event: object, lines: deque[HistoryLine]) -> Iterator[HistoryLine]:
    """Take out of the lines those of the records that were decided by this event."""
    match event:
        case WentBack():
            known = [line.record.returns if line.record.repeats else 0 for line in lines]
            for _ in range(known.index(event.returns) + 1 if event.returns in known else 0):
                yield lines.popleft()
        case StepClosed():  # what follows on a return is of steps that are done again
            while lines and lines[0].record.step <= event.step and not lines[0].record.repeats:
                yield lines.popleft()


class PlaceSource:
    """A peer of this machine, no matter who is in its place: by the files of its session, and its control socket."""

    def __init__(self, place: PlaceInfo) -> None:
        self._place, self._session = place, ""
        self._files: FilesSource | None = None

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`RunSource`. A peer that was started again is followed into its new session."""
        self._place = await asyncio.to_thread(look_at_place, self._place.path)
        state = self._place.state
        if state is not None and state.session != self._session:
            session = Path(state.session)
            self._session = state.session
            silent = f"{self._place.title} does not answer, though its process is there: stopped, or too busy"
            self._files = FilesSource({state.name: session / EVENTS}, session / HISTORY, self._ask, silent)
        if self._files is not None:
            await self._files.poll(overview, watched=watched)
        overview.pulse.asked = "" if state is None else state.peer
        overview.pulse.gone = "" if self._place.live else f"{self._place.title} does not run any more: {_end(state)}"

    async def _ask(self) -> Mapping[str, Any] | None:
        if not self._place.live:
            return {}
        try:
            found = await asyncio.to_thread(
                ask, self._place.control, "look", who=self._place.described, timeout_s=LOOK_S
            )
        except CommandError:
            return None
        return found if isinstance(found, Mapping) else None


def _end(state: PlaceState | None) -> str:
    """Return how the peer of a place ended, in words."""
    if state is None or state.end is None:
        return "it was killed, or its machine went down"
    return f"{state.end.reason} (exit code {state.end.exit_code})"


class DirectorySource:
    """The run whose peers write below a directory: those that are there, and those who come later."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[Path] = set()
        self._files = FilesSource({}, None)

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`RunSource`."""
        found = await asyncio.to_thread(events_below, self._directory)
        new = {name: path for name, path in found.items() if path not in self._known}
        self._known.update(new.values())
        self._files.add(new, await asyncio.to_thread(_longest, found))
        overview.pulse.waits_for = "" if new else overview.pulse.waits_for
        if not found:
            overview.pulse.wrote((await asyncio.to_thread(self._directory.stat)).st_mtime)
            overview.pulse.waits_for = "the run is being prepared: none of its peers has started"
        await self._files.poll(overview, watched=watched)


def _longest(events: Mapping[str, Path]) -> Path | None:
    """Return the longest history beside some event files; None where there is none yet."""
    histories = [path.with_name(HISTORY) for path in events.values() if path.with_name(HISTORY).is_file()]
    return max(histories, key=lambda path: path.stat().st_size, default=None)


def directory_source(directory: Path) -> tuple[DirectorySource, str]:
    """The run whose files are in ``directory``, and what it is called: a local run's directory, a peer's session, or
    one with the events of one peer. Raises ConfigError for one without any."""
    if not holds_run(directory):
        remedy = "Name a directory that swarm quickstart wrote (--out), or one below sessions/ of a peer's place."
        raise ConfigError("RUN", str(directory), f"a directory with peers/*/{EVENTS} or {EVENTS}", remedy)
    return DirectorySource(directory), directory.resolve().name


def holds_run(directory: Path) -> bool:
    """Return whether a directory has the files of a run, or of one that is about to begin."""
    return bool(events_below(directory)) or RunDirectory(directory).launch_log.is_file()


def events_below(directory: Path) -> dict[str, Path]:
    """Return the event files of a run's directory, or the one of a peer's session, by the names of the peers."""
    found = {path.parent.name: path for path in sorted(directory.glob(f"peers/*/{EVENTS}"))}
    if not found and (directory / EVENTS).is_file():
        return {directory.name: directory / EVENTS}
    return found
