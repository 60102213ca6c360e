"""The local peers of one command: started by a fork server, watched, stopped, never left behind.

The fork server (:mod:`peers.fork_server`, which says who kills whom) is a child of this process and the peers are its
children; this side talks to it through a socket pair and never signals a peer's pid itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from peers.interrupt import SIGNALS
from peers.settings import PeerSettings
from swarm.errors import StateError
from swarm.network.rundir import sweep_under

ENTRY = "peers.node:run_peer"
PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "hivemind", "uvloop")
"""The second is what torch imports with a process's first backward: half a second, for every peer again."""

STOP_GRACE_S = 3.0
KILL_GRACE_S = 1.0
_SCRATCH_PREFIX = "swarm-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExit:
    """A peer's process ended. ``code`` is its exit code, or minus the number of the signal that killed it."""

    name: str
    pid: int
    code: int

    def __str__(self) -> str:
        return f"{self.name} {_end(self.pid, self.code)}"


class PeerGroup:
    """Peers on this machine, each its own process.

    Use: ``group = PeerGroup(log)``, then ``try: group.open() … finally: group.stop()``. Construction does nothing, so
    that an interrupt between the two leaves nothing behind. ``log`` receives what the fork server itself prints.
    ``entry`` is the peers' function, ``module:function``, called with the settings and returning the exit code.
    Main thread only: the kernel ties the fork server's life to the thread that started it.
    """

    def __init__(self, log: Path, *, entry: str = ENTRY, preload: Sequence[str] = PRELOAD) -> None:
        self._log = log
        self._entry, self._preload = entry, preload
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._scratch: Path | None = None
        self._received = b""
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
            self._start_server()
        except OSError as error:
            raise StateError(f"cannot start the peers' process: {error.strerror}; check memory and limits.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _start_server(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getuid()}-"))
        lock = _hold(self._scratch)
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs, lock, self._log.open("ab") as log:
            arguments = (theirs.fileno(), os.getpid(), self._entry, ",".join(self._preload), self._scratch)
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "peers.fork_server", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                pass_fds=(theirs.fileno(), lock.fileno()),
            )

    def _environment(self) -> dict[str, str]:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return os.environ | one_thread | {"TMPDIR": str(self._scratch), "PYTHONPATH": path}

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
        if self._channel is None:
            return []
        if self._wait_readable(timeout_s) and not self._receive():
            raise StateError(f"the process that starts the peers {self._server_end()}, and every peer with it")
        exits, self._exits = self._exits, []
        return exits

    def _server_end(self) -> str:
        """How the fork server ended, whose channel just closed."""
        assert self._server is not None  # noqa: S101 - there is a channel
        try:
            code = self._server.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"(pid {self._server.pid}) stopped answering"
        return _end(self._server.pid, code)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to every peer, SIGKILL after ``grace_s`` to what remains; nothing is left when this returns.

        Idempotent; takes at most ``grace_s`` + 2 s whatever the peers do. Exits are kept for the next ``poll``.
        """
        if self._server is None or self._channel is None:
            return
        self._ask_to_stop(grace_s)
        self._server.kill()
        self._server.wait()
        self._wait_gone(list(self.pids.values()))
        self._channel.close()
        self._channel = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _ask_to_stop(self, grace_s: float) -> None:
        deadline = monotonic() + grace_s + KILL_GRACE_S
        try:
            if self._wait_readable(0) and not self._receive():
                return
            if self.preload_seconds is None:
                # It would not read a request before it has preloaded, and there is no peer that could stop in order.
                return
            self._send({"stop": float(grace_s)})
            while (left := deadline - monotonic()) > 0:
                if self._wait_readable(left) and not self._receive():
                    return
        except StateError:
            return

    def _wait_gone(self, pids: Sequence[int]) -> None:
        """The server is dead, so the kernel has killed what it had left; see that through."""
        deadline = monotonic() + KILL_GRACE_S
        for pid in pids:
            wait_exit(pid, max(0.0, deadline - monotonic()))

    def _wait_readable(self, timeout_s: float) -> bool:
        return bool(self._channel and select.select([self._channel], [], [], timeout_s)[0])

    def _receive(self) -> bool:
        try:
            data = self._channel.recv(1 << 16) if self._channel else b""
        except ConnectionError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return bool(data)

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
        if self._channel is None:
            raise StateError("the peers' process is not running")
        try:
            self._channel.sendall(json.dumps(command).encode() + b"\n")
        except ConnectionError:
            # Its end is reported, with the reason, by the next poll.
            return


def _end(pid: int, code: int) -> str:
    if code < 0:
        return f"(pid {pid}) was killed by {signal.Signals(-code).name}"
    return f"(pid {pid}) exited with {code}"


def wait_exit(pid: int, timeout_s: float) -> None:
    """Until a process that is not ours has ended, at most so long."""
    try:
        ended = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([ended], [], [], timeout_s)
    finally:
        os.close(ended)


def sweep_scratch(root: Path | None = None) -> list[Path]:
    """Remove scratch directories of our own whose processes are all gone, as after a kill -9; returns them.

    A live one is locked by its fork server and every peer, so neither pid reuse nor namespaces can mislead us.
    """
    swept = []
    for path in (root or Path(tempfile.gettempdir())).glob(f"{_SCRATCH_PREFIX}{os.getuid()}-*"):
        try:
            lock = _hold(path, create=False)
        except OSError:
            continue
        with lock:
            shutil.rmtree(path, ignore_errors=True)
        swept.append(path)
    return swept


def _hold(scratch: Path, *, create: bool = True) -> IO[bytes]:
    """The scratch directory's lock, held until the last copy of this descriptor is closed. Raises BlockingIOError."""
    lock = (scratch / _LOCK).open("ab" if create else "rb+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
