"""Plan faults: what goes wrong, at which event, in which world; and note what was struck.

    plan = FaultPlan(
        Strike("kill", On(Accumulated, peer="host-1", nth=3), Kill(("host-1",))),
        Strike("back", On(StepClosed, peer="host-0", nth=2, after="kill"), Restart("host-1", keep_disk=True)),
        world=MemoryWorld(swarm),
    )
    run_world(swarm.run())
    plan.assert_fired()

A fault is struck by an event of a named peer, never by a guessed time; only how long it lasts may be said in seconds of
the world's clock. A world that cannot do what is planned says so before anything runs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from peers.chaos.faults import Fault, Moment
from peers.console.interrupt import Interrupted
from swarm.events import Event


@dataclass(frozen=True, slots=True)
class On:
    """The ``nth`` event of a kind (by class or name) that a peer writes ("" for anybody) whose fields are as ``where``
    says: equal to a value, or such that a callable says yes. Counted from the strike called ``after`` on."""

    kind: type[Event] | str
    peer: str = ""
    nth: int = 1
    where: Mapping[str, Any] = field(default_factory=dict)
    after: str = ""

    @property
    def described(self) -> str:
        """In words: "2 × StepClosed of host-0 where step = 5"."""
        kind = self.kind if isinstance(self.kind, str) else self.kind.__name__
        where = " and ".join(f"{name} = {value}" for name, value in self.where.items())
        words = (f"{self.nth} × {kind}" if self.nth > 1 else kind, f"of {self.peer}" if self.peer else "",
                 f"where {where}" if where else "", f"after {self.after}" if self.after else "")  # fmt: skip
        return " ".join(filter(None, words))

    def matches(self, peer: str, kind: str, fields: Mapping[str, Any]) -> bool:
        """Return whether it counts this event."""
        wanted = self.kind if isinstance(self.kind, str) else self.kind.__name__
        if kind != wanted or (self.peer and self.peer != peer):
            return False
        return all(name in fields and _fits(fields[name], value) for name, value in self.where.items())


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault and its moment. ``label`` is what other strikes and messages call it; unique in a plan."""

    label: str
    on: On
    fault: Fault


@dataclass(frozen=True, slots=True)
class Fired:
    """A strike that happened: when by the world's wall clock, and whom it hit (by name and by id)."""

    strike: Strike
    wall: float
    peers: tuple[str, ...]
    ids: tuple[str, ...]

    @property
    def victims(self) -> tuple[str, ...]:
        """Those it was meant for and has hit; whom it hit where nobody was named."""
        return tuple(name for name in self.strike.fault.victims if name in self.peers) or self.peers


class World(Protocol):
    """The swarm in which faults happen."""

    root: Path

    def check(self, fault: Fault) -> None:
        """Raises CannotInflict for a fault that this world has no means for, or names nobody in it."""

    def listen(self, hear: Callable[[str, str, Mapping[str, Any]], None]) -> None:
        """Tell (peer's name, kind, fields) of every event from now on, of later peers too."""

    def inflict(self, fault: Fault) -> Iterable[str]:
        """Do it, now; the names of those hit. What takes time goes on in the background."""

    def identity(self, name: str) -> str:
        """The peer id behind a name."""

    def wall(self) -> float:
        """The time that events are stamped with, in seconds since the epoch."""


