"""A clock that stands still until it is set."""

from __future__ import annotations


class FakeClock:
    """Satisfies :class:`swarm.clock.Clock`."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def wall(self) -> float:
        """The same."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Jumps."""
        self.now += seconds
