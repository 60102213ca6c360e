"""Find the run that a person means: by whatever there is at hand. Nothing is asked of anybody, and nothing slow read.

A directory is looked into first; then a name is looked for among the peers of this machine and the runs under ``out``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from peers.console.words import CommandError, command_name, listed
from peers.control.choose import choose_speaker, matching
from peers.dashboard.sources import holds_run
from peers.exit_codes import EXIT_USAGE
from peers.home.places import LOCK_FILE, RUNS, PlaceInfo, list_places, look_at_place
from peers.home.run_directory import OUT, RunDirectory, said_run_id

INVITES = ("swarm1:", "/ip4/", "/ip6/", "/dns")
"""How an invite, or the address of a peer, begins."""
MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Chosen:
    """One of three: the ``place`` of a peer of this machine, a ``directory`` with the files of a run, or an ``invite``.
    ``among`` says from how many it was chosen, empty where there was no choice."""

    place: PlaceInfo | None = None
    directory: Path | None = None
    invite: str = ""
    among: str = ""


def choose_run(given: str | None, peer: str | None, home: Path, *, command: str) -> Chosen:
    """Return what ``given`` means; without it, the run of this machine's ``peer``, or of its only one.

    Raises CommandError, which names what there is, where that is nothing or could be several.
    """
    if given is None:
        return Chosen(place=choose_speaker(home, peer, command=command))
    if given.lstrip().startswith(INVITES) and not os.path.isdir(given):
        return Chosen(invite=given.strip())
    for path in (given, os.path.join(OUT, given)) if given else ():
        if os.path.isdir(path):  # unlike Path's it says no to a name that is too long, as an invite is
            return _in_directory(Path(path), command)
    places = list_places(home)
    found = matching([place for place in places if place.live], given) or matching(places, given)
    if len(found) == 1:
        return _in_place(found[0])
    if found:
        raise CommandError(f"{given!r} fits {len(found)} peers of this machine",
                           check="; ".join(place.described for place in found),
                           next_=f"{command_name()} {command} {found[0].name}", exit_code=EXIT_USAGE)  # fmt: skip
    raise _nothing(given, home, command)


def _in_directory(directory: Path, command: str) -> Chosen:
    """Return the run of a directory: its own, that of the peer whose place it is, or the newest below it."""
    if holds_run(directory):
        return Chosen(directory=directory)
    if (directory / LOCK_FILE).is_file():
        return _in_place(look_at_place(directory))
    if directory.parent.name == RUNS and (run := said_run_id(RunDirectory(directory))):
        places = [place for place in list_places(directory.parent.parent) if place.state and place.state.run == run]
        if places:
            return _in_place(max(places, key=lambda place: (place.live, place.state.started if place.state else 0.0)))
    if any(place.live for place in list_places(directory)):
        return Chosen(place=choose_speaker(directory, None, command=command))
    below = [path for path in _directories(directory) if holds_run(path)]
    below += [path for place in _directories(directory) for path in _sessions(place)]
    below += _sessions(directory)
    if below:
        newest = max(below, key=lambda path: (_touched(path), path.name))
        return Chosen(directory=newest, among=f"the newest of {len(below)} in {directory}" if below[1:] else "")
    raise CommandError(f"no run is in {directory}", exit_code=EXIT_USAGE,
                       check=f"a run has peers/*/events.jsonl, or events.jsonl; here is {_named(directory)}",
                       next_=f"{command_name()} {command} DIR, with what swarm quickstart wrote (--out), or one below "
                       "sessions/ of a peer's place")  # fmt: skip


def _in_place(place: PlaceInfo) -> Chosen:
    """Return a running peer, or the files of the last one that was in its place."""
    session = Path(place.state.session) if place.state is not None and place.state.session else None
    if place.live or session is None:
        if not place.live:
            raise CommandError(f"{place.described} has not joined a run yet", check=str(place.path),
                               next_=f"{command_name()} status --all", exit_code=EXIT_USAGE)  # fmt: skip
        return Chosen(place=place)
    here = session if session.is_dir() else place.path / "sessions" / session.name  # a home may have been moved
    return Chosen(directory=here)


def _nothing(given: str, home: Path, command: str) -> CommandError:
    """Return the error for what means nothing here, with what there is."""
    peers = [place.title for place in list_places(home)]
    runs = sorted((path for path in _directories(OUT) if holds_run(path)), key=_touched, reverse=True)
    known = [f"peers here: {_some(peers)}"] if peers else [f"no peer has a place in {home}"]
    if runs:
        known.append(f"runs here: {_some([str(path) for path in runs])}")
    example = shlex.quote(peers[0]) if peers else str(runs[0]) if runs else "out/DIR"
    check = f"{'; '.join(known)}; an invite begins with swarm1:, a peer's address with /ip4/, /ip6/ or /dns"
    return CommandError(f"{given!r} is no directory, no peer of this machine, and no invite", check=check,
                        next_=f"{command_name()} {command} {example}; without an argument: the peer that runs here",
                        exit_code=EXIT_USAGE)  # fmt: skip


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(one for one in path.iterdir() if one.is_dir())
    except OSError:
        return []


def _sessions(place: Path) -> Iterable[Path]:
    return [path for path in _directories(place / "sessions") if holds_run(path)]


def _touched(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except OSError:
        return 0.0


def _named(directory: Path) -> str:
    names = [path.name for path in _directories(directory)]
    return _some(names) if names else "no directory"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more if more else listed(names)
