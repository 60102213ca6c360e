"""Read the last events of earlier starts of this machine's peers, to tell how a run ended here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.home.places import PlaceState, list_places
from swarm.disk import older
from swarm.parsing import parse_json

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LastClose:
    """The last step that a peer of this machine saw close: its run's last one, or one that ended the run, or another.
    ``since`` is when the peer was started, ``at`` when it saw it."""

    step: int
    ended: bool
    is_last: bool
    since: float
    at: float

    @property
    def over(self) -> bool:
        """True if the run was over with it."""
        return self.ended or self.is_last


def newest_closing(home: Path, run: str) -> LastClose | None:
    """Return the last closing of a run that peers of all places here saw: how it ended, unless one that was started
    after that saw a step close; else the newest step; None when they saw none. Reads events only; those of weeks take
    seconds."""
    closings = (_last_closing(place.state) for place in list_places(home) if place.state and place.state.run == run)
    found = [closing for closing in closings if closing is not None]
    end = max((one for one in found if one.over), key=lambda one: one.at, default=None)
    # Who saw less than the end, though later, was a little behind; unless it came when the run had been gone on with.
    counted = [one for one in found if end is None or one.since > end.at]
    return max(counted, key=lambda one: one.at, default=end)


def done_again(home: Path, run: str, end: LastClose) -> bool:
    """Return whether a peer that runs here now was started after a run's end: it must be doing the last steps again."""
    states = [place.state for place in list_places(home) if place.live and place.state is not None]
    return any(state.run == run and state.started > end.at for state in states)


def _last_closing(state: PlaceState) -> LastClose | None:
    events = Path(state.session) / "events.jsonl"
    closed = last_event(events, "StepClosed", whole=True)
    if closed is None:
        return None
    named = last_event(events, "RunFound", whole=True) or {}
    return LastClose(
        step=closed["step"],
        ended=bool(closed.get("ended")),
        is_last=closed["step"] == named.get("steps"),
        since=state.started,
        at=closed.get("t", state.started),
    )


def last_event(events: Path, kind: str, *, whole: bool = False) -> dict[str, Any] | None:
    """The newest event of a kind, among the last 64 KiB unless all of them are asked for, those of the file
    before it too; None when there is none or the file cannot be read. Memory: a line; files of weeks take seconds."""
    if not whole:
        return _newest(events, kind, _TAIL_BYTES)
    return _newest(events, kind) or _newest(older(events), kind)


def _newest(events: Path, kind: str, among: int | None = None) -> dict[str, Any] | None:
    found, named = None, kind.encode()
    try:
        with events.open("rb") as file:
            if among is not None:
                file.seek(max(0, events.stat().st_size - among))
            for line in file:
                if named in line:
                    found = _event(line, kind) or found
    except OSError:
        return None
    return found


def _event(line: bytes, kind: str) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("kind") == kind else None
