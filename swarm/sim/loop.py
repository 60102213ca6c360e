"""Run a world of peers in one thread on virtual time: an asyncio loop that jumps to the next timer when idle.

:func:`run_world` is the entry, :class:`SimLoop` the loop. The same program with the same seeds does the same things in
the same order, whatever the machine is doing: nothing waits for real, and threads are not used (``asyncio.to_thread``
runs inline). Callbacks of one moment run in the order in which they were asked for; tasks and futures hash by their
number, so that even the order of a set of tasks repeats itself. The program itself must not read the clock or a random
source elsewhere, nor depend on the order of a set of strings (fixed per process, see PYTHONHASHSEED).

Peers are told apart by context: everything that a peer's task starts belongs to the peer, and :meth:`SimLoop.freeze`
stops exactly that. A frozen peer stands still as a process does after SIGSTOP: its timers are due when it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarm.errors import BugError

T = TypeVar("T")

PEER: contextvars.ContextVar[str] = contextvars.ContextVar("PEER", default="")
"""Whose code is running in a :class:`SimLoop`, "" for the world's own."""


class Stalled(BugError):
    """Nothing is ready, no timer is set, and the world has not ended: whatever it waits for never comes."""


class SimLoop(asyncio.BaseEventLoop):
    """See the module; made by :func:`swarm.sim.loop.run_world`.

    asyncio's own loop with another turn: where that one waits for sockets and time, this one goes to the next timer.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[_Timer]
    _stopping: bool

    def __init__(self, *, longest_s: float = 1e7) -> None:
        super().__init__()
        self._now, self._longest = 0.0, longest_s
        self._numbers = itertools.count()
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self.turns = 0
        """Callbacks that have run."""

    # --- time and callbacks --------------------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    call_soon_threadsafe = asyncio.BaseEventLoop.call_soon  # there are no threads

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio. Timers of one moment run in the order in which they were set."""
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio's own name: a cancelled timer is dropped when it is due."""

    # --- freezing ------------------------------------------------------------------------------------------------

    def freeze(self, peer: str) -> None:
        """No callback of this peer runs until :meth:`thaw`. Idempotent. It may freeze itself: what runs ends first, at
        its next await."""
        self._frozen.setdefault(peer, [])

    def thaw(self, peer: str) -> None:
        """The peer goes on, first with what came due while it stood still."""
        self._ready.extend(self._frozen.pop(peer, ()))

    def is_frozen(self, peer: str) -> bool:
        """Return whether a peer stands still."""
        return peer in self._frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        """Return who stands still."""
        return tuple(self._frozen)

    # --- running -------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """asyncio's own name: run what is ready; when nothing is, go to the next moment at which something will be.

        Raises :class:`Stalled`."""
        if not self._ready:
            self._advance()
        while self._scheduled and self._scheduled[0].when() <= self._now:
            timer = heapq.heappop(self._scheduled)
            if not timer.cancelled():
                self._ready.append(timer)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle.cancelled():
                continue
            if self._frozen and (held := self._frozen.get(_whose(handle))) is not None:
                held.append(handle)
                continue
            self.turns += 1
            handle._run()

    def _advance(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        if not self._scheduled:
            if self._stopping:
                return
            frozen = f", and {', '.join(self._frozen)} stand still" if self._frozen else ""
            raise Stalled(f"at {self._now:.3f} s nothing is ready and no timer is set{frozen}")
        self._now = max(self._now, self._scheduled[0].when())
        if self._now > self._longest:
            raise Stalled(f"the world went on for {self._now:.0f} s, {self._longest:.0f} were allowed")

    # --- making things -------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return _Future(loop=self)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """See asyncio."""
        return _Task(coro, loop=self, name=str(name or f"task-{next(self._numbers)}"), context=context)

    def number(self) -> int:
        """A number that no other thing of this world has."""
        return next(self._numbers)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run it now and here."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the awaiter's
            future.set_exception(error)
        return future

    async def shutdown_asyncgens(self) -> None:
        """See asyncio, which would close what is left in the order of a set of addresses."""


def _whose(handle: asyncio.Handle) -> str:
    whose: str = handle._context.get(PEER, "")  # type: ignore[attr-defined]
    return whose


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.number) < (other.when(), other.number)


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop.number()

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    def __init__(self, coro: Any, *, loop: SimLoop, name: str, context: contextvars.Context | None) -> None:
        self._number = loop.number()  # first: starting a task puts it into a set
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


# --- running a world -------------------------------------------------------------------------------------------------


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
    """A loop at time 0. Sockets, signals, names and child processes are not for it: asking is an error."""
    return SimLoop(longest_s=longest_s)


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
