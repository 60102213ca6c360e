"""Where a dashboard sees a run from, without taking part in it: the files of its peers, and a peer of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from peers.commands.history_source import HISTORY
from peers.console.words import CommandError
from peers.control.client import ask
from peers.dashboard.overview import Overview
from peers.exit_codes import EXIT_USAGE
from peers.home.places import PlaceInfo, look_at_place
from swarm.consensus.history import HistoryLine
from swarm.errors import ConfigError
from swarm.monitoring.reader import EventTail

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
    somebody is there who can."""

    def __init__(self, events: Mapping[str, Path], history: Path, look: Look | None = None) -> None:
        self._events, self._history, self._look = EventTail(events), HistoryTail(history), look
        self._looking: asyncio.Task[Mapping[str, Any] | None] | None = None

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`RunSource`."""
        told = await asyncio.to_thread(self._events.read)
        for one in told:
            overview.event(one.record)
        for line in await asyncio.to_thread(lambda: list(self._history.read())):
            overview.record(line.record)
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            if watched and (found := looked.result()) is not None:
                overview.look(found)
        if (
            watched and self._look is not None and self._looking is None
        ):  # it may take seconds: steps are shown meanwhile
            self._looking = asyncio.ensure_future(self._look())


class PlaceSource:
    """A peer of this machine, whoever is in its place: by the files of its session, and its control socket."""

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
            self._files = FilesSource({state.name: session / EVENTS}, session / HISTORY, self._ask)
        if self._files is not None:
            await self._files.poll(overview, watched=watched)

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


def directory_source(directory: Path) -> tuple[FilesSource, str]:
    """The run whose files are in ``directory``, and what it is called: a local run's directory, a peer's session, or
    one with the events of one peer. Raises ConfigError for one without any."""
    found = {path.parent.name: path for path in sorted(directory.glob(f"peers/*/{EVENTS}"))}
    if not found and (directory / EVENTS).is_file():
        found = {directory.name: directory / EVENTS}
    if not found:
        remedy = "Name a directory that swarm quickstart wrote (--out), or one below sessions/ of a peer's place."
        raise ConfigError("RUN", str(directory), f"a directory with peers/*/{EVENTS} or {EVENTS}", remedy)
    histories = [path.parent / HISTORY for path in found.values() if (path.parent / HISTORY).is_file()]
    history = max(histories, key=lambda path: path.stat().st_size, default=next(iter(found.values())).parent / HISTORY)
    return FilesSource(found, history), directory.resolve().name


def neither_nor(given: str) -> CommandError:
    """Return the error for what is no invite, no address and no directory."""
    return CommandError(
        f"{given!r} is no directory, and no invite",
        check="an invite begins with swarm1:, a peer's address with /ip4/, /ip6/ or /dns",
        next_="Without an argument the peer of this machine is shown.",
        exit_code=EXIT_USAGE,
    )
