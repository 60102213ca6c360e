"""What faults among processes are made of: output through a pipe, signals, a share of a processor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.harness.by_hand import ByHand, Started

DUTY_S = 0.05
"""A slowed process is stopped for a share of every such span."""


class PipedHand(ByHand):
    """Peers whose output reaches its file through us: a peer whose disk is full can still say so."""

    def start(self, *arguments: str, prefix: Sequence[str] = (), home: Path | None = None) -> Started:
        """See :meth:`ByHand.start`."""
        return self.spawn([*prefix, *command_line(*arguments), "--home", str(home or self.home)])

    def spawn(self, command: Sequence[str]) -> Started:
        """Start any command so; its output ends with its last writer."""
        output = self.home.parent / f"out-{len(self.started)}.log"
        output.touch()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        threading.Thread(target=_pour, args=(process.stdout, output), name="output", daemon=True).start()
        self.started.append(Started(process, output))
        return self.started[-1]


def command_line(*arguments: str) -> list[str]:
    """``swarm ARGUMENTS --json`` of this very tree."""
    return [sys.executable, "-m", "peers.cli", *arguments, "--json"]


def _pour(source: IO[bytes], output: Path) -> None:
    with source, output.open("ab", buffering=0) as file:
        while data := source.read(1 << 16):
            file.write(data)


class Slowed:
    """Stops a process for all but one part in ``factor`` of the time, until :meth:`end`."""

    def __init__(self, pid: int, factor: float) -> None:
        self._process, self._factor = psutil.Process(pid), factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(DUTY_S / self._factor):
                self._process.suspend()
                self._over.wait(DUTY_S * (1 - 1 / self._factor))
                self._process.resume()
        except psutil.NoSuchProcess:
            return

    def end(self) -> None:
        """It runs freely again. Idempotent."""
        self._over.set()
        self._thread.join()


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send it to each; one that is gone is passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def forget_all_but_identity(home: Path) -> None:
    """Empty a peer's home, its key excepted."""
    for path in sorted(home.rglob("*"), reverse=True):
        if path.name == "identity.key":
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        else:
            path.unlink(missing_ok=True)
