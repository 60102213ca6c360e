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
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarm.errors import BugError

T = TypeVar("T")

PEER: contextvars.ContextVar[str] = contextvars.ContextVar("PEER", default="")
"""Whose code is running in a :class:`SimLoop`, "" for the world's own."""


class Stalled(BugError):
    """Nothing is ready, no timer is set, and the world has not ended: whatever it waits for never comes."""


class SimLoop(asyncio.AbstractEventLoop):
    """See the module; made by :func:`swarm.sim.loop.run_world`."""

    def __init__(self, *, longest_s: float = 1e7) -> None:
        self._now, self._longest = 0.0, longest_s
        self._numbers = itertools.count()
        self._ready: deque[_Callback | _Timer] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._frozen: dict[str, list[_Callback | _Timer]] = {}
        self._running = self._stopping = self._closed = self._debug = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self.turns = 0
        """Callbacks that have run."""

    # --- time and callbacks --------------------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See asyncio."""
        handle = _Callback(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio. Timers of one moment run in the order in which they were set."""
        handle = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

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
        """Whether a peer stands still."""
        return peer in self._frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        """Who stands still."""
        return tuple(self._frozen)

    # --- running -------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """See asyncio. Raises :class:`Stalled`."""
        if self._running or self._closed:
            raise RuntimeError("this loop is running or closed")
        self._running = True
        before, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._running = self._stopping = False
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Any) -> Any:
        """See asyncio."""
        task: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._end)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._end)
        if not task.done():
            raise RuntimeError("the loop was stopped before its future was done")
        return task.result()

    def _finalize(self, generator: Any) -> None:
        """A generator was dropped before its end."""
        if not self._closed:
            self.create_task(generator.aclose())

    def _end(self, task: object) -> None:
        self.stop()

    def _turn(self) -> None:
        """Run what is ready; when nothing is, go to the next moment at which something will be."""
        if not self._ready:
            self._advance()
        while self._timers and self._timers[0][0] <= self._now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle.cancelled():
                continue
            if self._frozen and (held := self._frozen.get(handle.peer)) is not None:
                held.append(handle)
                continue
            self.turns += 1
            handle._run()

    def _advance(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            if self._stopping:
                return
            frozen = f", and {', '.join(self._frozen)} stand still" if self._frozen else ""
            raise Stalled(f"at {self._now:.3f} s nothing is ready and no timer is set{frozen}")
        self._now = max(self._now, self._timers[0][0])
        if self._now > self._longest:
            raise Stalled(f"the world went on for {self._now:.0f} s, {self._longest:.0f} were allowed")

    def stop(self) -> None:
        """See asyncio."""
        self._stopping = True

    def is_running(self) -> bool:
        """See asyncio."""
        return self._running

    def is_closed(self) -> bool:
        """See asyncio."""
        return self._closed

    def close(self) -> None:
        """See asyncio."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._frozen.clear()

    # --- making things -------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return _Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """See asyncio."""
        return _Task(coro, loop=self, name=name or f"task-{next(self._numbers)}", context=context)

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
        """See asyncio: nothing is kept of them here."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """See asyncio: there is none."""

    # --- odds and ends -------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        """See asyncio."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """See asyncio."""
        self._debug = enabled

    def get_task_factory(self) -> Any:
        """Tasks are always the loop's own."""
        return None

    def set_exception_handler(self, handler: Any) -> None:
        """See asyncio."""
        self._handler = handler

    def get_exception_handler(self) -> Any:
        """See asyncio."""
        return self._handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See asyncio."""
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """See asyncio: it is logged."""
        error = context.get("exception")
        logging.getLogger("asyncio").error("%s", context.get("message"), exc_info=error)


class _Callback(asyncio.Handle):
    """A callback that knows whose it is."""

    __slots__ = ("peer",)

    def __init__(self, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None) -> None:
        super().__init__(callback, args, loop, context)
        self.peer: str = PEER.get() if context is None else context.get(PEER, "")


class _Timer(asyncio.TimerHandle):
    __slots__ = ("peer",)

    def __init__(
        self, when: float, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.peer: str = PEER.get() if context is None else context.get(PEER, "")


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
