"""The process from which the peers of a local run are forked: it imports torch and hivemind once, for all.

Program: ``python -m peers.local.fork_server CHANNEL STARTER ENTRY PRELOAD SCRATCH``, started by
:mod:`peers.local.fork_client`. One thread, one loop, JSON lines over a socket pair. Why not ``multiprocessing``'s
forkserver: that one hands every child the descriptor that is to tell the server of its starter's death, so the server
outlives a kill -9 of the starter for as long as a child lives; it does not notice anything while it preloads; and it
brings pickle, a resource tracker and a socket directory along.

Who kills whom. The starter dies, however: the kernel sends this process SIGTERM (PDEATHSIG), which ends it at once
while it preloads and makes it stop the peers in order afterwards; the closed channel says the same. This process dies,
however: the kernel kills every peer (PDEATHSIG = SIGKILL), and a peer's own daemon follows the peer. A peer dies:
the starter is told. Only children not yet reaped are ever signalled, so no reused pid can be hit.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from peers.settings import PeerSettings

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
STARTER_GONE_GRACE_S = 2.0
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send ``number`` to this process when the parent's main thread ends; exit now if it already has.

    Linux only; survives exec but not fork.
    """
    _libc().prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(128 + number)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """Forks peers on request, reports their exits, and leaves none behind."""

    def __init__(
        self, channel: socket.socket, entry: Callable[[PeerSettings], int], clock: Callable[[], float]
    ) -> None:
        self._channel = channel
        self._entry = entry
        self._clock = clock
        self._children: dict[int, str] = {}
        self._received = b""
        self._stopping = False
        self._terminated = False
        self._kill_at = float("inf")
        self._wake, self._wake_write = socket.socketpair()

    def run(self) -> None:
        """Serve until told to stop, or until the starter is gone, and every child is reaped."""
        for end in (self._wake, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while self._children or not self._stopping:
                for key, _ in selector.select(self._until_kill()):
                    if key.fileobj is self._wake:
                        self._wake.recv(4096)
                    elif not self._read_commands():
                        selector.unregister(self._channel)
                self._reap()
                if self._terminated:
                    self._stop(STARTER_GONE_GRACE_S)
                if self._clock() >= self._kill_at:
                    self._signal_all(signal.SIGKILL)

    def _until_kill(self) -> float | None:
        return None if self._kill_at == float("inf") else max(0.05, self._kill_at - self._clock())

    def _read_commands(self) -> bool:
        data = self._channel.recv(1 << 16)
        if not data:
            self._stop(STARTER_GONE_GRACE_S)
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return True

    def _obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"start": str(name), "settings": dict(settings)} if not self._stopping:
                self._start(name, lambda: self._settled(settings))
            case {"start": str(name), "arguments": list(words), "output": str(output)} if not self._stopping:
                self._start(name, lambda: _commanded([str(word) for word in words], output))
            case {"signal": int(number), "name": str(name)}:
                for pid, child in self._children.items():
                    if child == name:
                        os.kill(pid, number)
            case {"stop": float(grace_s)}:
                self._stop(grace_s)

    def _settled(self, settings: dict[str, Any]) -> int:
        peer = PeerSettings(**settings)
        peer.home.mkdir(parents=True, exist_ok=True)
        _redirect(str(peer.home / "peer.log"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        return self._entry(peer)

    def _start(self, name: str, become: Callable[[], int]) -> None:
        parent = os.getpid()
        # Blocked across the fork: a signal must not run this process's Python code inside the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        pid = os.fork()
        if not pid:
            self._become_peer(parent, name, become)
        self._children[pid] = name
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        self._tell({"started": name, "pid": pid})

    def _become_peer(self, parent: int, name: str, become: Callable[[], int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL, parent)
            _libc().prctl(PR_SET_NAME, f"swarm:{name}".encode()[:15])
            for end in (self._channel, self._wake, self._wake_write):
                end.close()
            code = become()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:  # noqa: BLE001 - a process's border: everything ends in its log and its exit code
            traceback.print_exc()
        finally:
            _flush()
            # No interpreter shutdown: the exit handlers registered here are the server's.
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            name = self._children.pop(pid, None)
            if name is not None:
                self._tell({"exited": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _stop(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, self._clock() + grace_s)
        if not self._stopping:
            self._stopping = True
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)
            # A stopped process (SIGSTOP, a debugger) would not act on SIGTERM until it is continued.
            os.kill(pid, signal.SIGCONT)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._stop(STARTER_GONE_GRACE_S)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        # Only noted here: between a wait and its bookkeeping a child's pid may already be somebody else's.
        self._terminated = True


def load_entry(name: str) -> Callable[[PeerSettings], int]:
    """The function called ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor is only written for signals that have a Python handler."""


def _commanded(arguments: list[str], output: str) -> int:
    """The command line of ``swarm``, as if typed."""
    from peers.cli import main as command

    _redirect(output)
    # Those of before know of the file that they were opened on.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.argv = ["swarm", *arguments]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    command()
    return 0


def _redirect(output: str) -> None:
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue


def main() -> int:
    """Preload, report, serve. Exit code 0 also when the starter is gone: there is nobody to tell."""
    descriptor, starter, entry_name, preload, scratch = sys.argv[1:]
    die_with_parent(signal.SIGTERM, int(starter))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    began = time.monotonic()
    try:
        for module in filter(None, preload.split(",")):
            importlib.import_module(module)
        entry = load_entry(entry_name)
    except Exception as error:  # noqa: BLE001 - a process's border: the starter must learn why
        traceback.print_exc()
        channel.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return 1
    gc.collect()
    gc.freeze()
    server = ForkServer(channel, entry, time.monotonic)
    try:
        channel.sendall(json.dumps({"preloaded": time.monotonic() - began}).encode() + b"\n")
        server.run()
    except OSError:
        traceback.print_exc()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
