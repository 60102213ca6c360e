"""What we left on this machine: processes, sockets, shared memory. Linux only, read from ``/proc``.

A process is ours when it descends from this one or was started with our value of ``SWARM_TEST_ID`` in its
environment, so that a daemon whose parent is gone is found and somebody else's is not. Never by name alone.
A zombie is gone: what is left of it is an exit code that PID 1 has not read yet.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.expect import NotInTime, wait_until

MARKER = "SWARM_TEST_ID"
_PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One live process. ``started`` (clock ticks since boot) tells it from a later one with the same pid."""

    pid: int
    started: int
    parent: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}), child of {self.parent}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was there at one moment: our processes, sockets under the temporary directory, shared memory."""

    processes: frozenset[tuple[int, int]]
    sockets: frozenset[Path]
    shared_memory: frozenset[str]


def take_snapshot() -> Snapshot:
    """Everything of ours now. Costs about a millisecond for each hundred processes on the machine."""
    ours = frozenset((process.pid, process.started) for process in our_processes())
    return Snapshot(ours, frozenset(_sockets()), frozenset(_shared_memory()))


def assert_nothing_left(before: Snapshot, *, deadline_s: float = 60.0) -> None:
    """Raises AssertionError naming everything of ours that was not there ``before`` and outlives the deadline."""
    try:
        wait_until(lambda: not leftovers(before), deadline_s=deadline_s)
    except NotInTime:
        left = leftovers(before)
        if left:
            raise AssertionError("left behind:\n  " + "\n  ".join(left)) from None


def leftovers(before: Snapshot) -> list[str]:
    """One line for each thing of ours that was not there before."""
    found = [str(process) for process in our_processes() if (process.pid, process.started) not in before.processes]
    found += [f"socket {path}" for path in sorted(set(_sockets()) - before.sockets)]
    found += [
        f"shared memory {name}"
        for name in sorted(set(_shared_memory()) - before.shared_memory)
        if not mapped_by_others(name)
    ]
    return found


def our_processes() -> list[Process]:
    """Live processes other than this one that descend from it or carry its marker."""
    everything = {process.pid: process for process in _all_processes()}
    marker = os.environ.get(MARKER, "")
    ours = []
    for process in everything.values():
        if process.pid == os.getpid():
            continue
        if _descends(process, everything) or (marker and _marked(process.pid, marker)):
            ours.append(process)
    return sorted(ours)


def children_of(pid: int) -> list[Process]:
    """Live descendants of a process, whatever their session or environment."""
    everything = {process.pid: process for process in _all_processes()}
    return sorted(process for process in everything.values() if _descends(process, everything, ancestor=pid))


def _descends(process: Process, everything: dict[int, Process], ancestor: int | None = None) -> bool:
    wanted = os.getpid() if ancestor is None else ancestor
    parent = process.parent
    while parent in everything and parent != wanted:
        parent = everything[parent].parent
    return parent == wanted


def _marked(pid: int, marker: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(_same_or_within(entry.decode(errors="replace"), f"{MARKER}={marker}") for entry in environment)


def _same_or_within(entry: str, wanted: str) -> bool:
    """A test's id extends its session's, and that one the id of the one who started the session."""
    return entry == wanted or entry.startswith(wanted + "/")


def _all_processes() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            process = _read_process(int(entry.name))
            if process is not None:
                yield process


def _read_process(pid: int) -> Process | None:
    """None when it has ended meanwhile or is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        line = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # the name may itself contain parentheses
    fields = rest.split()
    if fields[0] in ("Z", "X"):
        return None
    command = line.replace(b"\0", b" ").decode(errors="replace").strip()[:160] or name
    return Process(pid, int(fields[19]), int(fields[1]), command)


def _sockets() -> Iterator[Path]:
    """Unix sockets in our temporary directory; pytest gives each session one of its own (see conftest)."""
    for folder, _, names in os.walk(tempfile.gettempdir()):
        for name in names:
            path = Path(folder, name)
            try:
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield path
            except OSError:
                continue


def _shared_memory() -> list[str]:
    try:
        return os.listdir(SHARED_MEMORY)
    except OSError:
        return []


def mapped_by_others(name: str) -> bool:
    """Whether a live process that is not ours uses a piece of shared memory: then it is none of our business."""
    ours = {process.pid for process in our_processes()} | {os.getpid()}
    pattern = re.compile(re.escape(f"{SHARED_MEMORY}/{name}") + r"$", re.MULTILINE)
    for process in _all_processes():
        if process.pid in ours:
            continue
        try:
            if pattern.search((_PROC / str(process.pid) / "maps").read_text(errors="replace")):
                return True
        except OSError:
            continue
    return False
