"""A swarm of real processes in which one peer after the other kills itself at a chosen moment, and is started again.

    aftermath = live_through(root, [Death("stage-0-1", "answers step/1/propose"), Death("trainer-0", "RoundDone")])
    check_run([root]).assert_sound()

The next death waits until the peer is ready again, so the swarm is whole each time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from peers.home.run_directory import RunDirectory
from peers.local.launch import PeerExit, PeerGroup
from peers.local.progress import RunView
from peers.local.run import BOOTSTRAP, LocalRun, peer_names
from peers.manifest_file import write_manifest
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.events import PeerReady, StepClosed
from swarm.models.gpt_config import GptConfig
from swarm.monitoring.reader import EventTail, RecordedEvent
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig
from tests.benchmarks._parity_run import Layout, Scale, build_data, make_manifest, shape_of
from tests.harness.crashing_peer import FATES
from tests.harness.processes import children_of

LAYOUT = Layout(name="2 × 2", stages=2, replicas=2, ends="private")
SCALE = Scale(
    model=GptConfig(vocab_size=300, dim=32, layers=2, heads=2, context=16),
    batch=BatchConfig(microbatch_size=2, microbatches_per_step=6),
    optimizer=OptimizerConfig(),
    steps=1_000_000,
    characters=60_000,
)
DEADLINE_S = 300.0
"""How long a death and the return after it may take."""
KILLED = -9


@dataclass(frozen=True, slots=True)
class Death:
    """A peer dies at the ``nth`` moment of a kind from when all are ready. ``joining``: it is killed, started again,
    and dies at that moment of its return."""

    peer: str
    kind: str
    nth: int = 1
    joining: bool = False


@dataclass(frozen=True, slots=True)
class Burden:
    """What is there when all are ready: the bootstrap, which never dies, and everything of ours on this machine.

    ``memory_bytes`` is what it has in memory, pages included that it shares with who forked it: each becomes its own
    when either touches it first, so what is ``unshared_bytes`` grows without anything being added."""

    memory_bytes: int
    unshared_bytes: int
    descriptors: int
    threads: int
    processes: int
    files: int


@dataclass
class Aftermath:
    """What became of it: how often who died, and the burden after each return."""

    deaths: Counter[str] = field(default_factory=Counter)
    burdens: list[Burden] = field(default_factory=list)
    closed: int = 0


class _Over(Exception):
    """All deaths have been died."""


class _Group(PeerGroup):
    """Starts again who was killed."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, entry="tests.harness.crashing_peer:run")
        self._settings: dict[str, PeerSettings] = {}
        self.killed: Counter[str] = Counter()

    def start(self, settings: PeerSettings) -> None:
        """See :meth:`peers.local.launch.PeerGroup.start`."""
        self._settings[settings.name] = settings
        super().start(settings)

    def poll(self, timeout_s: float) -> list[PeerExit]:
        """See :meth:`peers.local.launch.PeerGroup.poll`. Deaths are not told."""
        exits = super().poll(timeout_s)
        for one in exits:
            if one.code == KILLED:
                self.killed[one.name] += 1
                self.start(self._settings[one.name])
        return [one for one in exits if one.code != KILLED]


class _View(RunView):
    def __init__(self) -> None:
        super().__init__()
        self.ready: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()

    def add(self, told: RecordedEvent) -> None:
        """See :class:`RunView`."""
        super().add(told)
        self.ready[told.name] += isinstance(told.record.event, PeerReady)
        self.closed[told.name] += isinstance(told.record.event, StepClosed)


class _Fates:
    """Deals the deaths, one after the other: :meth:`step` at every look at the run."""

    def __init__(self, place: Path, group: _Group, view: _View, deaths: Sequence[Death]) -> None:
        self._place, self._group, self._view, self._deaths = place, group, view, deaths
        self._clock = SystemClock()
        self.aftermath = Aftermath()
        self._story = self._live()

    def step(self) -> None:
        """Go on as far as it goes. Raises _Over, AssertionError when something takes too long."""
        try:
            next(self._story)
        except StopIteration:
            raise _Over from None

    def _live(self) -> Iterator[None]:
        everybody = len(self._group.running)
        while everybody < 2:  # the bootstrap comes first
            yield
            everybody = len(self._group.running)
        yield from self._until("everybody is ready", lambda: len(+self._view.ready) == len(self._group.running))
        for death in self._deaths:
            yield from self._die(death)
            self.aftermath.burdens.append(self._burden())
        self.aftermath.deaths += self._group.killed
        self.aftermath.closed = self._view.closed[BOOTSTRAP]

    def _die(self, death: Death) -> Iterator[None]:
        name, before = death.peer, self._group.killed[death.peer]
        fate = self._place / f"{name}.new"
        fate.write_text(json.dumps({"kind": death.kind, "nth": death.nth}))
        fate.rename(fate.with_suffix(".json"))  # it may be read at any moment
        if death.joining:
            self._group.signal(name, -KILLED)
        died = before + 1 + death.joining
        yield from self._until(f"{death} fires", lambda: self._group.killed[name] >= died)
        (self._place / f"{name}.fired").unlink()  # it is there: nothing else kills
        ready, closed = self._view.ready[name], self._view.closed[BOOTSTRAP]
        back = f"{name} is back after {death}"
        yield from self._until(back, lambda: self._view.ready[name] > ready and self._view.closed[name] > 0)
        yield from self._until("another step", lambda: self._view.closed[BOOTSTRAP] > closed)

    def _until(self, what: str, condition: Callable[[], bool]) -> Iterator[None]:
        end = self._clock.monotonic() + DEADLINE_S
        while not condition():
            assert self._clock.monotonic() < end, f"in {DEADLINE_S:g} s it did not come to pass that {what}"
            yield

    def _burden(self) -> Burden:
        bootstrap, scratch = psutil.Process(self._group.pids[BOOTSTRAP]), self._group._client.scratch
        assert scratch is not None
        memory = bootstrap.memory_full_info()
        return Burden(
            memory_bytes=memory.rss,
            unshared_bytes=memory.uss,
            descriptors=bootstrap.num_fds(),
            threads=bootstrap.num_threads(),
            processes=len(children_of(os.getpid())),
            files=sum(1 for _ in scratch.rglob("*")),
        )


def live_through(root: Path, deaths: Sequence[Death]) -> Aftermath:
    """All these deaths in one run, which is stopped after them. Raises AssertionError for a peer that does not die or
    come back in time, RunBroken when the others cannot go on. Main thread only."""
    root.mkdir()
    data = build_data(root / "data", SCALE)
    manifest = make_manifest(LAYOUT, SCALE, data, reproducible=True)
    directory = RunDirectory(root / "run")
    data.copy_to(directory)
    write_manifest(manifest, directory.manifest)
    shape, view, group = shape_of(LAYOUT, manifest), _View(), _Group(root / "fork.log")
    with tempfile.TemporaryDirectory() as place:
        os.environ[FATES] = place
        fates = _Fates(Path(place), group, view, deaths)
        run = LocalRun(
            shape=shape,
            manifest=manifest,
            directory=directory,
            device="cpu",
            group=group,
            tail=EventTail({name: directory.events(name) for name in peer_names(shape)}),
            view=view,
            clock=SystemClock(),
            on_change=fates.step,
        )
        try:
            group.open()
            run.train()
        except _Over:
            pass
        finally:
            group.stop()
            del os.environ[FATES]
    return fates.aftermath
