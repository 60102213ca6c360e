"""Choose the peer of this machine that a command means."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from peers.commands.look import Seen, look_at_all
from peers.console.words import CommandError, command_name
from peers.exit_codes import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.places import PlaceInfo, PlaceState, cut_off_founding, home_option, list_places
from swarm.membership.status_types import ENDED

_LEAST_PREFIX = 10
"""All our peer ids begin with the same eight characters: a shorter piece names nobody."""


def choose_live(home: Path, wanted: str | None, *, command: str) -> PlaceInfo:
    """The running peer called ``wanted`` (a peer's name, a place, or the beginning of a peer id), else the only one.

    Raises CommandError: exit code 3 when no such peer runs here, 2 when it could be several; it lists them, and shows
    how to give ``command`` for one of them.
    """
    if wanted is None:
        return _only(choose_all_live(home), command, "")
    places = list_places(home)
    found = matching([place for place in places if place.live], wanted)
    if not found:
        raise _not_running(wanted, places, home)
    return _only(found, command, f" that {wanted!r} could mean")


def choose_all_live(home: Path) -> list[PlaceInfo]:
    """All peers that run here. Raises CommandError, exit code 3, when none does."""
    live = [place for place in list_places(home) if place.live]
    if not live:
        raise nobody_here(home)
    return live


def choose_speaker(home: Path, wanted: str | None, *, command: str) -> PlaceInfo:
    """As :func:`choose_live`, for what any peer of a run can answer: without ``wanted``, and where all that run here
    are in one run, a ready one of them. Those that are starting do not count, unless all are. Blocks for two seconds at
    most. Raises CommandError as :func:`choose_live`."""
    live = [place for place in list_places(home) if place.live]
    if wanted is None and len(live) > 1:
        seen = look_at_all(live)
        begun = [one for one in seen if not one.starting]
        runs = {run_of(one) for one in begun}
        if not begun or (len(runs) == 1 and runs != {""}):
            return min(begun or seen, key=lambda one: (one.phase != "ready", one.standing is None)).place
    return choose_live(home, wanted, command=command)


def run_of(seen: Seen) -> str:
    """The id of the run that a place's peer is in, as far as it is known; else empty."""
    if seen.standing is not None:
        return seen.standing.run
    return seen.place.state.run if seen.place.state is not None else ""


def choose_any(home: Path, wanted: str, *, command: str) -> PlaceInfo:
    """The place that ``wanted`` means, a running peer's before any other. Raises CommandError as
    :func:`choose_live`."""
    places = list_places(home)
    found = matching([place for place in places if place.live], wanted) or matching(places, wanted)
    if not found:
        raise _unknown(wanted, places, home)
    return _only(found, command, f" that {wanted!r} could mean")


def matching(places: Sequence[PlaceInfo], wanted: str) -> list[PlaceInfo]:
    """The places that ``wanted`` may mean: by the place's name, else by the peer's, else by how its id begins."""
    for found in (
        [place for place in places if place.name == wanted],
        [place for place in places if place.state is not None and place.state.name == wanted],
        [place for place in places if place.state is not None and begins(place.state.peer, wanted)],
    ):
        if found:
            return found
    return []


def nobody_here(home: Path) -> CommandError:
    """Return the error for a machine without a running peer."""
    swarm, places, at = command_name(), list_places(home), home_option(home)
    offers = [f"{swarm} new --preset tiny{at} to start a run", f"{swarm} join INVITE{at} to join one"]
    began = [(one.state.started, one.name) for one in places if one.state is not None and one.state.run]
    if began:
        offers.insert(0, f"{swarm} dashboard {max(began)[1]}{at} for how its last run went")
    if (directory := _sampled(home, _newest(places))) is not None:
        offers.insert(0, f"{swarm} sample {shlex.quote(str(directory))} for text from what was learned")
    if (relay := _relay(places)) is not None:
        offers.insert(0, f"{swarm} relay --place {relay}{at} (and its options) to relay again as who it was")
    if (founding := cut_off_founding(places)) is not None:
        again = f"{swarm} new {shlex.quote(str(founding))}{at} (and the options of its peer)"
        offers.insert(0, f"{again} to come back to the run that was founded here")
    if _cut_short(places):
        offers.append(f"{swarm} new --resume{at} to go on with one whose peers are all gone")
    return CommandError("no peer runs here", check=f"places are looked for in {home} (--home, SWARM_HOME)",
                     next_=", ".join(offers), exit_code=EXIT_UNREACHABLE)  # fmt: skip


def end_is_known(home: Path) -> bool:
    """Return whether the peer that was started here last ended with a word: that none runs is no news then."""
    newest = _newest(list_places(home))
    return newest is not None and newest.end is not None


def _sampled(home: Path, state: PlaceState | None) -> Path | None:
    """The directory of a place's run, where a whole checkpoint of it lies here."""
    if state is None:
        return None
    from peers.home.run_directory import known_runs, said_run_id  # half a second, which only who finds nobody waits
    from swarm.state.checkpoints.files import held, steps

    with contextlib.suppress(OSError):  # what cannot be looked at is not offered
        for directory in known_runs(home):
            kept = directory.checkpoints
            if said_run_id(directory) == state.run and any(held(kept, step).complete for step in reversed(steps(kept))):
                return directory.root
    return None


def _newest(places: Sequence[PlaceInfo]) -> PlaceState | None:
    """The state of the peer that was started here last and was in a run."""
    states = [place.state for place in places if place.state is not None and place.state.run]
    return max(states, key=lambda state: state.started, default=None)


def _relay(places: Sequence[PlaceInfo]) -> str | None:
    """Return the place of a relay that was started here after everybody else; None where it was no relay."""
    known = [(place.state.started, place.state.role, place.name) for place in places if place.state is not None]
    _, role, name = max(known, default=(0.0, "", ""))
    return name if role == "relay" else None


def _cut_short(places: Sequence[PlaceInfo]) -> bool:
    """Return whether the last peer that was started here lost its run, or its life, or all of its run left together, as
    it or another peer here that was in that run saw."""
    newest = _newest(places)
    if newest is None or newest.end is None or newest.end.exit_code not in (EXIT_OK, EXIT_USAGE):
        return newest is not None
    states = [place.state for place in places if place.state is not None and place.state.run == newest.run]
    ends = [state.end for state in states if state.end is not None]
    return any(end.at >= newest.started and ENDED in end.reason for end in ends)


def _only(found: Sequence[PlaceInfo], command: str, meant: str) -> PlaceInfo:
    if len(found) == 1:
        return found[0]
    titles = {place.title for place in found}
    # A name that two peers share would not choose between them; a place always does.
    distinct = len(titles) == len(found) and " " not in found[0].title
    # Nobody should drain the first of a list because a line was there to paste.
    example = "NAME" if command == "drain" else found[0].title if distinct else found[0].name
    swarm, at = command_name(), home_option(found[0].path.parent)
    all_of_them = f"; all of them: {swarm} drain --all{at}" if command == "drain" and not meant else ""
    raise CommandError(f"there are {len(found)} peers here{meant}", check=_told_apart(found),
                    next_=f"{swarm} {command} --peer {example}{at}{all_of_them}", exit_code=EXIT_USAGE)  # fmt: skip


def _told_apart(places: Sequence[PlaceInfo]) -> str:
    """All of them in words, each with its run where they are in several."""
    runs = [(place.state.run_name, place.state.run[:12]) if place.state is not None else ("", "") for place in places]
    several = len(set(runs)) > 1
    return "; ".join(
        f"{place.described}{f' in {name} ({run})' if several and run else ''}"
        for place, (name, run) in zip(places, runs, strict=True)
    )


def _unknown(wanted: str, places: Sequence[PlaceInfo], home: Path) -> CommandError:
    known = "; ".join(place.described for place in places)
    if not wanted:
        return CommandError("a peer must be named, but the name is empty",
                         check="did the command in $(…) print anything?",
                         next_=f"{command_name()} status{home_option(home)}", exit_code=EXIT_UNREACHABLE)  # fmt: skip
    return CommandError(f"no peer here is called {wanted!r}",
                     check=f"there are {known}" if known else f"there is none in {home} (--home, SWARM_HOME)",
                     next_=f"{command_name()} status{home_option(home)}", exit_code=EXIT_UNREACHABLE)  # fmt: skip


def _not_running(wanted: str, places: Sequence[PlaceInfo], home: Path) -> CommandError:
    dead = matching(places, wanted)
    if not dead:
        return _unknown(wanted, [place for place in places if place.live], home)
    end = dead[0].state.end if dead[0].state else None
    how = f"it ended: {end.reason} (exit code {end.exit_code})" if end else "it was killed, or its machine went down"
    return CommandError(f"{dead[0].described} does not run", check=how,
                     next_=f"{command_name()} status{home_option(home)}", exit_code=EXIT_UNREACHABLE)  # fmt: skip


def begins(peer: str, wanted: str) -> bool:
    """Return whether ``wanted`` is how a peer's id begins, and long enough to name it."""
    return len(wanted) >= _LEAST_PREFIX and peer.startswith(wanted)
