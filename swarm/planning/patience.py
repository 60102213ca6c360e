"""How long to leave a peer alone: twice as long each time, within bounds."""

from __future__ import annotations

SHORTEST_S = 0.005
LONGEST_S = 1.0


class Patience:
    """Pauses in seconds that double from ``first_s`` to LONGEST_S. Pure."""

    def __init__(self, first_s: float = SHORTEST_S) -> None:
        self._next_s = min(LONGEST_S, max(SHORTEST_S, first_s))

    def pause_s(self) -> float:
        """The next pause."""
        pause = self._next_s
        self._next_s = min(LONGEST_S, 2 * pause)
        return pause
