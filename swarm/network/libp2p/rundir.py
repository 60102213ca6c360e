"""The directory in which one peer's sockets live: private, owned by one process, and clean after any kind of death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from swarm.errors import ConfigError

SUN_PATH_BYTES = 107
"""The longest path of a unix socket on Linux (unix(7): 108 with its terminator)."""

_LOCK = "endpoint.lock"
_CONTROL = "p2pd.sock"
_CLIENT = "client.sock"
_DAEMON_NAME = "p2pd"
_MAX_LOCK_BYTES = 256
_SWEPT_IN_S = 1.0


class _Short(NamedTuple):
    """A short directory for sockets, and the descriptor whose lock says that its process lives."""

    path: Path
    lock: int


class SocketDirectory:
    """A lock and two socket paths inside the peer's own 0700 directory.

    When that directory's path is too long for a socket, the sockets lie in a short private one under the system's
    temporary directory, named after user and process, which is removed at ``close``. What a killed process left is
    removed by the next one of the same user that starts: short directories wherever they belonged to, and in this
    directory and those next to it the sockets, and a daemon that did not end with its peer (one that is stopped gets
    the kernel's signal only when it goes on).
    """

    def __init__(self, path: Path) -> None:
        """Take the directory. Raises ConfigError when another live process has it or it cannot be made."""
        self.path = path
        self._short: _Short | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(path, 0o700)
            self._lock = _lock(path / _LOCK)
            _end_daemon(self._lock)
            _write(self._lock, _stamp(os.getpid()))
        except OSError as error:
            raise ConfigError("run_dir", str(path), "a directory this user can write to",
                              f"{error.strerror}; choose another.") from error  # fmt: skip
        sweep_temporary()
        sweep_under(path.absolute().parent)
        sockets = path.absolute()
        if len(os.fsencode(sockets / _CLIENT)) > SUN_PATH_BYTES:
            self._short = _make_short()
            sockets = self._short.path
        self.control = sockets / _CONTROL
        self.client = sockets / _CLIENT
        self._remove_sockets()

    def note_daemon(self, pid: int) -> None:
        """This is our daemon now: the one who takes the directory after we were killed ends it, should it still be
        there. Never raises: a full disk costs only that."""
        with contextlib.suppress(OSError):
            _write(self._lock, f"{_stamp(os.getpid())} {_stamp(pid)}")

    def close(self) -> None:
        """Remove the sockets and give the directory back. Idempotent."""
        if self._lock < 0:
            return
        self._remove_sockets()
        if self._short is not None:
            shutil.rmtree(self._short.path, ignore_errors=True)
            os.close(self._short.lock)
        with contextlib.suppress(OSError):
            (self.path / _LOCK).unlink()
        os.close(self._lock)
        self._lock = -1

    def _remove_sockets(self) -> None:
        self.control.unlink(missing_ok=True)
        self.client.unlink(missing_ok=True)


def sweep_temporary() -> None:
    """Remove the short socket directories of this user's dead processes. Only its lock says that one is dead: a pid
    says nothing where several containers share the system's temporary directory."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        pid = path.name.removeprefix(_prefix()).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not _stamp(int(pid)):
                _sweep_short(path)


def _sweep_short(path: Path) -> None:
    descriptor = _open_directory(path)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _make_short() -> _Short:
    """A short private directory, locked. One that is swept before its lock is ours is let go, and another is made."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-"))
        with contextlib.suppress(FileNotFoundError):
            descriptor = _open_directory(path)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return _Short(path, descriptor)
            os.close(descriptor)


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def sweep_under(parent: Path) -> None:
    """Remove the sockets and end the daemons that dead processes left in the run directories in ``parent``: a peer
    that is started again gets a new one beside. For anyone who starts peers, too, once they have ended. Only what names
    its owner is looked at, and only its lock says that he is dead. Never raises."""
    with contextlib.suppress(OSError):
        for found in parent.glob(f"*/{_LOCK}"):
            with contextlib.suppress(OSError):
                _sweep(found)


def _sweep(found: Path) -> None:
    descriptor = os.open(found, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        owner = _read(descriptor)[:1]
        if not owner or _lives(owner[0]):
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(found)):
            _end_daemon(descriptor)
            for name in (_CONTROL, _CLIENT, _LOCK):
                (found.parent / name).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _end_daemon(lock: int) -> None:
    """Kill the daemon that the last owner noted, unless it ended with him, as it should."""
    noted = _read(lock)[1:2]
    if noted and _lives(noted[0]):
        pid = int(noted[0].partition(":")[0])
        with contextlib.suppress(OSError, ValueError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == _DAEMON_NAME:
                os.kill(pid, signal.SIGKILL)


def _read(lock: int) -> list[str]:
    """The stamps of the owner and of his daemon, as far as they are there."""
    return os.pread(lock, _MAX_LOCK_BYTES, 0).decode("ascii", "replace").split()


def _write(lock: int, text: str) -> None:
    os.pwrite(lock, text.encode(), 0)
    os.ftruncate(lock, len(text))


def _stamp(pid: int) -> str:
    """A process by its pid and when it began (clock ticks since the machine's start), which no later one shares; empty
    when there is none, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def _lives(stamp: str) -> bool:
    pid = stamp.partition(":")[0]
    return pid.isdigit() and _stamp(int(pid)) == stamp


def _prefix() -> str:
    return f"swarm-{os.geteuid()}-"


def _lock(path: Path) -> int:
    """An exclusive lock that ends with this process; the file's name must still be the file that was locked."""
    end = time.monotonic() + _SWEPT_IN_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        except BlockingIOError as error:
            # One who sweeps has it for a moment; he does not write his name into it.
            owner = _read(descriptor)[:1]
            if time.monotonic() >= end or (owner and _lives(owner[0])):
                os.close(descriptor)
                raise ConfigError("run_dir", str(path.parent), "a directory no other running peer uses",
                                  "Choose another, or stop the peer that runs there.") from error  # fmt: skip
            os.sched_yield()
        os.close(descriptor)
