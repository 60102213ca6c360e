"""How long to leave a busy peer alone: twice as long each time, within bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm.clock import Clock
from swarm.errors import Busy

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


async def insist(send: Callable[[], Awaitable[None]], clock: Clock, *, within_s: float) -> None:
    """Send until the receiver is not Busy any more. For messages that only one peer can take: the way back.

    Raises what ``send`` raises, and its Busy when ``within_s`` seconds have passed.
    """
    patience, deadline = Patience(), clock.monotonic() + within_s
    while True:
        try:
            return await send()
        except Busy:
            pause = patience.pause_s()
            if clock.monotonic() + pause > deadline:
                raise
        await clock.sleep(pause)
