"""Disks that are full, for peers that share a process with us."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class FullDisks:
    """Homes below which nothing can be synced to disk: every ``os.fsync`` of a file there raises ENOSPC."""

    def __init__(self) -> None:
        self.full: set[Path] = set()
        self.refused = 0
        self._fsync: Callable[[Any], None] | None = None

    @property
    def installed(self) -> bool:
        """Whether syncs are watched."""
        return self._fsync is not None

    def install(self) -> None:
        """Watch every sync of this process, until :meth:`remove`."""
        self._fsync = os.fsync
        os.fsync = self._sync  # type: ignore[assignment]

    def remove(self) -> None:
        """Undo :meth:`install`."""
        if self._fsync is not None:
            os.fsync, self._fsync = self._fsync, None

    def _sync(self, file: Any) -> None:
        assert self._fsync is not None
        number = file if isinstance(file, int) else file.fileno()
        path = Path(f"/proc/self/fd/{number}").resolve()
        if any(path.is_relative_to(home.resolve()) for home in self.full):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._fsync(file)


@contextlib.contextmanager
def full_disk(home: Path) -> Iterator[FullDisks]:
    """Nothing can be synced below ``home`` while this lasts."""
    disks = FullDisks()
    disks.install()
    disks.full.add(home)
    try:
        yield disks
    finally:
        disks.remove()