class FaultPlan:
    """Strikes and what became of them. Raises CannotInflict, at once, for what the world cannot do, ValueError for
    labels that are not unique or not there.

    What fires is appended to ``faults.jsonl`` in the world's root, for the checkers. An error while a fault is
    inflicted is kept for :meth:`assert_fired`: the peer whose event it was is not to blame. ``about`` is told of each
    just before it is done, in whatever thread. Once it is ``over``, no event sets anything off.
    """

    def __init__(self, *strikes: Strike, world: World) -> None:
        labels = [strike.label for strike in strikes]
        if len(set(labels)) != len(labels):
            raise ValueError(f"labels are not unique: {labels}")
        for strike in strikes:
            if strike.on.after and strike.on.after not in labels:
                raise ValueError(f"{strike.label} waits for {strike.on.after!r}, which is no strike of this plan")
            if not isinstance(strike.fault, Moment):
                world.check(strike.fault)
        self._strikes, self._world = strikes, world
        self._seen = dict.fromkeys(labels, 0)
        self.fired: dict[str, Fired] = {}
        self.errors: list[tuple[str, Exception]] = []
        self.about: Callable[[Fault, float], None] = lambda fault, wall: None
        self.over = False
        self._writing = threading.Lock()
        world.listen(self._hear)

    def _hear(self, peer: str, kind: str, fields: Mapping[str, Any]) -> None:
        if self.over:
            return
        before = set(self.fired)  # a strike that this very event sets off does not let another count it
        for strike in self._strikes:
            on = strike.on
            if strike.label in before or (on.after and on.after not in before) or not on.matches(peer, kind, fields):
                continue
            self._seen[strike.label] += 1
            if self._seen[strike.label] == on.nth:
                self.strike(strike)

    def strike(self, strike: Strike) -> None:
        """Do it now, from any thread: for faults whose moment is a time and not an event. What was not planned is
        written down all the same."""
        try:
            self.strike_or_raise(strike)
        except Exception as error:  # noqa: BLE001 - told in assert_fired()
            self.errors.append((strike.label, error))

    def strike_or_raise(self, strike: Strike) -> None:
        """The same for who knows what to do when the world refuses: nothing is kept for :meth:`assert_fired` then."""
        wall = self._world.wall()
        self.about(strike.fault, wall)
        try:
            hit = () if isinstance(strike.fault, Moment) else tuple(self._world.inflict(strike.fault))
        except Interrupted:  # nobody knows how much of it is done: the checkers are to know of it
            self._note(strike, wall, strike.fault.victims)
            raise
        self._note(strike, wall, hit)

    def _note(self, strike: Strike, wall: float, hit: tuple[str, ...]) -> None:
        fired = Fired(strike, wall, hit, tuple(map(self._id, hit)))
        line: dict[str, Any] = {"t": wall, "kind": strike.fault.name, "peers": fired.ids, "label": strike.label}
        line["seconds"] = getattr(strike.fault, "seconds", None)
        line["took_s"] = round(self._world.wall() - wall, 3)
        line |= {"names": hit, "first": fired.victims}
        with self._writing, (self._world.root / "faults.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        # Last: who waits for this key reads the file next, from another thread.
        self.fired[strike.label] = fired

    def _id(self, name: str) -> str:
        try:
            return self._world.identity(name)
        except KeyError:  # it was to be started, and is not yet
            return ""

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of fired faults of each kind."""
        names = [fired.strike.fault.name for fired in self.fired.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @property
    def never(self) -> set[str]:
        """The labels of those that will not happen any more: they broke, or wait for one that did."""
        found = {label for label, _ in self.errors}
        while more := {one.label for one in self._strikes if one.on.after in found and one.label not in found}:
            found |= more
        return found - set(self.fired)

    def broken(self) -> list[str]:
        """Return the error of every strike that failed."""
        return [f"{label}: {type(error).__name__}: {error}" for label, error in self.errors]

    def missing(self) -> list[str]:
        """Every strike that did not happen, with how often its event was seen."""
        known = {label for label, _ in self.errors} | set(self.fired)
        return [
            f"{one.label}: {one.fault.name} did not fire; {self._seen[one.label]} of {one.on.nth} events seen"
            for one in self._strikes
            if one.label not in known
        ]

    def assert_fired(self) -> None:
        """Raises AssertionError naming every strike that did not happen, or that broke."""
        if problems := [*self.broken(), *self.missing()]:
            raise AssertionError("\n  ".join(["faults did not happen as planned:", *problems]))


def _fits(value: Any, wanted: Any) -> bool:
    return bool(wanted(value)) if callable(wanted) else bool(value == wanted)
