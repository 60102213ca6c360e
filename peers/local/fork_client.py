"""The other end of a fork server (:mod:`peers.local.fork_server`): starts it, sends commands, hears what it tells, ends
it.

Both of :mod:`peers.local.launch`'s groups and of ``swarm chaos``'s forks, who differ in what they ask for and how they
wait.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import IO, Any

ENTRY = "peers.node:run_peer"
PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "hivemind", "uvloop")
"""The second is what torch imports with a process's first backward: half a second, for every peer again."""

KILL_GRACE_S = 1.0
_SCRATCH_PREFIX = "swarm-"
_LOCK = "lock"


class ForkClient:
    """One fork server, from :meth:`open` to :meth:`close`. Construction does nothing.

    The kernel ties the server's life to the thread that opens it. One thread may send while another receives."""

    def __init__(self, log: Path, *, entry: str, preload: Sequence[str], own_session: bool = False) -> None:
        self.log = log
        self._entry, self._preload, self._own_session = entry, preload, own_session
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._received = b""
        self.scratch: Path | None = None

    @property
    def opened(self) -> bool:
        """True if there is a channel: it is opened and not closed."""
        return self._channel is not None

    @property
    def pid(self) -> int:
        """The server's; 0 before it is opened."""
        return self._server.pid if self._server is not None else 0

    def open(self) -> None:
        """Start the server; returns at once while it preloads. ``own_session``: Ctrl-C does not reach it. Raises
        OSError."""
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getuid()}-"))
        lock = _hold(self.scratch)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs, lock, self.log.open("ab") as log:
            arguments = (theirs.fileno(), os.getpid(), self._entry, ",".join(self._preload), self.scratch)
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "peers.local.fork_server", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.scratch),
                pass_fds=(theirs.fileno(), lock.fileno()),
                start_new_session=self._own_session,
            )

    def send(self, command: dict[str, Any]) -> None:
        """Send a command; does nothing when the server is gone, which the receiving side reports."""
        if self._channel is not None:
            with contextlib.suppress(ConnectionError):
                self._channel.sendall(json.dumps(command).encode() + b"\n")

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]] | None:
        """Return its next message, after at most so long (None: as long as it takes). None once it is gone and told
        all."""
        if self._channel is None:
            return None
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return []
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def end_words(self) -> str:
        """Return the end, in words, of the server whose channel just closed."""
        if self._server is None:
            return "was not started"
        try:
            code = self._server.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"(pid {self._server.pid}) stopped answering"
        return end_words(self._server.pid, code)

    def wait(self, timeout_s: float) -> None:
        """Until the server has ended, at most so long."""
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(timeout_s)

    def kill(self) -> None:
        """It has ended when this returns, and the kernel kills every peer that it had left. Idempotent."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def close(self) -> None:
        """Nothing of it is left when this returns, peers apart (:func:`wait_exit`). Idempotent."""
        self.kill()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _environment(scratch: Path) -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return os.environ | one_thread | {"TMPDIR": str(scratch), "PYTHONPATH": path}


def end_words(pid: int, code: int) -> str:
    """Return the end of a process, in words."""
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
