"""Lives of the peers of a play, from events and strikes: when each was there, in which state, how it ended. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peers.chaos.invariants.evidence import Evidence, Fact
from swarm.ids import ENDS

State = Literal["absent", "joining", "ready", "leaving", "away", "cut off"]
"""``away``: paused; ``cut off``: no link to the others, or left behind by them."""


@dataclass(frozen=True, slots=True)
class Player:
    """A peer of the play, as the report names it."""

    name: str
    identity: str
    role: str
    region: str = ""


@dataclass(frozen=True, slots=True)
class Struck:
    """A line of ``faults.jsonl``. ``peers`` are the names of those it was meant for, ``back`` that it brings back."""

    wall: float
    kind: str
    label: str
    peers: tuple[str, ...]
    seconds: float | None = None
    back: bool = False

    @staticmethod
    def read(line: Mapping[str, Any]) -> Struck:
        """From decoded JSON. Raises KeyError for a line of another form."""
        label = str(line["label"])
        seconds = line.get("seconds")
        return Struck(
            float(line["t"]),
            str(line["kind"]),
            label,
            tuple(map(str, line["first"])),
            None if seconds is None else float(seconds),
            label.startswith("back:"),
        )


@dataclass(frozen=True, slots=True)
class End:
    """A peer's process or container ended: when, how (None: by the start that followed), and whether a strike is to
    blame; ``forced``: it was told to leave, and killed when its time was up."""

    wall: float
    name: str
    code: int | None
    struck: bool
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A state from one moment to another, by the wall clock; ``part`` is what the peer held then, "" for none."""

    state: State
    from_s: float
    to_s: float
    part: str = ""

    @property
    def hosts(self) -> bool:
        """Return whether it held a stage."""
        return self.part not in ("", ENDS)


@dataclass(frozen=True, slots=True)
class PeerLifetime:
    """All of a peer."""

    player: Player
    spans: tuple[Span, ...]

    def at(self, wall: float) -> Span | None:
        """Return its state at that moment, None before it was there."""
        return next((span for span in self.spans if span.from_s <= wall < span.to_s), None)


@dataclass(frozen=True, slots=True)
class _Change:
    """``cause`` is a fault's kind and label: of being away or cut off, or of what is over; "" stands for all labels.
    Who ``moved`` is what it was, with another part."""

    wall: float
    rank: int
    state: State | Literal["back", "moved"]
    part: str | None = None
    cause: tuple[str, str] = ("", "")


def lives(
    evidence: Evidence,
    players: Sequence[Player],
    strikes: Sequence[Struck],
    ends: Mapping[str, Sequence[float]],
    to_s: float,
) -> tuple[PeerLifetime, ...]:
    """One for each player, in their order, until ``to_s``. ``ends`` are when each was seen to have ended."""
    facts: dict[str, list[Fact]] = {}
    for fact in evidence.of(*_STATES, "PeerStarted", "PeerReady", "PartAssigned"):
        facts.setdefault(fact.peer, []).append(fact)
    found = []
    for player in players:
        changes = [change for fact in facts.get(player.identity, []) for change in _told(fact)]
        changes += [change for strike in strikes for change in _done(strike, player.name)]
        changes += [_Change(wall, 2, "absent") for wall in ends.get(player.name, ())]
        found.append(PeerLifetime(player, tuple(_spans(sorted(changes, key=lambda one: (one.wall, one.rank)), to_s))))
    return tuple(found)


_STATES: Mapping[str, State] = {"CutOff": "cut off", "Draining": "leaving", "PeerStopped": "absent"}


def _told(fact: Fact) -> Iterable[_Change]:
    if fact.kind == "PeerStarted":
        yield _Change(fact.wall - float(fact.fields["seconds"]), 1, "joining", "")
    elif fact.kind == "PeerReady":
        yield _Change(fact.wall, 1, "ready", str(fact.fields.get("part") or ""))
    elif fact.kind == "PartAssigned":
        yield _Change(fact.wall, 1, "moved", str(fact.fields.get("part") or ""))
    else:
        yield _Change(fact.wall, 1, _STATES[fact.kind])


def _done(strike: Struck, name: str) -> Iterable[_Change]:
    """Return the effect of a strike on one peer."""
    if strike.kind == "heal":
        yield _Change(strike.wall, 0, "back", cause=("partition", ""))
    if name not in strike.peers:
        return
    if strike.kind == "kill":
        yield _Change(strike.wall, 0, "absent")
    elif strike.kind in ("restart", "lie", "start", "joiner_storm"):
        yield _Change(strike.wall, 0, "joining", "")
    elif strike.kind in _OVER:
        cause = (strike.kind, strike.label)
        yield _Change(strike.wall, 0, _OVER[strike.kind], cause=cause)
        if strike.seconds is not None:
            yield _Change(strike.wall + strike.seconds, 0, "back", cause=cause)
    elif strike.kind in _ENDS:
        yield _Change(strike.wall, 0, "back", cause=(_ENDS[strike.kind], ""))


_OVER: Mapping[str, State] = {"pause": "away", "partition": "cut off", "disconnect": "cut off"}
_ENDS: Mapping[str, str] = {"resume": "pause", "reconnect": "disconnect"}


class _Where:
    """A peer's state, and the fault that separates it from the others, until that is over or the peer reports its
    state."""

    def __init__(self) -> None:
        self._own: State = "absent"
        self._kept: dict[tuple[str, str], State] = {}

    @property
    def state(self) -> State:
        return next(reversed(self._kept.values()), self._own)

    def change(self, change: _Change) -> None:
        kind, label = change.cause
        if change.state == "moved":
            return
        if change.state == "back":
            self._kept = {
                cause: state for cause, state in self._kept.items() if cause[0] != kind or label not in ("", cause[1])
            }
        elif change.state in ("away", "cut off"):
            if self._own != "absent":
                self._kept[change.cause] = change.state
        elif change.state != "leaving" or self._own != "absent":
            self._own, self._kept = change.state, {}


def _spans(changes: Sequence[_Change], to_s: float) -> Iterable[Span]:
    where = _Where()
    part, since = "", -math.inf
    for change in changes:
        before = where.state
        where.change(change)
        early = change.state == "moved" and before in ("absent", "joining")  # it holds nothing yet
        held = part if change.part is None or early else change.part
        if (where.state, held) == (before, part):
            continue
        if before != "absent" and change.wall > since:
            yield Span(before, since, min(change.wall, to_s), part)
        part, since = held, change.wall
    if where.state != "absent" and since < to_s:
        yield Span(where.state, since, to_s, part)
