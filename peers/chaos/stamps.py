"""When peers wrote what is heard of them, by one clock: that of the world they are played in."""

from __future__ import annotations

from collections.abc import Callable


class Stamps:
    """Peers of one machine share its monotonic clock, which nobody sets; their wall clocks may be wrong on purpose, and
    whoever listens to them may be late, for it strikes too. So a moment is what the peer's monotonic clock said plus
    ``offset``: the least that ``wall`` was ever ahead of it when a line was read, which is wrong by no more than the
    quickest reading took. The clock may be that of a virtual machine which the peers run in."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.offset: float | None = None
        self.told_at = 0.0

    def tell(self, monotonic: float) -> None:
        """An event is told now: from here on it is ``told_at`` the moment when it was written."""
        ahead = self._wall() - monotonic
        self.offset = ahead if self.offset is None else min(self.offset, ahead)
        self.told_at = monotonic + self.offset
