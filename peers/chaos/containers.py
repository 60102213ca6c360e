"""Run peers as containers of a Docker engine, on networks of their own: start, pause, look at and end them.

Below ``root``: ``homes/NAME`` (a peer's home), ``logs/NAME-N.log`` (what its Nth start printed), ``lost/NAME-N`` (a
disk that it lost), ``files/``, ``faults.jsonl``. A watcher thread reads what the peers write. Each start is a container
of its own with the address of the one before. Containers, networks and volumes carry the play's label: they are removed
at the end, and those of a play that was killed by the next one. Several plays at once do not see each other. Entering
it raises EngineError, Unfit for an engine that no play can rest on.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from peers.chaos import container_start, leftovers
from peers.chaos.company import BaseWorld
from peers.chaos.container_networks import ContainerNetworks
from peers.chaos.container_start import Contained
from peers.chaos.engine import Engine, EngineError, Watcher
from peers.chaos.nemesis import Nemesis, check_events, check_files, check_kind
from peers.chaos.processes import ORDER_S
from peers.chaos.world import PeerSpec

IMAGE = "swarm-trainer:local"
ENDED_S = 30.0
"""How long the engine may take to end what was killed."""


class ContainerBase(BaseWorld[Contained]):
    """All of a :class:`~peers.chaos.container_world.ContainerWorld` but its faults.

    ``upgrade`` is the image that peers are upgraded to; without one they come back in the same.
    """

    kind = "containers"
    LOOK_EVERY_S = 0.01
    networks: ContainerNetworks

    def __init__(self, root: Path, image: str = IMAGE, *, upgrade: str | None = None) -> None:
        super().__init__(root.absolute())
        self.image, self.upgrade = image, upgrade
        self.engine = Engine(secrets.token_hex(4))
        self.watcher = Watcher(self.engine)
        self.nemesis = Nemesis(self.engine)
        self.networks = ContainerNetworks(self.engine, self.nemesis)
        self.skewed: set[str] = set()
        self.pool = ThreadPoolExecutor(8, "containers")

    def __enter__(self) -> Self:
        self.engine.call("version", "--format", "{{.Server.Version}}")
        try:
            self.engine.call("image", "inspect", "--format", "{{.Id}}", self.image)
        except EngineError as error:
            raise EngineError(f"{self.image} is not here: make image builds it") from error
        check_kind(self.engine)
        self.root.mkdir(parents=True, exist_ok=True)
        for stays in leftovers.sweep(self.engine):
            sys.stderr.write(f"{stays}: it is over; a later one tries again. docker ps --all shows who is in the way\n")
        try:
            self.watcher.start()
            self.nemesis.start(self.root)
            check_files(self.nemesis, self.root)
            check_events(self.watcher, self.nemesis)
        except BaseException:
            self._remove()
            raise
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
            with self._lock:
                for last in (self._kill_all, lambda: container_start.keep_disks(self)):
                    try:
                        last()
                    except EngineError as problem:
                        self._unkept.append(f"as the play was cleared away: {problem}")
        finally:
            self._remove()

    def _kill_all(self) -> None:
        self.kill([peer for peer in self.peers.values() if self.alive(peer.name)])

    def _remove(self) -> None:
        try:
            self.nemesis.close()
            self.pool.shutdown()
        finally:
            try:
                leftovers.remove_all(self.engine)
            finally:
                self.watcher.close()

    # --- peers ---------------------------------------------------------------------------------------------------

    def start(self, spec: PeerSpec) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`. Raises EngineError."""
        with self._lock:
            if self.over.is_set():
                return
            peer = Contained(spec, self.root / "homes" / spec.name)
            self._enter(peer, spec)
        # Not under the lock: an engine takes its time, and events are to be told meanwhile.
        self.networks.add(spec)
        container_start.prepare(self, peer)
        self.begin(peer)

    def begin(self, peer: Contained) -> None:
        """Another start of a peer, in the same home."""
        container_start.begin(self, peer, peer.image or self.image)

    def order(self, name: str, words: Sequence[str]) -> str:
        """See :class:`~peers.chaos.world.PlayWorld`. Raises EngineError."""
        return self.engine.call("exec", self.peers[name].container, "swarm", *words, timeout_s=ORDER_S)

    def alive(self, name: str) -> bool:
        """See :class:`~peers.chaos.world.PlayWorld`. While a fault is inflicted nobody is told who has died of it."""
        with self._lock:
            return self._runs(name)

    def _runs(self, name: str) -> bool:
        return name in self.peers and bool(self.peers[name].starts) and self._died(name) is None

    def paused(self, name: str) -> bool:
        """Return whether its newest start is held. Raises EngineError."""
        return self.engine.inspect(self.peers[name].container, "{{.State.Paused}}") == "true"

    def resume(self, names: Iterable[str]) -> None:
        """Let those of them go on that are paused."""
        for name in names:
            peer = self.peers[name]
            if self.alive(name) and self.paused(name):
                try:
                    self.engine.call("unpause", peer.container)
                except EngineError:
                    if self.engine.inspect(peer.container, "{{.State.Running}}") == "true":
                        raise  # else it has ended meanwhile

    def exit_code(self, name: str) -> int | None:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return self._died(name)

    def _died(self, name: str) -> int | None:
        died = self.watcher.died(self.peers[name].container)
        return None if died is None else died.code

    def kill(self, peers: Sequence[Contained]) -> None:
        """kill -9 of these at once; returns when they are gone. Those that have ended are passed over."""
        running = [peer.container for peer in peers if self.alive(peer.name)]
        if not running:
            return
        with contextlib.suppress(EngineError):  # one of them ended just now: the others are killed all the same
            self.engine.call("kill", *running)
        if late := self.watcher.wait(running, ENDED_S):
            raise EngineError(f"the engine did not end {', '.join(sorted(late))} within {ENDED_S:g} s")

    def stop(self, names: Iterable[str], grace_s: float) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`. Told again after half of the time: who cannot be spared leaves
        then."""
        running = [self.peers[name].container for name in names if self.alive(name)]
        self.resume([name for name in names if self.alive(name)])
        for _ in range(2):
            if running:
                with contextlib.suppress(EngineError):
                    self.engine.call("kill", "--signal", "TERM", *running)
            running = sorted(self.watcher.wait(running, grace_s / 2))
        self.kill([peer for peer in self.peers.values() if peer.starts and peer.container in running])

    def homes(self) -> Sequence[Path]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        with self._lock, contextlib.suppress(EngineError):
            if not self.over.is_set():
                container_start.keep_disks(self)
        return [path for path in (self.root / "homes", self.root / "lost") if path.is_dir()]

    def log(self, name: str) -> Path:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return self.root / "logs" / f"{name}-{len(self.peers[name].starts) - 1}.log"

    def beside(self, act: Callable[[], object]) -> None:
        """Do it in a thread of the pool, unless the world has ended."""
        self.pool.submit(self.later.unless_over, act)

    def problems(self) -> Sequence[str]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        deaf = ("the engine tells no more who has ended: docker events is gone",) if self.watcher.deaf else ()
        return (*super().problems(), *deaf)
