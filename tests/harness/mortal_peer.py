"""Endpoints in processes of their own, to be killed with -9: each a fork of one that has imported everything.

``python -m tests.harness.mortal_peer HOME`` forks one for every line ``NAME [BOOTSTRAP …]`` on its stdin. The fork
opens an endpoint with the key ``HOME/NAME.key``, enters the run, serves the test methods and prints a line of JSON:
``pid``, ``daemon``, ``peer``, ``addresses``; or, when it failed, ``error``. The forks die with their parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from swarm.clock import SystemClock
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from tests.harness.rigs.network import ServiceBench

RUN = RunId("4e" * 32)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Mortal:
    """One of them, while it lives."""

    pid: int
    daemon: int
    peer: PeerId
    addresses: tuple[str, ...]

    def kill(self) -> None:
        """Without a word."""
        os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Starts them; see :func:`nursery`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, name: str, *bootstrap: str) -> Mortal:
        """One more, once it serves. Blocks for about half a second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, *bootstrap, file=self._process.stdin, flush=True)
        told = json.loads(self._process.stdout.readline())
        assert "error" not in told, told
        return Mortal(told["pid"], told["daemon"], told["peer"], tuple(told["addresses"]))


@contextmanager
def nursery(home: Path) -> Iterator[Nursery]:
    """A process to fork from, for endpoints in ``home``."""
    command = [sys.executable, "-m", "tests.harness.mortal_peer", str(home)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            yield Nursery(process)
        finally:
            process.kill()


async def _live(home: Path, name: str, bootstrap: list[str]) -> None:
    config = EndpointConfig(run_dir=home / name, bootstrap=[parse_address(text) for text in bootstrap])
    endpoint = await LibP2PEndpoint.open(config, load_or_create(home / f"{name}.key"), SystemClock())
    await endpoint.enter(RUN)
    endpoint.mount(ServiceBench())
    told = {"pid": os.getpid(), "daemon": endpoint.daemon_pid, "peer": endpoint.peer, "addresses": endpoint.addresses}
    print(json.dumps(told), flush=True)
    await asyncio.Event().wait()


def _fork(home: Path, name: str, bootstrap: list[str], parent: int) -> None:
    if os.fork():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdin.close()  # of the parent's lines, none is ours
    try:
        if os.getppid() == parent:
            uvloop.run(_live(home, name, bootstrap))
    except BaseException as error:
        print(json.dumps({"error": repr(error)}), flush=True)
        raise
    finally:
        os._exit(1)


def main() -> None:
    """Fork until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    for line in sys.stdin:
        name, *bootstrap = line.split()
        _fork(Path(sys.argv[1]), name, bootstrap, os.getpid())


if __name__ == "__main__":
    main()
