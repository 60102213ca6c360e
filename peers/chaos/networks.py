"""Which peers of one machine can call each other, as if each were on its region's network and on the one of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peers.chaos.faults import CannotInflict
from peers.chaos.shaping import ShapedLinks

WAN = "wan"
"""The network that all regions share."""
APART = "networks"
"""The cause of cuts between peers that have no network in common."""


class Networks:
    """Peers on networks, and the links that are cut because two have none in common. Without links nothing is cut."""

    def __init__(self, links: ShapedLinks | None) -> None:
        self._links = links
        self._on: dict[str, set[str]] = {}
        self._off: dict[str, set[str]] = {}
        self._cut: set[tuple[str, str]] = set()

    def add(self, name: str, region: str) -> None:
        """A peer that is on its region's network and on the one of all; again: no change."""
        self._on.setdefault(name, {WAN, *([region] if region else [])})
        self._off.setdefault(name, set())
        self._apply()

    def disconnect(self, names: Iterable[str], network: str) -> None:
        """These are on that network no more; on none for ""."""
        for name in names:
            self._off[name] |= self.meant(name, network)
        self._apply()

    def reconnect(self, names: Iterable[str], network: str) -> None:
        """They are again; on all of theirs for ""."""
        for name in names:
            self._off[name] -= self.meant(name, network)
        self._apply()

    def meant(self, name: str, network: str) -> set[str]:
        """Those of this peer's networks that are meant by that name: all of them by "". Raises CannotInflict for one
        that it is not on."""
        if network and network not in self._on[name]:
            raise CannotInflict(f"{name} is on no network {network!r}: {', '.join(sorted(self._on[name]))}")
        return {network} if network else set(self._on[name])

    def _apart(self) -> Iterator[tuple[str, str]]:
        there = {name: self._on[name] - self._off[name] for name in self._on}
        names = sorted(there)
        for number, one in enumerate(names):
            yield from ((one, other) for other in names[number + 1 :] if not there[one] & there[other])

    def _apply(self) -> None:
        wanted = set(self._apart())
        if self._links is not None:
            for one, other in sorted(wanted - self._cut):
                self._links.cut((one,), (other,), cause=APART)
            for one, other in sorted(self._cut - wanted):
                self._links.heal((one,), (other,), only=APART)
        self._cut = wanted
