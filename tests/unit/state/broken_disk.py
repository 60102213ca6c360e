"""A file system that fails, or ends the world, at a chosen call, and one that forgets what was not synced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swarm import disk as checkpoint_disk

CALLS = ("open", "write", "posix_fallocate", "fsync", "replace", "mkdir", "close", "unlink")


class PowerCut(BaseException):
    """The process is gone: nothing of it runs any more, no handler either."""


class BrokenDisk:
    """Stands in for ``os`` in the code that writes checkpoints.

    Its calls are counted from 1. At call ``at`` it raises ``error``; a PowerCut goes on being raised, before the call
    has happened or, with ``late``, after. ``error`` may be an OSError: then only that call fails.
    """

    def __init__(self, at: int = 0, error: BaseException | None = None, *, late: bool = False) -> None:
        self.calls: list[str] = []
        self._at, self._error, self._late = at, error, late
        self._paths: dict[int, Path] = {}
        self._open: set[int] = set()
        self._unsynced: dict[Path, int] = {}
        self._renamed: list[tuple[Path, bytes | None]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return found if name not in CALLS else lambda *arguments, **more: self._call(name, found, arguments, more)

    @property
    def fired(self) -> bool:
        """Whether the chosen call was reached."""
        return len(self.calls) >= self._at > 0

    def _call(self, name: str, real: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
        self.calls.append(name)
        cut = isinstance(self._error, PowerCut)
        if self._error is not None and (len(self.calls) == self._at or (cut and len(self.calls) > self._at)):
            if cut and self._late and len(self.calls) == self._at:
                self._do(name, real, arguments, more)
            raise self._error
        return self._do(name, real, arguments, more)

    def _do(self, name: str, real: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if name == "replace":
            target = Path(arguments[1])
            self._renamed.append((target, target.read_bytes() if target.exists() else None))
            if self._unsynced.pop(Path(arguments[0]), None):
                self._unsynced[target] = 1  # a name may be on the disk before its bytes are
        # A real sync would only cost time: what it saves from a power cut is known here.
        result = None if name == "fsync" else real(*arguments, **more)
        if name == "open":
            self._paths[result] = Path(arguments[0])
            self._open.add(result)
        elif name == "close":
            self._open.discard(arguments[0])
        elif name == "write":
            self._unsynced[self._paths[arguments[0]]] = 1
        elif name == "fsync":
            self._synced(self._paths[arguments[0]])
        return result

    def _synced(self, path: Path) -> None:
        self._unsynced.pop(path, None)
        if path.is_dir():
            self._renamed = [(target, before) for target, before in self._renamed if target.parent != path]

    def bury(self) -> None:
        """What the kernel does for a process that died: close its files, and so end its locks."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def forget(self, *, names: bool) -> None:
        """What a power cut may take: bytes that were not synced, and with ``names`` also new names in directories that
        were not."""
        kept = set(self._unsynced)
        for target, before in reversed(self._renamed if names else []):
            kept.discard(target)
            if before is None:
                target.unlink(missing_ok=True)
            else:
                target.write_bytes(before)
        for path in kept:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)


def install(monkeypatch: pytest.MonkeyPatch, disk: BrokenDisk) -> BrokenDisk:
    """Have checkpoints written through it."""
    monkeypatch.setattr(checkpoint_disk, "os", disk)
    return disk
