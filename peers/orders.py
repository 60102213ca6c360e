"""How a peer is told to leave: a signal, or a command; in order first, by force when that takes too long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from swarm.errors import EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_OK

EXIT_TERMINATED = 128 + signal.SIGTERM

Leave = Callable[[str, int], str]
"""Begins to leave in order; see :meth:`peers.leaving.Leaving.ask`."""


class Orders:
    """Takes orders to leave. ``grace_s`` bounds leaving in order after a signal; 0: a signal ends the peer at once, and
    SIGINT is left to whoever started it."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._leave: Leave | None = None
        self._told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forced: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

    def listen(self) -> None:
        """Take SIGTERM from now on, and SIGINT when there is a grace."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, signal.SIGTERM)
        if self._grace_s:
            loop.add_signal_handler(signal.SIGINT, self._on_signal, signal.SIGINT)

    def adopt(self, leave: Leave) -> None:
        """From now on there is something to leave in order."""
        self._leave = leave

    def by_command(self, reason: str) -> str:
        """``swarm drain``: in order, however long it takes. Returns what happens now."""
        if self._leave is None:
            self._force("was told to leave before it took part", EXIT_OK)
            return "stopping: it had not joined the run yet"
        return self._leave(reason, EXIT_OK)

    async def forced(self) -> tuple[str, int]:
        """(reason, exit code) when the peer must end now: order was not asked for, is not possible, or takes longer
        than the grace."""
        orders: set[asyncio.Future[Any]] = {self._told, self._forced}
        await asyncio.wait(orders, return_when=asyncio.FIRST_COMPLETED)
        if not self._forced.done():
            await asyncio.wait({self._forced}, timeout=self._grace_s)
        if not self._forced.done():
            return f"could not leave in order within {self._grace_s:g} s", self._told.result()
        return self._forced.result()

    def _on_signal(self, number: signal.Signals) -> None:
        by_keyboard, again = number == signal.SIGINT, self._told.done()
        by, code = ("Ctrl-C", EXIT_INTERRUPTED) if by_keyboard else ("SIGTERM", EXIT_TERMINATED)
        if not self._grace_s or self._leave is None or again:
            self._force(f"was stopped by {by}{' again' if again else ''}", code)
            return
        self._told.set_result(code)
        self._leave(by, EXIT_OK if by_keyboard else EXIT_DRAINED)

    def _force(self, reason: str, exit_code: int) -> None:
        if not self._forced.done():
            self._forced.set_result((reason, exit_code))
