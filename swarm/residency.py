"""Which part's work a shared device does next, and which parts are on it. Pure.

One machine may hold more parts than its device has room for. Work comes in for all of them; where each piece brought
its part anew, the device would do nothing else. So the part that is served keeps the device for a *lease*: until it has
nothing to do, or has done so many pieces that others shall have their turn. Nobody but the machine knows of this.

The device holds RESIDENT parts at most: the one that is served, and the one before, whose next lease is often near.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

RESIDENT = 2
LEASE = 32
"""Pieces of work: a part is moved once for so many."""


class TurnOrder:
    """Whose piece of work is done next. A part has any number of pieces waiting; one is done at a time."""

    def __init__(self, lease: int = LEASE) -> None:
        self._lease, self._served, self._done = lease, "", 0
        self._waiting: Counter[str] = Counter()  # in the order in which parts began to wait

    def wait(self, part: str) -> None:
        """One more piece of a part's work waits."""
        self._waiting[part] += 1

    def give_up(self, part: str) -> None:
        """One piece less waits."""
        self._waiting[part] -= 1
        if not self._waiting[part]:
            del self._waiting[part]

    def next(self) -> str | None:
        """Return the part of which a piece is done now, which waits no more; None where nothing waits."""
        others = [part for part in self._waiting if part != self._served]
        if self._served not in self._waiting or (self._done >= self._lease and others):
            if not others:
                return None
            if left := self._waiting.pop(self._served, 0):  # it is the last now that has its turn again
                self._waiting[self._served] = left
            self._served, self._done = others[0], 0
        self._done += 1
        self.give_up(self._served)
        return self._served


class Resident(Protocol):
    """A part that is on the device for some of the time."""

    def depart(self) -> None:
        """Leave the device; what was computed there is kept."""


class Residents:
    """The parts that are on the device, the one that was used last at the end. One thread at a time."""

    def __init__(self, most: int = RESIDENT) -> None:
        self._most = most
        self.there: list[Resident] = []
        self.moves = 0
        """How often a part came to the device."""

    def use(self, part: Resident) -> bool:
        """A part is computed with now. Return whether it has to be brought; who has to go for it has gone."""
        known = part in self.there
        if known:
            self.there.remove(part)
        while len(self.there) >= self._most:
            self.there.pop(0).depart()
        self.there.append(part)
        self.moves += not known
        return not known
