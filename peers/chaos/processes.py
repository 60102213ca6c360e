"""Run peers as processes of this machine, without privileges: start, pause, slow down and end them.

Below ``root``: ``homes/NAME`` (a peer's events and histories), ``logs/NAME-N.log`` (what its Nth start printed),
``lost/NAME-N`` (a disk that it lost), ``faults.jsonl``. A watcher thread reads what the peers write, so a fault strikes
some 10 ms after its event. A peer's processes are the one that was started and all its descendants, the daemon among
them; when this process dies, however it dies, the kernel kills them. Peers are forked from one process
(:mod:`peers.chaos.forks`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from peers.chaos import means
from peers.chaos.company import BaseWorld
from peers.chaos.faults import CannotInflict
from peers.chaos.forks import Forked, Forks
from peers.chaos.shaping import LOOPBACK, NetworkCuts, ShapedLinks, free_port
from peers.chaos.world import PeerSpec, filled
from swarm.network.libp2p.rundir import sweep_temporary, sweep_under

Started = subprocess.Popen[bytes] | Forked
KILLED_S = 10.0
"""How long the kernel may take to end what was killed."""
ORDER_S = 120.0
"""How long a command may take beside busy peers."""


@dataclass(slots=True)
class Process:
    """One start of a peer, and what it prints."""

    process: Started
    output: Path


@dataclass(slots=True)
class RealPeer:
    """One peer of the world and all its starts. ``read`` is how far the newest one's output is read."""

    spec: PeerSpec
    home: Path
    starts: list[Process] = field(default_factory=list)
    read: int = 0
    identity: str = ""

    @property
    def name(self) -> str:
        """Its name in the world."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """The process of the newest start."""
        return self.starts[-1].process.pid

    @property
    def alive(self) -> bool:
        """True if the newest start runs, if there is one."""
        return bool(self.starts) and self.starts[-1].process.poll() is None

    def pids(self) -> list[int]:
        """The processes of the newest start, the first process first."""
        return [member.pid for member in means.family(self.pid)] if self.alive else []


class ProcessBase(BaseWorld[RealPeer]):
    """All of a :class:`~peers.chaos.process_world.ProcessWorld` but its faults.

    ``links`` are needed for partitions, slow links, networks and corrupted bytes: without them those are refused.
    ``skewed`` peers are started so that their wall clock can be set (libfaketime).
    """

    kind = "processes"
    LOOK_EVERY_S = 0.005
    networks: NetworkCuts

    def __init__(self, root: Path, links: ShapedLinks | None = None, *, skewed: bool = False) -> None:
        super().__init__(root)
        self.links = links
        self.networks = NetworkCuts(links)
        self.clocks = root / "clocks" if skewed else None
        self.slowed: dict[str, means.Slowed] = {}
        self.paused: set[str] = set()
        self.limits: dict[str, tuple[int, int]] = {}
        self.corrupted: set[tuple[str, str]] = set()
        self._options: dict[str, tuple[str, ...]] = {}
        self._forks = Forks(root / "logs" / "forks.log")
        self._starter = ThreadPoolExecutor(1, "starter")  # a peer dies with the thread that started it

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        try:
            with self._lock:
                for slowed in self.slowed.values():
                    slowed.end()
                for peer in self.peers.values():
                    self.kill(peer)
        finally:
            self._clear()

    def _clear(self) -> None:
        self._forks.close()
        self._starter.shutdown()
        if self.clocks is not None:
            means.forget_faketime(start.process.pid for peer in self.peers.values() for start in peer.starts)
        sweep_temporary()  # who is killed leaves its sockets
        for home in (self.root / "homes").glob("*"):
            sweep_under(home)

    # --- peers ---------------------------------------------------------------------------------------------------

    def start(self, spec: PeerSpec) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`. Raises CannotInflict for limits that only containers have."""
        refuse_limits(spec)
        with self._lock:
            if self.over.is_set():
                return
            peer = RealPeer(spec, self.root / "homes" / spec.name)
            peer.home.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._options[spec.name] = self._reached(spec.name)
            self.networks.add(spec.name, spec.region)
            self._enter(peer, spec)
            self.begin(peer)

    def expect(self, spec: PeerSpec) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        refuse_limits(spec)
        super().expect(spec)

    def order(self, name: str, words: Sequence[str]) -> str:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        command = [sys.executable, "-m", "peers.cli", *words, "--home", str(self.peers[name].home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ORDER_S, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise CannotInflict(f"{name}: swarm {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def alive(self, name: str) -> bool:
        """See :class:`~peers.chaos.world.PlayWorld`. While a fault is inflicted nobody is told who has died of it."""
        with self._lock:
            return name in self.peers and self.peers[name].alive

    def exit_code(self, name: str) -> int | None:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        with self._lock:
            return self.peers[name].starts[-1].process.poll()

    def stop(self, names: Iterable[str], grace_s: float) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`. Told again after half of the time: who cannot be spared leaves
        then."""
        peers = [self.peers[name] for name in names if self.alive(name)]
        for peer in peers:
            self.resume(peer)
            means.signal_all([peer.pid], signal.SIGTERM)
        ends = time.monotonic() + grace_s
        _wait(peers, time.monotonic() + grace_s / 2)
        means.signal_all([peer.pid for peer in peers if peer.alive], signal.SIGTERM)
        _wait(peers, ends)
        for peer in peers:
            self.kill(peer)

    def homes(self) -> Sequence[Path]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return [path for path in (self.root / "homes", self.root / "lost") if path.is_dir()]

    def log(self, name: str) -> Path:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return self.peers[name].starts[-1].output

    def problems(self) -> Sequence[str]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        untouched = [] if self.links is None else [pair for pair in self.corrupted if self.links.corrupt_left(*pair)]
        told = (f"corrupt_bytes: too few bytes passed from {one} to {other}" for one, other in sorted(untouched))
        return (*super().problems(), *told)

    def begin(self, peer: RealPeer) -> None:
        """Another start of a peer, in the same home."""
        output = self.root / "logs" / f"{peer.name}-{len(peer.starts)}.log"
        means.keep_sessions(peer.home, self.root / "lost" / f"{peer.name}-{len(peer.starts)}-sessions")
        process = self._starter.submit(self.run, peer, output).result()
        self.began(peer, Process(process, output))
        self.paused.discard(peer.name)
        if peer.name in self.limits:
            means.let_files_grow(process.pid, (0, self.limits[peer.name][1]))
        if self.links is not None:
            self.links.belongs(peer.name, process.pid)
        if peer.spec.cpus is not None and peer.spec.cpus < 1:
            self.slow(peer, 1 / peer.spec.cpus)

    def run(self, peer: RealPeer, output: Path) -> Started:
        """A process for it: forked from one that has imported everything, but with its clock in its hands if skewed."""
        if self.clocks is None and not peer.spec.program:
            return self._forks.begin(self.arguments(peer), output)
        command = [sys.executable, "-m", peer.spec.program or "peers.cli", *self.arguments(peer)]
        return means.begin(command, output, self.environment(peer))

    def arguments(self, peer: RealPeer) -> list[str]:
        """Those of ``swarm`` that it is started with."""
        paths = {name: str(path) for name, path in peer.spec.files.items()}
        options = self._options.get(peer.name, ())
        return [
            *filled(peer.spec.arguments, {"home": str(peer.home), **paths}),
            "--json",
            "--home",
            str(peer.home),
            *options,
        ]

    def environment(self, peer: RealPeer) -> dict[str, str]:
        """The environment of a process that is not forked."""
        return dict(os.environ) if self.clocks is None else os.environ | self._clock(peer.name)

    def kill(self, peer: RealPeer) -> None:
        """kill -9 of a peer and all that it started; returns when they are gone. Raises subprocess.TimeoutExpired."""
        if not peer.starts:
            return
        means.signal_all([peer.pid] if peer.alive else [], signal.SIGSTOP)  # so that it starts nothing while we look
        means.signal_all(peer.pids(), signal.SIGKILL)
        peer.starts[-1].process.wait(KILLED_S)

    def slow(self, peer: RealPeer, factor: float) -> None:
        """Give its first process that share of a processor, all of it for 1."""
        before = self.slowed.pop(peer.name, None)
        if before is not None:
            before.end()
        if factor > 1.0:
            self.slowed[peer.name] = means.Slowed(peer.pid, factor, held=peer.name in self.paused)

    def pause(self, peer: RealPeer) -> None:
        """Stop all its processes until :meth:`resume`; a share of a processor that it was given lets none go on."""
        self.paused.add(peer.name)
        if peer.name in self.slowed:
            self.slowed[peer.name].hold(True)
        means.signal_all(peer.pids(), signal.SIGSTOP)

    def resume(self, peer: RealPeer) -> None:
        """Let them go on, with the share that it has."""
        self.paused.discard(peer.name)
        means.signal_all(peer.pids(), signal.SIGCONT)
        if peer.name in self.slowed:
            self.slowed[peer.name].hold(False)

    # --- how a peer is reached -----------------------------------------------------------------------------------

    def _reached(self, name: str) -> tuple[str, ...]:
        """On a port of its own, the same after a restart; through its proxy where there are links."""
        if name in self._options:
            return self._options[name]
        if self.links is not None:
            return self.links.options(name)
        return ("--listen", f"/ip4/{LOOPBACK}/tcp/{free_port()}")

    def _clock(self, name: str) -> dict[str, str]:
        """Only the wall clock is set. With the library ``time.sleep`` of Python 3.11 fails (it sleeps until a moment of
        the monotonic clock); peers wait for events instead."""
        library = means.faketime_library()
        if self.clocks is None or library is None:
            raise CannotInflict(means.NO_FAKETIME)
        self.clocks.mkdir(exist_ok=True)
        file = self.clocks / name
        if not file.exists():
            file.write_text("+0\n")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",  # what the file system says of a file does not change with the clock
        }


def refuse_limits(spec: PeerSpec) -> None:
    """Raises CannotInflict for what a process cannot be given without privileges."""
    if spec.memory_mib is not None:
        raise CannotInflict(f"{spec.name}: a limit of memory needs containers: swarm chaos --on containers")
    if spec.behind_nat:
        raise CannotInflict(f"{spec.name}: a peer behind NAT needs containers: swarm chaos --on containers")


def _wait(peers: Iterable[RealPeer], until: float) -> None:
    for peer in peers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            peer.starts[-1].process.wait(max(0.01, until - time.monotonic()))
