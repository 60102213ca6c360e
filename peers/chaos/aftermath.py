"""The consequences of a strike: the ends of peers that it explains, and the peers that must come back."""

from __future__ import annotations

from collections.abc import Iterable

from peers.chaos import faults
from peers.chaos.cast import twin_of
from peers.chaos.faults import CODES, KILLED, Fault
from peers.chaos.strikes import Planned


class Excuses:
    """The ends of peers that strikes explain. ``leaving`` were told to leave; ``to_end`` have limited memory, each with
    what was planned for it: the kernel says when they end."""

    def __init__(self) -> None:
        self.leaving: set[str] = set()
        self.to_end: dict[str, Planned | None] = {}
        self._codes: dict[str, set[int]] = {}
        self._forgiven: set[str] = set()

    def struck(self, name: str, fault: Fault, *, twin_alive: bool) -> bool:
        """Return whether the fault, which hit this peer, ends it at once, as far as is known. ``twin_alive``: it starts
        again beside another with its key."""
        ends = type(fault) in CODES and not isinstance(fault, faults.LimitMemory)
        if ends:
            self._codes.setdefault(name, set()).update(CODES[type(fault)])
        if isinstance(fault, faults.Stop):
            self.leaving.add(name)
        if isinstance(fault, faults.Twin) or twin_alive:  # which of the two goes on is theirs to say
            self._forgiven |= {name, twin_of(name)}
        return ends

    def started(self, names: Iterable[str], *, in_order: bool) -> None:
        """These were started again; ``in_order``: having left as they were told to."""
        for name in names:
            self.leaving.discard(name)
            if not in_order:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Let what ended it before explain nothing any more."""
        self._codes.pop(name, None)

    def explain(self, name: str, code: int | None) -> bool:
        """Return whether a strike is to blame that this peer ended with this code."""
        allowed = self._codes.get(name, set()) | (set(KILLED) if name in self.to_end else set())
        return name in self._forgiven or code in allowed

    def forced(self, name: str, code: int | None) -> bool:
        """Return whether it was told to leave, and killed because its time was up."""
        return name in self.leaving and code in KILLED

    def ended(self, name: str, code: int | None) -> None:
        """It was seen to have ended. Of two with one key the one that gave up is excused, and the other goes on."""
        self.leaving.discard(name)
        if name in self._forgiven and code not in self._codes.get(name, set()):
            self._forgiven -= {name, twin_of(name)}


class Returns:
    """The peers that strikes ``started``, ``awaited`` until they are ready, and those that a strike holds."""

    def __init__(self) -> None:
        self.started: set[str] = set()
        self.awaited: set[str] = set()
        self._held: dict[str, float] = {}
        self._now = 0.0

    def look(self, wall: float, ready: Iterable[str]) -> None:
        """It is so late now, and these have been ready."""
        self._now = wall
        self.awaited.difference_update(ready)

    def start(self, names: Iterable[str]) -> None:
        """These were started by a strike."""
        names = set(names)
        self.started |= names
        self.awaited |= names

    def hold(self, name: str, until: float) -> None:
        """A strike lasts for this peer until then."""
        self._held[name] = until

    def held(self) -> tuple[str, ...]:
        """For whom a strike lasts now, sorted."""
        return tuple(sorted(name for name, until in self._held.items() if until > self._now))
