"""A world in one thread whose time is virtual (:mod:`swarm.sim.loop`).

The same program with the same seeds does the same things in the same order, whatever the machine is doing: nothing
waits for real, and threads are not used. What is left to the program is not to read the clock or a random source
elsewhere, nor to depend on the order of a set of strings (fixed per process, see PYTHONHASHSEED).

A frozen peer stands still as a process does after SIGSTOP: its timers are due when it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.sim.loop import PEER, SimLoop

T = TypeVar("T")

EPOCH_S = 1_700_000_000.0
"""The wall clock of a world begins here."""


class LoopClock:
    """A :class:`~swarm.clock.Clock` of the running loop's time. ``skew_s`` is how far the wall clock is off."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def monotonic(self) -> float:
        """See :class:`~swarm.clock.Clock`."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """See :class:`~swarm.clock.Clock`."""
        return EPOCH_S + self.monotonic() + self.skew_s

    async def sleep(self, seconds: float) -> None:
        """See :class:`~swarm.clock.Clock`."""
        await asyncio.sleep(seconds)


def new_loop(longest_s: float = 1e7) -> SimLoop:
    """A loop at time 0. Sockets, signals and child processes are not for it: it has none of those methods."""
    return SimLoop(longest_s=longest_s)  # type: ignore[abstract]


def run_world(main: Coroutine[Any, Any, T], *, longest_s: float = 1e7) -> T:
    """Run a world to the end of ``main``; what still runs then is cancelled, the frozen included. Raises what ``main``
    raises, :class:`Stalled` when it waits for what never comes or goes on for more than ``longest_s`` virtual seconds.
    """
    with asyncio.Runner(loop_factory=lambda: new_loop(longest_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)  # noqa: S101 - made the line above
        try:
            return runner.run(main)
        finally:
            for peer in loop.frozen:
                loop.thaw(peer)


def as_peer(name: str) -> contextvars.Context:
    """A context in which everything that is started belongs to a peer."""
    context = contextvars.copy_context()
    context.run(PEER.set, name)
    return context
