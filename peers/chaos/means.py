"""Means of faults among processes: families of processes, output through a pipe, processor shares, disks, clocks."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from peers.home.places import KEY_FILE
from peers.home.sessions import surplus_sessions
from peers.local.launcher import launched
from swarm.clock import SystemClock

DUTY_S = 0.05
"""A slowed process is stopped for a share of every such span."""
FAKETIME = "libfaketimeMT.so.1"
NO_FAKETIME = (
    "skew_clock needs libfaketime: apt-get install libfaketime, or swarm chaos --on containers, whose image has it"
)
_SHARED_MEMORY = Path("/dev/shm")
_LIBRARIES = (Path("/usr/lib"), Path("/usr/local/lib"))


def begin(command: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output reaches its file through us: a peer whose disk is full can still say so. It is
    killed when the calling *thread* ends, however that ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch()
    process = subprocess.Popen(
        launched(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the play, which stops its peers in order
    )
    threading.Thread(target=pour, args=(process.stdout, output), name="output", daemon=True).start()
    return process


def pour(source: IO[bytes], output: Path) -> None:
    """Write what comes to the end of a file, as it comes."""
    with source, output.open("ab", buffering=0) as file:
        while data := source.read(1 << 16):
            file.write(data)


class Slowed:
    """Stops a process for all but one part in ``factor`` of the time, until :meth:`end`. While it is ``held`` it leaves
    the process to the one who has paused it."""

    def __init__(self, pid: int, factor: float, *, held: bool = False) -> None:
        self._process, self._factor, self._held = psutil.Process(pid), factor, held
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(DUTY_S / self._factor):
                self._unless_held(self._process.suspend)
                self._over.wait(DUTY_S * (1 - 1 / self._factor))
                self._unless_held(self._process.resume)
        except psutil.NoSuchProcess:
            return

    def _unless_held(self, act: Callable[[], None]) -> None:
        with self._turn:
            if not self._held:
                act()

    def hold(self, held: bool) -> None:
        """From when this returns on the process is not let run by this, or again."""
        with self._turn:
            self._held = held

    def end(self) -> None:
        """It runs freely again, unless it is held. Idempotent."""
        self._over.set()
        self._thread.join()


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send it to each; one that is gone is passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def family(pid: int) -> list[psutil.Process]:
    """A process and all its live descendants, itself first; none when it is gone. Cost: one look at every process."""
    try:
        first = psutil.Process(pid)
        members = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [member for member in members if _lives(member)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Its command line; "" when it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def owner(port: int, pids: Collection[int]) -> int:
    """Return the one of these processes that has, itself or in a descendant, a connection from this port of loopback; 0
    when none has. Cost: some milliseconds."""
    inode = _inode(port)
    if not inode:
        return 0
    wanted = f"socket:[{inode}]"
    for pid in pids:
        for member in reversed(family(pid)):  # daemons hold the connections
            with contextlib.suppress(OSError), os.scandir(f"/proc/{member.pid}/fd") as entries:
                if any(_points(entry) == wanted for entry in entries):
                    return pid
    return 0


def _points(entry: os.DirEntry[str]) -> str:
    try:
        return os.readlink(entry.path)
    except OSError:
        return ""


def _inode(port: int) -> str:
    """Return the inode of the connection from this port, by the kernel's table; "" when there is none."""
    with contextlib.suppress(OSError), open("/proc/net/tcp", encoding="ascii") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                return fields[9]
    return ""


def growth_of_files(pid: int) -> tuple[int, int]:
    """To how many bytes a process may let a file grow, and to how many it may set that itself. Raises
    ProcessLookupError when it is gone."""
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)


def let_files_grow(pid: int, limit: tuple[int, int]) -> None:
    """Set that of a process; one that is gone is passed over."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def lose_disk(home: Path, aside: Path) -> None:
    """Move a peer's home aside, as evidence of what it did, and leave it an empty one with its key."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    home.rename(aside)
    copy_keys(aside, home)


def keep_sessions(home: Path, aside: Path) -> None:
    """Move what a peer's next start would delete out of its home, as evidence of what it did."""
    for sessions in home.glob("*/sessions"):
        for session in surplus_sessions(sessions):
            kept = aside / session.relative_to(home)
            kept.parent.mkdir(parents=True, exist_ok=True)
            session.rename(kept)


def copy_keys(source: Path, home: Path) -> None:
    """Give a home the keys of another."""
    home.mkdir(parents=True, mode=0o700, exist_ok=True)
    for key in source.rglob(KEY_FILE):
        copy = home / key.relative_to(source)
        copy.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        shutil.copy(key, copy)


def show(place: Path) -> None:
    """Have everybody read what is there, whatever the umask: who reads it in a container is somebody else."""
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def forget_faketime(pids: Iterable[int]) -> None:
    """Remove what the library leaves of processes that were killed."""
    for pid in pids:
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            (_SHARED_MEMORY / name).unlink(missing_ok=True)


@functools.cache
def faketime_library() -> Path | None:
    """Return the path of a libfaketime that programs of this machine use; None where none is. Cost: some 30 ms once."""
    for root in _LIBRARIES:
        for path in (*root.glob(f"*/faketime/{FAKETIME}"), *root.glob(f"faketime/{FAKETIME}")):
            if _fakes(path):
                return path
    return None


def _fakes(library: Path) -> bool:
    """Programs pass over a library that was made for another architecture or C library."""
    environment = os.environ | {"LD_PRELOAD": str(library), "FAKETIME": "-86400", "DONT_FAKE_MONOTONIC": "1"}
    command = [sys.executable, "-I", "-S", "-c", "import time; print(time.time())"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and float(done.stdout) < SystemClock().wall() - 3600
