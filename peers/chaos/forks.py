"""Fork peers from one process that has imported what they need: a start costs a tenth of a second, not six.

Where many peers share a few processors, those six of each would be taken from all the others, and a play would show
what imports cost.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.chaos.means import pour
from peers.local.fork_client import ENTRY, PRELOAD, ForkClient, sweep_scratch, wait_exit
from swarm.errors import StateError

PRELOADED = (
    *PRELOAD, "peers.cli.app", "peers.cli.start", "peers.node", "peers.commands.join", "peers.commands.new",
    "swarm.models.gpt_family",
)  # fmt: skip
READY_S = 120.0
"""How long the imports may take on a machine that is busy."""
STARTED_S = 30.0
_ENDED_S = 10.0
_KILLED = -9


class Forked:
    """One peer, as subprocess.Popen would show it."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.started, self.ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        """Its exit code, minus the number of the signal that killed it; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended. Raises subprocess.TimeoutExpired."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"peer {self.pid}", timeout or 0.0)
        return _KILLED if self.returncode is None else self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """It has."""
        self.returncode = code
        self.started.set()
        self.ended.set()


class Forks:
    """Starts peers until :meth:`close`. When the thread that began first ends, all of them are killed.

    The process they come from is :mod:`peers.local.fork_server`; it is started with the first of them."""

    def __init__(self, log: Path) -> None:
        self._client = ForkClient(log, entry=ENTRY, preload=PRELOADED, own_session=True)
        self._peers: dict[str, Forked] = {}
        self._ready = threading.Event()
        self._failed = ""
        self._reader: threading.Thread | None = None

    def begin(self, arguments: Sequence[str], output: Path) -> Forked:
        """``swarm`` with these arguments; what it says reaches the file through us: it can say that its disk
        is full. Returns when its process is there. Raises StateError when there will be none."""
        scratch = self._open()
        if not self._ready.wait(READY_S):
            raise self._unable(f"was not ready within {READY_S:g} s")
        if self._failed:
            raise self._unable(self._failed)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()
        pipe, name, peer = f"{scratch}/{len(self._peers)}", str(len(self._peers)), Forked()
        os.mkfifo(pipe, 0o600)
        self._peers[name] = peer
        # Opened for both, it does not wait for the peer, which may die before it opens the pipe itself.
        ends = os.open(pipe, os.O_RDWR)
        source = open(pipe, "rb", buffering=0)  # noqa: SIM115 - the thread closes it
        threading.Thread(target=pour, args=(source, output), name="output", daemon=True).start()
        self._client.send({"start": name, "arguments": list(arguments), "output": pipe})
        there = peer.started.wait(STARTED_S)
        threading.Thread(target=_close_later, args=(peer, ends, pipe), name="pipe", daemon=True).start()
        if not there or not peer.pid:
            peer.end(_KILLED)
            raise self._unable(self._failed or "did not start one")
        return peer

    def close(self) -> None:
        """No peer is left when this returns. Idempotent."""
        if self._reader is None:
            return
        self._client.send({"stop": 0.0})
        self._client.wait(_ENDED_S)
        self._client.kill()
        self._reader.join()
        self._client.close()

    def _open(self) -> Path:
        if self._client.scratch is None:
            sweep_scratch()
            self._client.open()
            self._reader = threading.Thread(target=self._read, name="forks", daemon=True)
            self._reader.start()
        assert self._client.scratch is not None  # noqa: S101 - it is opened
        return self._client.scratch

    def _unable(self, why: str) -> StateError:
        return StateError(f"the process that peers are forked from {why}: see {self._client.log}")

    def _read(self) -> None:
        while (told := self._client.receive(None)) is not None:
            for message in told:
                self._take(message)
        self._failed = self._failed or self._client.end_words()
        self._ready.set()
        for peer in list(self._peers.values()):
            if peer.returncode is None:
                wait_exit(peer.pid, _ENDED_S)  # the kernel kills them with what they were forked from
                peer.end(_KILLED)

    def _take(self, told: dict[str, Any]) -> None:
        match told:
            case {"started": str(name), "pid": int(pid)}:
                self._peers[name].pid = pid
                self._peers[name].started.set()
            case {"exited": str(name), "code": int(code)}:
                self._peers[name].end(code)
            case {"failed": str(reason)}:
                self._failed = f"could not be prepared ({reason})"
            case {"preloaded": _}:
                self._ready.set()


def _close_later(peer: Forked, descriptor: int, pipe: str) -> None:
    """Our own end of its pipe, once it has ended: who reads sees the end then."""
    peer.ended.wait()
    os.close(descriptor)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pipe)
