"""The sessions of a place, ``sessions/<date-time>-<first 8 of the run id>``: one directory a start, the newest of which
are kept, and what its peer needs to come back to the run that it founded: its files, and whom it knew there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

SESSIONS = "sessions"
KEPT_SESSIONS = 5
HISTORY = "history.jsonl"
_MANIFEST = "run.toml"
_SESSION = re.compile(r"[0-9]{8}-[0-9]{6}(-(?P<run>[0-9a-f]{8}))?(\.[0-9]+)?")


def new_session(place: Path, now: float, run: str) -> Path:
    """Make the directory of a start, and delete the surplus of earlier ones. Raises OSError when the disk refuses."""
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%d-%H%M%S")
    sessions = place / SESSIONS
    sessions.mkdir(mode=0o700, exist_ok=True)
    session = _new_directory(sessions, "-".join(filter(None, (stamp, run[:8]))))
    for path in surplus_sessions(sessions, session):
        shutil.rmtree(path, ignore_errors=True)
    return session


def _new_directory(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}.{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def surplus_sessions(sessions: Path, live: Path | None = None) -> list[Path]:
    """Those that are deleted when ``live`` is opened; the next start's, where that is None. Names begin with the time,
    so they sort by age. What is not named like a session is not ours to delete."""
    old = [path for path in sessions.iterdir() if path != live and _SESSION.fullmatch(path.name)]
    old.sort(key=lambda path: (path.name[:15], path.stat().st_mtime_ns), reverse=True)
    spared = _needed(old)
    return [path for path in old[KEPT_SESSIONS - 1 :] if path not in spared and path.is_dir() and not path.is_symlink()]


def _needed(newest_first: Sequence[Path]) -> set[Path]:
    """Those without which the peer of the place could not come back, or would not know that its run had begun, after
    many short starts: the newest history, and of the run that it founded last also where that was founded, first and
    last, since a person or a supervisor may type either again."""
    known = [path for path in newest_first if (path / HISTORY).is_file()]
    founded = [path for path in newest_first if (path / _MANIFEST).is_file()]
    if not founded:
        return set(known[:1])
    run = _run_in(founded[0])
    founded, of_it = ([path for path in found if _run_in(path) == run] for found in (founded, known))
    return {founded[0], founded[-1], *of_it[:1], *known[:1]}


def _run_in(session: Path) -> str:
    """Return how the id of its run begins; "" for a session that knows none."""
    found = _SESSION.fullmatch(session.name)
    return (found and found["run"]) or ""


def sessions_of(place: Path, run: str) -> list[Path]:
    """Return a place's sessions in a run, the newest first."""
    return sorted((place / SESSIONS).glob(f"*-{run[:8]}*"), reverse=True)


def founded_in(place: Path, run: str) -> Path | None:
    """Return the manifest with which a place's peer founded a run, as its newest session that has one keeps it."""
    return next((file for one in sessions_of(place, run) if (file := one / _MANIFEST).is_file()), None)
