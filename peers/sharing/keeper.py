"""Keep a peer that pauses or is started again: with ``--pause-when`` or ``--retry``.

The peer is a process of its own, as each of several devices is, so that a pause gives back all its memory, the GPU's
too, and the death of the peer is not ours. It watches the conditions itself while it runs, and ends with EXIT_PAUSED
when one holds; we look at them while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from peers.console.interrupt import SIGNALS
from peers.exit_codes import EXIT_DRAINED, EXIT_OK, EXIT_PAUSED, worth_a_retry
from peers.local.launcher import launched
from peers.local.peer_order import PEER_COMMAND, PeerOrder, order_for
from peers.options.model import PeerOptions
from peers.sharing.conditions import LOOK_S, STAY_S, PauseConditions, Steadily, quiet_s
from peers.sharing.limit_options import Return
from swarm.clock import Clock, SystemClock
from swarm.waiting import doubled

FIRST_S, LONGEST_S = 5.0, 600.0
"""Bounds of the pause before a peer is started again; it doubles from one to the other."""
MAX_TRIES = 24
"""In a row, without a life of STAY_S between: some three hours. Then the last exit code is ours."""

Say = Callable[[str, str], None]


def retry_pause_s(tries: int, chance: random.Random) -> float:
    """Seconds before the next start after so many failed ones in a row: doubled each time, and half to all of that, so
    that peers that were cut off together do not come back together."""
    return doubled(FIRST_S, tries, LONGEST_S) * chance.uniform(0.5, 1.0)


class PeerKeeper:
    """Starts a peer, again and again, until it is over or somebody ends it."""

    def __init__(self, options: PeerOptions, run: Callable[[Return], Coroutine[Any, Any, int]], clock: Clock, say: Say,
                 chance: random.Random) -> None:  # fmt: skip
        """``run`` runs the peer once, to its exit code; cancelled, it ends it."""
        self._options, self._run, self._clock, self._say, self._chance = options, run, clock, say, chance
        self._conditions = PauseConditions(options.pause_when, clock)
        self._short = self._tries = 0
        self.told: int | None = None
        """The exit code with which to end, once somebody has told us to."""

    async def keep(self) -> int:
        """Return the exit code of the last life. Cancelled, it ends the peer."""
        back = Return(keeper=os.getpid())
        if reason := await self._look():
            back = await self._away(reason)
        while True:
            began = self._clock.monotonic()
            code = await self._run(back)
            lived_s = self._clock.monotonic() - began
            if self.told is not None:
                # A peer that was just leaving for a pause says so; the pause is ours, and what ends us is not.
                return self.told if code == EXIT_PAUSED else code
            if code == EXIT_PAUSED:
                self._tries, self._short = 0, self._short + 1 if lived_s < STAY_S else 0
                back = await self._away("")
            elif self._options.retry and worth_a_retry(code):
                self._tries = 1 if lived_s >= STAY_S else self._tries + 1
                if self._tries > MAX_TRIES:
                    self._say("gives up", f"after {MAX_TRIES} tries in a row; the last ended with exit code {code}")
                    return code
                back = await self._later(code)
            else:
                return code

    async def _later(self, code: int) -> Return:
        seconds = retry_pause_s(self._tries - 1, self._chance)
        self._say("retry", f"the peer ended with exit code {code}; try {self._tries} of {MAX_TRIES} in {seconds:.0f} s")
        await self._clock.sleep(seconds)
        if reason := await self._look():
            return await self._away(reason)
        return Return(keeper=os.getpid(), reason=f"exit code {code}", seconds=seconds)

    async def _away(self, reason: str) -> Return:
        """Wait until no condition has held for long enough."""
        began, quiet = self._clock.monotonic(), quiet_s(self._options.resume_after, self._short)
        reason = reason or await self._look() or "a condition that held until now"
        self._say("paused", f"{reason}; comes back when nothing has held for {quiet:.0f} s")
        calm = Steadily(quiet)
        while not calm.seen(not await self._look(), self._clock.monotonic()):
            await self._clock.sleep(min(LOOK_S, quiet))
        seconds = self._clock.monotonic() - began
        self._say("resumes", f"after {seconds:.0f} s")
        return Return(keeper=os.getpid(), reason=reason, seconds=seconds)

    async def _look(self) -> str:
        found = await self._conditions.look()
        for condition, problem in self._conditions.news.items():
            self._say("pause", f"{condition}: {problem or 'can be checked again'}")
        return found


# --- the process of the peer, and signals ----------------------------------------------------------------------------


@dataclass(slots=True)
class PeerProcess:
    """The process of the peer, of one life after the other: ``order`` is what the next one is told, made of why it was
    away and the id of the last one's process, 0 for the first."""

    order: Callable[[Return, int], PeerOrder]
    _last: int = field(default=0, init=False)
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _sent: set[int] = field(default_factory=set, init=False)

    async def run(self, back: Return) -> int:
        """Start the peer and return its exit code, as a shell has it. Cancelled, it kills the peer."""
        order = self.order(back, self._last)
        process = self._process = await asyncio.create_subprocess_exec(
            *launched(PEER_COMMAND),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        self._last = process.pid
        try:
            if orders := process.stdin:
                with contextlib.suppress(OSError, RuntimeError):  # dead already: RuntimeError is how uvloop says so
                    orders.write(order_for(order).encode())
                    await orders.drain()
                orders.close()
            code = await process.wait()
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()
        if -code in self._sent:
            return _told_by(-code)  # it did not take signals yet, and had nothing to leave
        return 128 - code if code < 0 else code

    def send(self, number: int) -> bool:
        """Hand a signal on; returns whether there is anybody to take it."""
        if self._process is None:
            return False
        self._sent.add(number)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True


def _told_by(number: int) -> int:
    """The exit code after a signal that met nobody who had anything to leave."""
    return EXIT_OK if number == signal.SIGINT else EXIT_DRAINED


def keep(options: PeerOptions, order: Callable[[Return, int], PeerOrder], say: Say) -> int:
    """Keep a peer with these options until it is over or somebody ends us; returns its exit code. Blocking; the main
    thread only. ``order`` see :class:`PeerProcess`.

    SIGTERM, Ctrl-C and a closed terminal are handed on to the peer, which leaves in order; while it is away they end us
    at once: 0 after Ctrl-C, 75 after the others.
    """
    process = PeerProcess(order)
    chance = random.Random()
    keeper = PeerKeeper(options, process.run, SystemClock(), say, chance)

    async def until_over() -> int:
        keeping = asyncio.ensure_future(keeper.keep())
        with _handed_on(keeper, process, keeping):
            try:
                return await keeping
            except asyncio.CancelledError:
                if keeper.told is None:
                    raise
                return keeper.told

    return asyncio.run(until_over())


@contextlib.contextmanager
def _handed_on(keeper: PeerKeeper, process: PeerProcess, keeping: asyncio.Future[int]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        keeper.told = _told_by(number)
        if not process.send(number):
            keeping.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
