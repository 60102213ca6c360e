"""Why each thing is held (a peer paused, a peer off a network): it is let go when the last of its causes ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Holds(Generic[T]):
    """Two timed faults may overlap on one thing: the one that ends first must not end the other."""

    def __init__(self) -> None:
        self._causes: dict[T, set[object]] = {}

    def hold(self, things: Iterable[T]) -> object:
        """These are held from now on by one cause more, which is returned."""
        cause = object()
        for thing in things:
            self._causes.setdefault(thing, set()).add(cause)
        return cause

    def end(self, cause: object) -> list[T]:
        """This cause is over. Returns what no cause holds any more and what it had held until now."""
        held = [thing for thing, causes in self._causes.items() if cause in causes]
        for thing in held:
            self._causes[thing].discard(cause)
        free = [thing for thing in held if not self._causes[thing]]
        self.forget(free)
        return free

    def forget(self, things: Iterable[T]) -> None:
        """Somebody has let them go by hand, whatever their causes."""
        for thing in things:
            self._causes.pop(thing, None)
