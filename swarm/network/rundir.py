"""The directory in which one peer's sockets live: private, owned by one process, and clean after any kind of death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from swarm.errors import ConfigError

SUN_PATH_BYTES = 107
"""The longest path of a unix socket on Linux (unix(7): 108 with its terminator)."""

_LOCK = "endpoint.lock"
_CONTROL = "p2pd.sock"
_CLIENT = "client.sock"


class RunDirectory:
    """A lock and two socket paths inside the peer's own 0700 directory.

    When that directory's path is too long for a socket, the sockets lie in a short private one under the system's
    temporary directory, named after user and process, which is removed at ``close``; what a killed process
    left there is removed by the next one of the same user that starts.
    """

    def __init__(self, path: Path) -> None:
        """Take the directory. Raises ConfigError when another live process has it or it cannot be made."""
        self.path = path
        self._short: Path | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(path, 0o700)
            self._lock = _lock(path / _LOCK)
        except OSError as error:
            raise ConfigError("run_dir", str(path), "a directory this user can write to",
                              f"{error.strerror}; choose another.") from error  # fmt: skip
        sweep_temporary()
        sockets = path.absolute()
        if len(os.fsencode(sockets / _CLIENT)) > SUN_PATH_BYTES:
            sockets = self._short = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-"))
        self.control = sockets / _CONTROL
        self.client = sockets / _CLIENT
        self._remove_sockets()

    def close(self) -> None:
        """Remove the sockets and give the directory back. Idempotent."""
        if self._lock < 0:
            return
        self._remove_sockets()
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.path / _LOCK).unlink()
        os.close(self._lock)
        self._lock = -1

    def _remove_sockets(self) -> None:
        self.control.unlink(missing_ok=True)
        self.client.unlink(missing_ok=True)


def sweep_temporary() -> None:
    """Remove the short socket directories of this user's dead processes."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        pid = path.name.removeprefix(_prefix()).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and path.stat().st_uid == os.geteuid() and not _alive(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    return f"swarm-{os.geteuid()}-"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lock(path: Path) -> int:
    """An exclusive lock that ends with this process; the file's name must still be the file that was locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError("run_dir", str(path.parent), "a directory no other running peer uses",
                              "Choose another, or stop the peer that runs there.") from error  # fmt: skip
        os.close(descriptor)
