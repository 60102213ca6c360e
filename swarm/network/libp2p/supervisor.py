"""Keep one daemon running under a living peer: replace one that dies, under the same key, ports and sockets.

:class:`Supervisor` does it; :class:`Restarts` decides how often and after which pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.clock import Clock
from swarm.errors import SwarmError, Unreachable
from swarm.events import DaemonLost, DaemonRestarted, EventSink
from swarm.network.libp2p.attach import AttachedP2P, DaemonGone
from swarm.network.libp2p.daemon import Daemon, DaemonConfig, pinned, signal_name
from swarm.network.libp2p.rundir import SocketDirectory
from swarm.waiting import doubled

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_PINNED_ATTEMPTS = 2
"""Somebody else may have taken our port meanwhile: a new one, which others must look up, is better than none."""

_NOTICE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """The owner's reactions to a loss. ``lost`` is called at once, ``started`` with the pid of each new daemon; neither
    may raise. ``restored`` runs as a task when the new daemon serves, is cancelled when that dies as well, and
    handles its own PeerErrors."""

    lost: Callable[[], None]
    started: Callable[[int], None]
    restored: Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """Made by :meth:`start`; watches from :meth:`watch` until :meth:`close`, or until its daemon has died too often."""

    def __init__(self, config: DaemonConfig, daemon: Daemon, clock: Clock, limits: RestartLimits) -> None:
        self._config, self._daemon, self._clock = config, daemon, clock
        self._restarts = Restarts(limits)
        self._listen = tuple(config.listen)
        self._up, self._over, self._last_words = True, False, ""
        self._changed = asyncio.Event()
        self._deaths = 0
        self._watch: asyncio.Task[None] | None = None
        self._after: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: DaemonConfig, clock: Clock, limits: RestartLimits) -> Supervisor:
        """Start the first daemon. Raises as :meth:`~swarm.network.libp2p.daemon.Daemon.start`: that one is not tried
        again."""
        return cls(config, await Daemon.start(config), clock, limits)

    @property
    def pid(self) -> int:
        """The process id of the daemon that runs, or ran last."""
        return self._daemon.pid

    async def watch(self, p2p: AttachedP2P, mending: Mending, events: EventSink) -> None:
        """Begin to watch; ``p2p`` is attached anew to each daemon that follows. Finds out first which ports to keep,
        which takes some milliseconds."""
        self._listen = await pinned(self._config.listen, self._daemon.pid)
        self._watch = asyncio.get_running_loop().create_task(self._run(p2p, mending, events), name="p2pd watch")
        self._watch.add_done_callback(self._watched)

    async def serving(self) -> None:
        """Until a daemon serves, at once when one does. Takes as long as its caller lets it. Raises Unreachable when
        there will be none."""
        while not self._up and not self._over:
            await self._changed.wait()
        if self._over:
            raise Unreachable(self._last_words or "our libp2p daemon is stopped")

    async def through(self, operation: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of an operation on a serving daemon: one that its daemon's death ended is repeated on the
        next, for that says nothing about whom it was for. Raises what it raises, Unreachable when there will be no
        daemon."""
        while True:
            deaths = self._deaths
            await self.serving()
            try:
                return await operation()
            except DaemonGone:
                if not await self._noticed(deaths):
                    raise

    async def _noticed(self, deaths: int) -> bool:
        """Return whether more than ``deaths`` have died. A broken socket tells of a death before the kernel reports it,
        so this waits for the report, at most 1 s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NOTICE_S):
                while self._deaths <= deaths and not self._over:
                    await self._changed.wait()
        return self._deaths > deaths

    async def wait_over(self) -> str:
        """Until there will be no daemon any more; why, "" after :meth:`close`."""
        while not self._over:
            await self._changed.wait()
        return self._last_words

    async def halt(self) -> None:
        """Watch no longer: a daemon that dies from now on is not replaced. Idempotent."""
        await _cancelled(self._watch)
        await _cancelled(self._after)
        self._tell(up=False, over=True)

    async def close(self) -> None:
        """As :meth:`halt`, and stop the daemon. Takes 1 s for one that does not end by itself."""
        await self.halt()
        await self._daemon.stop()

    def _tell(self, *, up: bool, over: bool = False) -> None:
        self._up, self._over = up, over or self._over
        self._changed.set()
        self._changed = asyncio.Event()

    def _watched(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("the watch over p2pd ended with a bug", exc_info=error)
            self._last_words = f"our libp2p daemon is watched no longer: {type(error).__name__}"
            self._tell(up=False, over=True)

    async def _run(self, p2p: AttachedP2P, mending: Mending, events: EventSink) -> None:
        while True:
            code = await self._daemon.wait()
            began = self._clock.monotonic()
            self._deaths += 1
            self._tell(up=False)
            mending.lost()
            p2p.fail_pending()
            await _cancelled(self._after)
            events.emit(DaemonLost(exit_code=code))
            attempts = await self._revive(p2p, mending, f"{signal_name(code)}; {self._daemon.tail()}")
            if not attempts:
                self._tell(up=False, over=True)
                return
            seconds = self._clock.monotonic() - began
            events.emit(DaemonRestarted(pid=self._daemon.pid, seconds=seconds, attempts=attempts))
            self._tell(up=True)
            self._after = asyncio.get_running_loop().create_task(mending.restored(), name="p2pd restored")
            self._after.add_done_callback(_report)

    async def _revive(self, p2p: AttachedP2P, mending: Mending, problem: str) -> int:
        """Start another until one serves: how many starts that took, 0 when it has died too often."""
        attempts = 0
        while (pause_s := self._restarts.died(self._clock.monotonic())) is not None:
            if pause_s:
                await self._clock.sleep(pause_s)
            attempts += 1
            try:
                await self._replace(p2p, mending, pin=attempts <= _PINNED_ATTEMPTS)
            except (SwarmError, OSError) as error:
                problem = str(error)
                logger.warning("cannot start p2pd again: %s", problem)
            else:
                return attempts
        self._last_words = f"our libp2p daemon died {self._restarts.said}, the last time: {problem}"
        return 0

    async def _replace(self, p2p: AttachedP2P, mending: Mending, *, pin: bool) -> None:
        """One attempt. Raises SwarmError or OSError; then nothing of it is left."""
        config = self._config
        config.control.unlink(missing_ok=True)  # a killed daemon's; it would keep the next one from listening
        await self._daemon.stop()  # it has ended; what is left are the reader of its output and its pipe
        listen = self._listen if pin else tuple(config.listen)
        # Without the bootstrap peers: a daemon that meets none of them at its start gives up, and they may be gone.
        daemon = await Daemon.start(dataclasses.replace(config, listen=listen, bootstrap=()))
        mending.started(daemon.pid)
        try:
            async with asyncio.timeout(config.startup_timeout_s):
                await p2p.reattach()
        except TimeoutError as error:
            await daemon.stop()
            raise Unreachable(f"p2pd did not answer in {config.startup_timeout_s:g} s") from error
        except BaseException:
            await daemon.stop()
            raise
        self._daemon = daemon
        if not pin:
            self._listen = await pinned(config.listen, daemon.pid)


@dataclass(frozen=True, slots=True)
class AttachedDaemon:
    """The libp2p daemon of one peer: its sockets, its supervisor, and our client of it."""

    files: SocketDirectory
    supervisor: Supervisor
    p2p: AttachedP2P

    async def end(self) -> None:
        """End the daemon, once our client of it is detached, and leave nothing behind."""
        await self.supervisor.close()
        self.files.close()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("did not restore all connections after p2pd died", exc_info=error)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- how often and after which pause a child is started again (pure) -------------------------------------------------


FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """``deaths`` within ``within_s`` seconds are too many; an attempt to start it that fails counts as one."""

    deaths: int = 5
    within_s: float = 60.0


class Restarts:
    """Counts deaths, with the time as an argument."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._died: deque[float] = deque(maxlen=limits.deaths)

    def died(self, now: float) -> float | None:
        """One death more, at ``now`` in seconds of a monotonic clock. Seconds to wait before the next start, or None:
        it is not started again.

        The first death within the window is mended at once; each further one waits twice as long as the one before,
        two seconds at most, so that whatever kills it gets time to pass.
        """
        self._died.append(now)
        while self._died[0] <= now - self._limits.within_s:
            self._died.popleft()
        recent = len(self._died)
        if recent >= self._limits.deaths:
            return None
        return 0.0 if recent == 1 else doubled(FIRST_PAUSE_S, recent - 2, LONGEST_PAUSE_S)

    @property
    def said(self) -> str:
        """Return the number of deaths that count now, in words."""
        return f"{len(self._died)} times within {self._limits.within_s:g} s"
