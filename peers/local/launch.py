"""The local peers of one command: started by a fork server, watched, stopped, never left behind.

The fork server (:mod:`peers.local.fork_server`, which says who kills whom) is a child of this process and the peers are
its children; this side talks to it through a socket pair and never signals a peer's pid itself.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from peers.console.interrupt import SIGNALS
from peers.local.fork_client import ENTRY, KILL_GRACE_S, PRELOAD, ForkClient, end_words, sweep_scratch, wait_exit
from peers.settings import PeerSettings
from swarm.errors import StateError
from swarm.network.libp2p.rundir import sweep_under

STOP_GRACE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExit:
    """A peer's process ended. ``code`` is its exit code, or minus the number of the signal that killed it."""

    name: str
    pid: int
    code: int

    def __str__(self) -> str:
        return f"{self.name} {end_words(self.pid, self.code)}"


class PeerGroup:
    """Peers on this machine, each its own process.

    Use: ``group = PeerGroup(log)``, then ``try: group.open() … finally: group.stop()``. Construction does nothing, so
    that an interrupt between the two leaves nothing behind. ``log`` receives what the fork server itself prints.
    ``entry`` is the peers' function, ``module:function``, called with the settings and returning the exit code.
    Main thread only: the kernel ties the fork server's life to the thread that started it.
    """

    def __init__(self, log: Path, *, entry: str = ENTRY, preload: Sequence[str] = PRELOAD) -> None:
        self._log = log
        self._client = ForkClient(log, entry=entry, preload=preload)
        self._peers: dict[str, int] = {}
        self._exits: list[PeerExit] = []
        self.preload_seconds: float | None = None

    @property
    def running(self) -> tuple[str, ...]:
        """Names of peers that were started and have not ended, as far as reported."""
        return tuple(self._peers)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running peers that the server has reported."""
        return {name: pid for name, pid in self._peers.items() if pid}

    def open(self) -> None:
        """Start the fork server; returns at once while it preloads. What a group left that was killed here with all its
        peers, in the homes beside ``log``, is swept first. Raises StateError when it cannot be started."""
        sweep_scratch()
        sweep_under(self._log.parent / "peers")
        # Blocked until the process is noted: an interrupt in between would leave one that nobody stops.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._client.open()
        except OSError as error:
            raise StateError(f"cannot start the peers' process: {error.strerror}; check memory and limits.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def start(self, settings: PeerSettings) -> None:
        """Start one peer; it runs as soon as the server has preloaded. Its output goes to ``home/peer.log``."""
        self._peers[settings.name] = 0
        self._send({"start": settings.name, "settings": settings.model_dump(mode="json")})

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one running peer."""
        self._send({"signal": number, "name": name})

    def poll(self, timeout_s: float) -> list[PeerExit]:
        """Exits not told before; waits for news at most ``timeout_s``. Raises StateError when the fork server has
        failed or died, with its last words."""
        if not self._client.opened:
            return []
        if not self._receive(timeout_s):
            raise StateError(f"the process that starts the peers {self._client.end_words()}, and every peer with it")
        exits, self._exits = self._exits, []
        return exits

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to every peer, SIGKILL after ``grace_s`` to what remains; nothing is left when this returns.

        Idempotent; takes at most ``grace_s`` + 2 s whatever the peers do. Exits are kept for the next ``poll``.
        """
        if not self._client.opened:
            return
        self._ask_to_stop(grace_s)
        self._client.kill()
        self._wait_gone(list(self.pids.values()))
        self._client.close()

    def _ask_to_stop(self, grace_s: float) -> None:
        deadline = monotonic() + grace_s + KILL_GRACE_S
        try:
            if not self._receive(0.0):
                return
            if self.preload_seconds is None:
                # It would not read a request before it has preloaded, and there is no peer that could stop in order.
                return
            self._send({"stop": float(grace_s)})
            while (left := deadline - monotonic()) > 0:
                if not self._receive(left):
                    return
        except StateError:
            return

    def _wait_gone(self, pids: Sequence[int]) -> None:
        """The server is dead, so the kernel has killed what it had left; see that through."""
        deadline = monotonic() + KILL_GRACE_S
        for pid in pids:
            wait_exit(pid, max(0.0, deadline - monotonic()))

    def _receive(self, timeout_s: float) -> bool:
        """False once the server is gone."""
        told = self._client.receive(timeout_s)
        for message in told or ():
            self._note(message)
        return told is not None

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"preloaded": float(seconds)}:
                self.preload_seconds = seconds
            case {"failed": str(reason)}:
                raise StateError(f"the peers' process could not be prepared: {reason}; details are in {self._log}")
            case {"started": str(name), "pid": int(pid)}:
                self._peers[name] = pid
            case {"exited": str(name), "pid": int(pid), "code": int(code)}:
                self._peers.pop(name, None)
                self._exits.append(PeerExit(name=name, pid=pid, code=code))

    def _send(self, command: dict[str, Any]) -> None:
        if not self._client.opened:
            raise StateError("the peers' process is not running")
        self._client.send(command)
