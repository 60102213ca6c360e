"""The rig of ``peers.chaos``: worlds whose engine and processes are made up.

What is done to them is written down, and time passes when it is told.

    world, engine, timers = contained(tmp_path, "a", "b")
    world.inflict(Kill(("a",)))
    assert any(call[0] == "kill" for call in engine.calls)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from peers.chaos import means
from peers.chaos.container_start import Contained
from peers.chaos.container_world import ContainerWorld
from peers.chaos.engine import EngineError
from peers.chaos.faults import CannotInflict, Fault, Kill, LimitMemory, Pause, Restart, Stop
from peers.chaos.process_world import ProcessWorld
from peers.chaos.processes import Process, RealPeer
from peers.chaos.world import PeerSpec, Stamps

Hear = Callable[[str, str, Mapping[str, Any]], None]


class Timers:
    """In place of a world's timers: nothing is done before :meth:`ring`."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], object]] = []

    def after(self, seconds: float | None, act: Callable[[], object]) -> None:
        """Keep it for later."""
        if seconds is not None:
            self.acts.append(act)

    def ring(self) -> None:
        """Do now all that was to be done later."""
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
        """Note the call; what is killed or removed has ended."""
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
        """Return what the engine says of a container; every first process has the same number."""
        self.call("inspect", name, what)
        if "Paused" in what:
            return str(name in self.paused).lower()
        return "4321" if "Pid" in what else "true"

    def end(self, *names: str, code: int = 137) -> None:
        """End these containers."""
        for name in names:
            self._world.watcher._take("die", {"name": name, "exitCode": str(code)})


def contained(root: Path, *names: str) -> tuple[ContainerWorld, FakeEngine, Timers]:
    """Return a world in which each of these was started once."""
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
        """Add a peer that was started once."""
        peer = RealPeer(spec, self.world.root / "homes" / spec.name)
        peer.home.mkdir(parents=True)
        self.world._enter(peer, spec)
        peer.starts.append(Process(self.process(), self.world.root / f"{spec.name}.log"))

    def process(self) -> Any:
        """Return another made-up process."""
        made = FakeProcess(100 + len(self._known))
        self._known[made.pid] = made
        return made

    def end(self, name: str, code: int = 1) -> None:
        """Have a peer end by itself."""
        self._known[self.world.peers[name].pid].returncode = code

    def _signal_all(self, pids: Any, number: int) -> None:
        for pid in pids:
            self.signals.append((pid, number))
            if number == 9:
                self._known[pid].returncode = -9


# --- a whole play ----------------------------------------------------------------------------------------------------


class MadeUpWorld:
    """Implements PlayWorld. Each look at the clock is 0.1 s later and closes a step; ``happens`` says what else happens
    at a step."""

    def __init__(
        self, root: Path, happens: Mapping[int, Callable[[MadeUpWorld], None]] | None = None, *, steps: int = 40
    ) -> None:
        self.root = root
        self.stamps = Stamps(lambda: self._wall)
        self.living: set[str] = set()
        self.done: list[tuple[int, Fault]] = []
        self.stopped: list[str] = []
        self.step = 0
        self._joining: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.failures: list[str] = []
        self.invited: dict[str, str] = {}
        self._happens = {steps: MadeUpWorld.leave, **(happens or {})}
        self._wall = 1000.0
        self._hear: list[Hear] = []
        self._telling = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.living.clear()

    def say(self, name: str, kind: str, **fields: Any) -> None:
        """Have a peer write an event."""
        telling, self._telling = self._telling, True
        self.stamps.tell(self._wall)
        for hear in self._hear:
            hear(name, kind, fields)
        self._telling = telling

    def wall(self) -> float:
        """See :class:`~swarm.clock.Clock`."""
        self._wall += 0.0 if self._telling else 0.1
        if not self._telling and self.step and len(self.living) >= 3:
            self._close()
        return self._wall

    def leave(self) -> None:
        """End the run."""
        for name in sorted(self.living):
            self.end(name, 0)

    def _close(self) -> None:
        self.step += 1
        if self.step == 1:
            for name in sorted(self.living):
                self._ready(name)
        for name in [name for name, step in self._joining.items() if step <= self.step]:
            del self._joining[name]
            self._ready(name)
        self.say("host-0-0", "StepClosed", step=self.step, loss=5.0, tokens=10)
        if (act := self._happens.get(self.step)) is not None:
            act(self)

    def _ready(self, name: str) -> None:
        part = {"h": "stage-0", "t": "ends"}.get(name[0])
        self.say(name, "PeerReady", part=part, seconds=1.0, again=False)

    def start(self, spec: PeerSpec) -> None:
        """See PlayWorld."""
        self.living.add(spec.name)
        if spec.name == "bootstrap":
            self.say("bootstrap", "Invited", invite="swarm1:x")
        else:
            assert spec.arguments[1] in ("swarm1:x", f"swarm1:x-{spec.name}-{spec.role}")
            self.invited[spec.name] = spec.arguments[1]

    def order(self, name: str, words: Sequence[str]) -> str:
        """See PlayWorld. Invites, and nothing else."""
        assert (name, words[:2], words[-2:]) == ("bootstrap", ("invite", "--for"), ("--peer", "bootstrap"))
        return f"swarm1:x-{words[2]}-{words[4]}"

    def expect(self, spec: PeerSpec) -> None:
        """See PlayWorld."""
        raise AssertionError(spec)

    def alive(self, name: str) -> bool:
        """See PlayWorld."""
        if not self.step and len(self.living) == 4:
            self._close()
        return name in self.living

    def exit_code(self, name: str) -> int | None:
        """See PlayWorld."""
        return None if name in self.living else self.codes.get(name, -9)

    def end(self, name: str, code: int) -> None:
        """Have a peer end by itself."""
        self.codes[name] = code
        self.living.discard(name)

    def stop(self, names: Iterable[str], grace_s: float) -> None:
        """See PlayWorld."""
        self.stopped += names
        self.living.clear()

    def homes(self) -> Sequence[Path]:
        """See PlayWorld."""
        return []

    def problems(self) -> Sequence[str]:
        """See PlayWorld."""
        return self.failures

    def unkept(self) -> Sequence[str]:
        """See PlayWorld."""
        return ()

    def log(self, name: str) -> Path:
        """See PlayWorld."""
        path = self.root / f"{name}.log"
        path.write_text('{"kind": "x"}\n' + f"the last word of {name}\n")
        return path

    def listen(self, hear: Hear) -> None:
        """See PlayWorld."""
        self._hear.append(hear)

    def check(self, fault: Fault) -> None:
        """See PlayWorld."""
        if not isinstance(fault, Kill | LimitMemory | Pause | Restart | Stop):
            raise CannotInflict(f"a made-up world has no means for {fault.name}")

    def inflict(self, fault: Fault) -> Iterable[str]:
        """See PlayWorld."""
        self.done.append((self.step, fault))
        if isinstance(fault, Kill):
            self.living -= set(fault.peers)
        if isinstance(fault, Restart):
            self.living.add(fault.peer)
            self._joining[fault.peer] = self.step + 5
        return fault.victims

    def identity(self, name: str) -> str:
        """See PlayWorld."""
        return name.upper()


def client_script(root: Path, script: str) -> Path:
    """Write a stand-in for the engine's client, which does what the shell script says, and return where."""
    path = root / "client"
    path.write_text(script)
    path.chmod(0o755)
    return path
