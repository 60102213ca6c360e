"""Find the history file that a command means, and the peers that a place knew in a run."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from peers.console.words import CommandError, command_name, listed
from peers.control.choose import choose_any
from peers.exit_codes import EXIT_USAGE
from peers.home.places import PlaceInfo, home_directory, list_places
from peers.home.sessions import HISTORY, sessions_of
from swarm.consensus.history import HistoryLine, HistoryReader
from swarm.consensus.records import CloseRecord
from swarm.errors import ConfigError, StateError

_TAIL_BYTES = 1 << 20
_STEP = re.compile(rb'^\{"run".{0,200}?"step":(\d+),', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HistorySource:
    """A history file, and who keeps it in words (empty: a file that was given)."""

    path: Path
    keeper: str = ""
    run_name: str = ""


def find_history(wanted: str | None, file: str | None, home: str | None) -> HistorySource:
    """The history in ``file`` (or in that directory), else that of the place ``wanted``, else of this machine's only
    run: the longest of those with the newest step, of a running peer if there is one. Who joins late has less of it.

    Parses no record. Raises ConfigError for a path without a history; CommandError when there is no such place (exit
    code 3), when it could be several, or when its peer has no history (yet).
    """
    if file is not None:
        if wanted is not None:
            raise ConfigError("--file", file, "either a file or a peer", "Leave one of them out.")
        return HistorySource(_in_path(Path(file)))
    root = home_directory(home)
    if wanted is not None:
        return _kept_by(choose_any(root, wanted, command="history"))
    return _of_only_run(root, list_places(root))


def _in_path(path: Path) -> Path:
    found = path / HISTORY if path.is_dir() else path
    if found.is_file():
        return found
    below = list(path.glob(f"peers/*/{HISTORY}")) if path.is_dir() else []
    if below:  # the directory of a local run, whose peers each keep one
        return _longest(below)
    raise ConfigError("--file", str(path), f"a {HISTORY}, or a directory with one",
                      f"{command_name()} history shows that of this machine's peer.")  # fmt: skip


def _of_only_run(root: Path, places: Sequence[PlaceInfo]) -> HistorySource:
    having = {path: place for place in places if (path := _current(place)) is not None}
    if not having:
        raise CommandError("no peer of this machine has a history", check=_looked_in(root, places),
                        next_=f"{command_name()} status --all, or {command_name()} history --file PATH")  # fmt: skip
    live = {path: place for path, place in having.items() if place.live} or having
    runs = {_run(place) for place in live.values()}
    if len(runs) > 1:
        known = "; ".join(f"{place.described} in {_run(place)[:12] or 'a run'}" for place in live.values())
        raise CommandError(f"peers of {len(runs)} runs are here", check=known, exit_code=EXIT_USAGE,
                        next_=f"{command_name()} history {next(iter(live.values())).name}")  # fmt: skip
    path = _longest(live)
    return _source(path, live[path])


def _kept_by(place: PlaceInfo) -> HistorySource:
    path = _current(place)
    if path is not None:
        return _source(path, place)
    older = _newest(place.path.glob(f"sessions/*/{HISTORY}"))
    example = f"{command_name()} history --file {shlex.quote(str(older[0]))}" if older else f"{command_name()} status"
    waits = "it takes part in no run yet" if place.live else "it ended before the run began"
    raise CommandError(f"{place.described} has no history: {waits}", next_=example,
                    check=f"earlier sessions have one: {listed([path.parent.name for path in older])}" if older
                    else f"its session is {place.state.session if place.state else place.path}")  # fmt: skip


def _source(path: Path, place: PlaceInfo) -> HistorySource:
    return HistorySource(path, place.described, place.state.run_name if place.state else "")


def _current(place: PlaceInfo) -> Path | None:
    """The history of a place's last start."""
    if place.state is None or not place.state.session:
        return None
    session = Path(place.state.session)
    # A home that was moved, or copied from another machine, has its sessions elsewhere than it once noted.
    here = (session / HISTORY, place.path / "sessions" / session.name / HISTORY)
    return next((path for path in here if path.is_file()), None)


def _run(place: PlaceInfo) -> str:
    return place.state.run if place.state is not None else ""


def _longest(paths: Iterable[Path]) -> Path:
    """Return the longest of those with the newest step: a peer killed before a run was resumed has more records, but
    old ones."""
    return max(paths, key=lambda path: (_newest_step(path), path.stat().st_size, path))


def _newest_step(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        found = _STEP.findall(file.read())
    return int(found[-1]) if found else -1


def _newest(paths: Iterable[Path]) -> list[Path]:
    """Those written to last come first."""
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)


def _looked_in(root: Path, places: Sequence[PlaceInfo]) -> str:
    if not places:
        return f"places are looked for in {root} (--home, SWARM_HOME)"
    return f"there are {listed([place.described for place in places])}; a history begins with the run"


# --- memories --------------------------------------------------------------------------------------------------------
# What a place remembers of a run: who comes back asks the others of it, when its invite's contacts are gone.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The newest record of a place in a run: its step, 0 for the genesis, when it was written, and the others of it:
    the addresses, one of each before the second of anybody, and the names."""

    step: int
    at: float
    addresses: tuple[str, ...]
    names: tuple[str, ...]


def acquaintances(place: Path, run: str, own: str) -> tuple[str, ...]:
    """Return the addresses that :func:`remembered` finds; empty for a place that never took part."""
    memory = remembered(place, run, own)
    return () if memory is None else memory.addresses


def remembered(place: Path, run: str, own: str) -> RunMemory | None:
    """Return what a place remembers of a run, of the newest session that knows others besides ``own``; None for a place
    that never took part.

    Cost: the end of one history file. What cannot be read is passed over.
    """
    alone = None
    for session in sessions_of(place, run):
        with contextlib.suppress(OSError):
            record, at = _last_record(session / HISTORY), (session / HISTORY).stat().st_mtime
            if record is None or record.run != run:
                continue
            others = [member for member in record.members.members if member.peer != own]
            turns = zip_longest(*(member.addresses for member in others))
            addresses = tuple(address for turn in turns for address in turn if address is not None)
            names = tuple(record.members.names[member.peer] for member in others)
            found = RunMemory(step=record.step, at=at, addresses=addresses, names=names)
            if addresses:
                return found
            alone = alone or found
    return alone


def _last_record(path: Path) -> CloseRecord | None:
    """Return the newest that can be read: from the file's end, else, where that is longer than usual or damaged, in one
    pass."""
    with path.open("rb") as file:
        begin = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(begin)
        lines = file.read().split(b"\n")[1 if begin else 0 : -1]  # without what is not whole
    if lines:
        with contextlib.suppress(ValueError):
            return HistoryLine.decode(lines[-1]).record
    newest = None
    with contextlib.suppress(StateError):
        for line in HistoryReader(path):
            newest = line.record
    return newest
