"""Tell a peer to leave, after a signal, a command or a notice: in order first, by force when that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from peers.console.interrupt import SIGNALS, received
from peers.exit_codes import EXIT_CODES, EXIT_OK
from swarm.errors import Ending, RunEnded
from swarm.waiting import ended, first_done

ResultT = TypeVar("ResultT")

Leave = Callable[[str, Ending], str]
"""Begins to leave in order; see :meth:`swarm.membership.leaving.Leaving.ask`."""

LAST_S, LAST_SHARE = 5.0, 0.5
"""So much of the time that a peer has to leave in, at most and as a share, is for the state that nobody else has."""

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class ForcedExit(RunEnded):
    """A peer had to end before it could in order, with an exit code that says what stopped it."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason, Ending.FAILED)
        self.exit_code = exit_code


class Orders:
    """Takes orders to leave. ``grace_s`` bounds leaving in order after a signal; 0: a signal ends the peer at once.

    SIGHUP means the same as SIGTERM. Made inside the loop that it serves.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._leaves: list[Leave] = []
        self._may_go: list[str] = []
        self._asked: tuple[str, Ending] | None = None
        self._loop = asyncio.get_running_loop()
        self._until, self._last_s, self._sooner = math.inf, LAST_S, asyncio.Event()
        self._told: asyncio.Future[int] = self._loop.create_future()
        self._forced: asyncio.Future[tuple[str, int]] = self._loop.create_future()
        self._noticed: int | None = None
        self._by_grace = False

    def listen(self) -> None:
        """Take SIGINT, SIGTERM and SIGHUP from now on, and for good: what comes after the loop has ended changes
        nothing any more. A signal that is ignored stays so: the one who started this peer deals with it.

        What :func:`peers.console.interrupt.defer` kept back counts as well.
        """
        # Not loop.add_signal_handler: the loop would put back the default when it closes, and a signal would then
        # kill the process before it has noted how it ended.
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_arrival)
        earlier = received()
        if earlier is not None:
            self.take(signal.Signals(earlier.number))

    def adopt(self, leave: Leave) -> None:
        """From now on there is this to leave in order, beside what there was; at once where that was asked for."""
        self._leaves.append(leave)
        if self._asked is not None:
            leave(*self._asked)

    def release(self, leave: Leave) -> None:
        """What was adopted has ended, and nobody waits for it."""
        self._leaves.remove(leave)

    @property
    def given(self) -> bool:
        """Return whether leaving was asked for."""
        return self._asked is not None

    def _leave(self, reason: str, ending: Ending) -> str:
        """Returns what the first says that leaves."""
        self._asked = reason, ending
        return [leave(reason, ending) for leave in self._leaves][0]

    def by_command(self, reason: str) -> str:
        """``swarm drain``: in order, however long it takes. Returns what happens now."""
        if not self._leaves:
            self._force("was told to leave before it took part", EXIT_OK)
            return "stopping: it had not joined the run yet"
        return self._leave(reason, Ending.DONE)

    def by_notice(self, reason: str, within_s: float | None, ending: Ending = Ending.DRAINED) -> None:
        """The machine is taken back, or wanted for something else: leave in order, and by force when that takes longer
        than ``within_s`` seconds (None: than the grace). The exit code is that of ``ending`` either way. Only the first
        notice counts."""
        if self._noticed is not None:
            return
        self._noticed = code = EXIT_CODES[ending]
        if not self._leaves:
            self._force(f"was told to leave before it took part: {reason}", code)
            return
        patience = self._grace_s if within_s is None else within_s
        self._bound(patience)
        self._leave(reason, ending)
        self._loop.call_later(patience, self._force, f"could not leave in order in time: {reason}", code)

    async def forced(self) -> tuple[str, int]:
        """(reason, exit code) when the peer must end now: order was not asked for, is not possible, or takes longer
        than the grace."""
        orders: set[asyncio.Future[Any]] = {self._told, self._forced}
        await asyncio.wait(orders, return_when=asyncio.FIRST_COMPLETED)
        if not self._forced.done():
            # A person who pressed Ctrl-C sees what is waited for, and can press it again; a supervisor cannot.
            by_keyboard = self._told.result() == 128 + signal.SIGINT
            await asyncio.wait({self._forced}, timeout=None if by_keyboard else self._grace_s)
        if not self._forced.done():
            exit_code = self._told.result() if self._noticed is None else self._noticed
            return f"could not leave in order within {self._grace_s:g} s", exit_code
        return self._forced.result()

    @property
    def left_s(self) -> float | None:
        """In so many seconds the peer is ended, in order or not; None where its time is not bounded."""
        return None if self._until == math.inf else max(0.0, self._until - self._loop.time())

    @property
    def bound(self) -> str:
        """:attr:`left_s` in words; "" where it is None."""
        if self.left_s is None:
            return ""
        grace = " (--grace)" if self._by_grace else ""
        return f"ends in {self.left_s:.0f} s at the latest{grace}, whatever it waits for"

    async def last_moments(self) -> float:
        """Return, once this peer has been told to leave within a time that is nearly over, how many seconds are left of
        it: what only it has must be somewhere else by then. Of several such times the earliest counts."""
        while (begin := self._until - self._last_s) > self._loop.time():
            self._sooner.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if begin == math.inf else begin):
                    await self._sooner.wait()
        return self.left_s or 0.0

    async def unless_sooner(self, work: Awaitable[ResultT]) -> ResultT | None:
        """Return the result of ``work``; None once an earlier time counts, having cancelled it."""
        self._sooner.clear()
        results = list[ResultT]()

        async def do() -> None:
            results.append(await work)

        await first_done(do(), self._sooner.wait())
        return results[0] if results else None

    def let_go(self, reason: str) -> None:
        """One that was adopted cannot leave in order, and may go now: nothing is lost with it. All do once all may.
        After :meth:`last_moments`."""
        self._may_go.append(reason)
        if len(self._may_go) < len(self._leaves):
            return
        code = self._told.result() if self._noticed is None else self._noticed
        self._force(f"could not leave in order in time: {'; '.join(dict.fromkeys(self._may_go))}", code)

    def _bound(self, patience_s: float) -> None:
        until = self._loop.time() + patience_s
        if until < self._until:
            self._until, self._last_s = until, min(LAST_S, LAST_SHARE * patience_s)
            self._by_grace = patience_s == self._grace_s
            self._sooner.set()

    async def unless_forced(self, name: str, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of ``work``. When the peer, called ``name``, must end before, ``work`` is cancelled, which
        is waited for, and RunEnded raised; a result that comes all the same is returned, for the caller to clear up."""
        working = self._loop.create_task(work)
        told = self._loop.create_task(self.forced())
        try:
            await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
            if not working.cancelled():
                return working.result()
            reason, exit_code = told.result()
            raise ForcedExit(f"{name} {reason}", exit_code)
        finally:
            await ended((working, told))

    def take(self, number: signal.Signals) -> None:
        """Act on a signal."""
        by, by_keyboard, again = _NAMES[number], number == signal.SIGINT, self._told.done()
        twice = again and self._told.result() == 128 + number
        if again and number == signal.SIGHUP:
            return  # a terminal that closes sends it twice: nobody asked for haste
        if not self._grace_s or not self._leaves or again:
            self._force(f"was stopped by {by}{', twice' if twice else ''}", 128 + number)
            return
        self._told.set_result(128 + number)
        if not by_keyboard:
            self._bound(self._grace_s)
        self._leave(by, Ending.DONE if by_keyboard else Ending.DRAINED)

    def _on_arrival(self, number: int, frame: FrameType | None) -> None:
        # In the main thread between any two of its instructions: nothing but a note for the loop, and never an error.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.take, signal.Signals(number))

    def _force(self, reason: str, exit_code: int) -> None:
        if not self._forced.done():
            self._forced.set_result((reason, exit_code))
