"""The rig of ``swarm.state``: small states, donors of one that fail as told, and a disk that breaks as told.

world = Donors(big_state(), "abc")
download = await world.open()
world.slow({"a": 1.0})
assert digest(await world.fetch(download)) == digest(world.state)
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm import disk as checkpoint_disk
from swarm.ids import PartName, PeerId, stage_part
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.sim.network import SimNetwork
from swarm.state.download import Download, DownloadContext, IntoMemory, PeerChunks, Wanted
from swarm.state.snapshot import Cut, Snapshot, digest
from swarm.state.transfer import CHUNK, ChunkRequest, Donation, StateDonor
from swarm.waiting import TokenBucket
from tests.harness.rigs.clocks import QUIET_TURNS as QUIET_TURNS
from tests.harness.rigs.clocks import FakeClock as FakeClock
from tests.harness.rigs.clocks import JumpClock as JumpClock
from tests.harness.rigs.clocks import in_time as in_time
from tests.harness.rigs.clocks import turns as turns
from tests.harness.rigs.common import NOTHING_BESIDE as NOTHING_BESIDE
from tests.harness.rigs.common import RUN as RUN
from tests.harness.rigs.common import inline as inline

ME = PeerId("me")
STAGE = stage_part(0)
LAYOUT = FlatLayout.from_shapes([("a", (3, 5)), ("b", (7,))])
Twist = Callable[[Any, Answer[Any]], Awaitable[Answer[Any]]]
"""(request's body, true answer) -> what is answered; raising a PeerError is answered too."""
CALLS = ("open", "write", "posix_fallocate", "fsync", "replace", "mkdir", "close", "unlink")
"""What a disk is asked to do."""


def snapshot(*, step: int = 0, part: PartName = STAGE, layout: FlatLayout = LAYOUT, seed: int = 0) -> Snapshot:
    """Return a state with random numbers in the slots and zeros in the gaps."""
    generator, vectors = torch.Generator().manual_seed(seed), []
    for _ in layout.vectors:
        flat = torch.zeros(layout.elements)
        for view in layout.views(flat).values():
            view.copy_(torch.randn(view.shape, generator=generator))
        vectors.append(flat)
    return Snapshot(part=part, step=step, layout=layout, vectors=tuple(vectors))


def changed(**fields: Any) -> Snapshot:
    """Return :func:`snapshot` with other fields."""
    return dataclasses.replace(snapshot(), **fields)


def big_state(elements: int = 16 * 40, seed: int = 0) -> Snapshot:
    """Return a state of three vectors with so many elements."""
    return snapshot(step=5, layout=FlatLayout.from_shapes([("a", (elements,))]), seed=seed)


# --- donors ----------------------------------------------------------------------------------------------------------


class Donors:
    """``names`` hold ``state``. ``served`` counts the chunks that each was asked for; ``twists`` (by name and method)
    change answers; ``after`` is told of every chunk asked for, all in all."""

    def __init__(self, state: Snapshot, names: str = "abc", *, donated: Snapshot | None = None) -> None:
        self.state, self.clock = state, JumpClock()
        self.network = SimNetwork(self.clock)
        self.names = [PeerId(name) for name in names]
        self.served: dict[PeerId, list[int]] = {name: [] for name in self.names}
        self.twists: dict[tuple[PeerId, str], Twist] = {}
        self.after: Callable[[int], None] = lambda count: None
        self.progress: list[tuple[PeerId, int, int]] = []
        self.dropped: dict[PeerId, str] = {}
        self.donors: dict[PeerId, StateDonor] = {}
        self._donated = donated or state

    async def open(self, pace: TokenBucket | None = None, **settings: Any) -> Download[PeerId, Snapshot]:
        """Have everybody enter, and return a download that has not begun, and keeps to ``pace``."""
        me = self.network.endpoint(ME)
        await me.enter(RUN)
        for name in self.names:
            endpoint = self.network.endpoint(name)
            await endpoint.enter(RUN)
            settings = {"donation": Donation(most=1e12)} | settings
            donor = self.donors[name] = StateDonor(self.clock, run=inline, **settings)
            donor.offer(self._donated, digest(self.state))
            endpoint.mount(_Service(self, name, donor))
        context = DownloadContext(
            donor=partial(PeerChunks, me),
            clock=self.clock,
            pace=pace,
            progress=lambda *told: self.progress.append(told),
            dropped=lambda donor, error: self.dropped.update({donor: error.code}),
            run=inline,
        )
        state = self.state
        wanted = Wanted(part=state.part, step=state.step, digest=digest(state), layout=state.layout)
        return Download(context, wanted, IntoMemory(wanted))

    async def fetch(self, download: Download[PeerId, Snapshot], donors: Sequence[PeerId] | None = None) -> Snapshot:
        """Run a download to its end, in pretended time. Every task that it began must have ended."""
        before = asyncio.all_tasks()
        task = asyncio.create_task(download.fetch(self.names if donors is None else donors))
        try:
            return await in_time(self.clock, task)
        finally:
            await turns(QUIET_TURNS)
            assert asyncio.all_tasks() - before <= {task}, "a task was left behind"

    @property
    def asked(self) -> int:
        """Return how many chunks were asked for, all in all."""
        return sum(map(len, self.served.values()))

    @property
    def cut(self) -> Cut:
        """Return how the state is cut."""
        return Cut.of(self.state.layout)

    def slow(self, seconds: dict[str, float]) -> None:
        """Have each message from these take so long, whatever its size."""
        self.network.delay = lambda source, target, size: seconds.get(source, 0.0)


class _Service:
    """A donor, twisted."""

    def __init__(self, donors: Donors, name: PeerId, donor: StateDonor) -> None:
        self._donors, self._name, self._donor = donors, name, donor

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [dataclasses.replace(method, handle=self._handler(method)) for method in self._donor.methods()]

    def _handler(self, method: AnyMethod) -> Any:
        async def handle(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
            if method.rpc == CHUNK:
                assert isinstance(body, ChunkRequest)
                self._donors.served[self._name].append(body.chunk)
                self._donors.after(self._donors.asked)
            answer = await method.handle(caller, body, incoming)
            twist = self._donors.twists.get((self._name, method.rpc))
            return answer if twist is None else await twist(body, answer)

        return handle


# --- a broken disk ---------------------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The process is gone: nothing of it runs any more, no handler either."""


class BrokenDisk:
    """Stands in for ``os`` in the code that writes checkpoints.

    Its calls are counted from 1. At call ``at`` it raises ``error``: a PowerCut when the call has happened, and from
    then on before any does, or an OSError, in place of that call alone.
    """

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._at, self._error = at, error
        self._paths: dict[int, Path] = {}
        self._open: set[int] = set()
        self._unsynced: dict[Path, int] = {}
        self._renamed: list[tuple[Path, bytes | None]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return found if name not in CALLS else lambda *arguments, **more: self._call(name, found, arguments, more)

    @property
    def fired(self) -> bool:
        """Return whether the chosen call was reached."""
        return len(self.calls) >= self._at > 0

    def _call(self, name: str, real: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
        self.calls.append(name)
        cut = isinstance(self._error, PowerCut)
        if self._error is not None and (len(self.calls) == self._at or (cut and len(self.calls) > self._at)):
            if cut and len(self.calls) == self._at:
                self._do(name, real, arguments, more)
            raise self._error
        return self._do(name, real, arguments, more)

    def _do(self, name: str, real: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if name == "replace":
            target = Path(arguments[1])
            self._renamed.append((target, target.read_bytes() if target.exists() else None))
            if self._unsynced.pop(Path(arguments[0]), None):
                self._unsynced[target] = 1  # a name may be on the disk before its bytes are
        # A real sync would only cost time: what it saves from a power cut is known here.
        result = None if name == "fsync" else real(*arguments, **more)
        if name == "open":
            self._paths[result] = Path(arguments[0])
            self._open.add(result)
        elif name == "close":
            self._open.discard(arguments[0])
        elif name == "write":
            self._unsynced[self._paths[arguments[0]]] = 1
        elif name == "fsync":
            self._synced(self._paths[arguments[0]])
        return result

    def _synced(self, path: Path) -> None:
        self._unsynced.pop(path, None)
        if path.is_dir():
            self._renamed = [(target, before) for target, before in self._renamed if target.parent != path]

    def bury(self) -> None:
        """Do what the kernel does for a process that died: close its files, and so end its locks."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def forget(self, *, names: bool) -> None:
        """Lose what a power cut may: bytes that were not synced, and with ``names`` also new names in directories that
        were not."""
        kept = set(self._unsynced)
        for target, before in reversed(self._renamed if names else []):
            kept.discard(target)
            if before is None:
                target.unlink(missing_ok=True)
            else:
                target.write_bytes(before)
        for path in kept:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)


def install(monkeypatch: pytest.MonkeyPatch, disk: BrokenDisk) -> BrokenDisk:
    """Have what the product writes, checkpoints above all, go through this disk."""
    monkeypatch.setattr(checkpoint_disk, "os", disk)
    return disk
