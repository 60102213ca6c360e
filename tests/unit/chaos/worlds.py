"""Worlds whose engine and processes are made up: what is done to them is written down, and time is told to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.chaos import means
from peers.chaos.container_start import Contained
from peers.chaos.container_world import ContainerWorld
from peers.chaos.engine import EngineError
from peers.chaos.process_world import ProcessWorld
from peers.chaos.processes import Process, RealPeer
from peers.chaos.world import PeerSpec


class Timers:
    """In place of a world's timers: nothing is done before :meth:`ring`."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], object]] = []

    def after(self, seconds: float | None, act: Callable[[], object]) -> None:
        """Keep it for later."""
        if seconds is not None:
            self.acts.append(act)

    def ring(self) -> None:
        """All that was to be done later is done now."""
        acts, self.acts = self.acts, []
        for act in acts:
            act()


class FakeEngine:
    """Answers as a Docker engine does; ``calls`` are what was asked, ``refused`` the words of calls that fail,
    ``answers`` what is said to calls with a word."""

    def __init__(self, world: ContainerWorld) -> None:
        self._world = world
        self.play = world.engine.play
        self.labels = world.engine.labels
        self.calls: list[tuple[str, ...]] = []
        self.refused: set[str] = set()
        self.answers: dict[str, str] = {}
        self.paused: set[str] = set()

    def call(self, *arguments: str, timeout_s: float = 0.0) -> str:
        """Note it; what is killed or removed has ended."""
        self.calls.append(arguments)
        if self.refused & set(arguments):
            raise EngineError(f"refused: {' '.join(arguments)}")
        if arguments[0] == "pause":
            self.paused |= set(arguments[1:])
        if arguments[0] == "unpause":
            self.paused -= set(arguments[1:])
        if arguments[0] == "kill" and "TERM" not in arguments:
            self.end(*arguments[1:])
        if said := [self.answers[word] for word in arguments if word in self.answers]:
            return said[0]
        return "true" if arguments[0] == "inspect" else ""

    def inspect(self, name: str, what: str) -> str:
        """Every first process has this number."""
        self.call("inspect", name, what)
        if "Paused" in what:
            return str(name in self.paused).lower()
        return "4321" if "Pid" in what else "true"

    def end(self, *names: str, code: int = 137) -> None:
        """These containers end."""
        for name in names:
            self._world.watcher._take("die", {"name": name, "exitCode": str(code)})


def contained(root: Path, *names: str) -> tuple[ContainerWorld, FakeEngine, Timers]:
    """A world in which each of these was started once."""
    world = ContainerWorld(root)
    engine, timers = FakeEngine(world), Timers()
    world.engine = engine  # type: ignore[assignment]
    world.networks._engine = engine  # type: ignore[assignment]
    world.later.after = timers.after  # type: ignore[method-assign]
    (root / "logs").mkdir(parents=True)
    for name in names:
        spec = PeerSpec(name=name, role="stage", arguments=("join",))
        peer = Contained(spec, root / "homes" / name, starts=[f"swarm-{engine.play}-{name}-0"])
        peer.home.mkdir(parents=True)
        world._enter(peer, spec)
    return world, engine, timers


class FakeProcess:
    """In place of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """As of a Popen."""
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """As of a Popen."""
        return self.returncode


class Processes:
    """Peers that are made-up processes; ``signals`` are those that were sent. SIGKILL ends one."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *names: str) -> None:
        self.world, self.timers = ProcessWorld(root), Timers()
        self.signals: list[tuple[int, int]] = []
        self._known: dict[int, FakeProcess] = {}
        self.world.later.after = self.timers.after  # type: ignore[method-assign]
        patch.setattr(means, "signal_all", self._signal_all)
        patch.setattr(self.world, "run", lambda *_: self.process())
        patch.setattr(means, "family", lambda pid: [self._known[pid]])
        for name in names:
            self.add(PeerSpec(name=name, role="stage", arguments=("join",)))

    def add(self, spec: PeerSpec) -> None:
        """One that was started once."""
        peer = RealPeer(spec, self.world.root / "homes" / spec.name)
        peer.home.mkdir(parents=True)
        self.world._enter(peer, spec)
        peer.starts.append(Process(self.process(), self.world.root / f"{spec.name}.log"))

    def process(self) -> Any:
        """Another one."""
        made = FakeProcess(100 + len(self._known))
        self._known[made.pid] = made
        return made

    def end(self, name: str, code: int = 1) -> None:
        """A peer ends by itself."""
        self._known[self.world.peers[name].pid].returncode = code

    def _signal_all(self, pids: Any, number: int) -> None:
        for pid in pids:
            self.signals.append((pid, number))
            if number == 9:
                self._known[pid].returncode = -9
