"""Donors of one state over a network in memory, in a time that jumps to whoever wakes next; each may fail as told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swarm.ids import PeerId, RunId
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.sim.network import SimNetwork
from swarm.state.donation import Donation
from swarm.state.download import Download, DownloadContext, IntoMemory, PeerChunks, Wanted
from swarm.state.snapshot import Cut, Snapshot, digest
from swarm.state.transfer import CHUNK, ChunkRequest, StateDonor
from swarm.waiting import TokenBucket
from tests.unit.membership.observed import HandClock
from tests.unit.state.states import inline, snapshot

ME = PeerId("me")
RUN = RunId("ab" * 32)
Twist = Callable[[Any, Answer[Any]], Awaitable[Answer[Any]]]
"""(request's body, true answer) -> what is answered; raising a PeerError is answered too."""


class JumpClock(HandClock):
    """Time that stands still while anybody can go on, and then jumps: see :func:`in_time`."""

    def jump(self) -> None:
        """To the next who wakes. Raises AssertionError when nobody ever will: a deadlock."""
        waiting = (sleeper for sleeper in self._sleepers if not sleeper[1].done())
        self._sleepers = sorted(waiting, key=lambda sleeper: sleeper[0])
        assert self._sleepers, "everybody waits, and nobody sleeps"
        self.now = max(self.now, self._sleepers[0][0])
        for due, waker in self._sleepers:
            if due <= self.now:
                waker.set_result(None)


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
        """Everybody is there; returns a download that has not begun, and keeps to ``pace``."""
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
        """To its end, however long it takes in pretended time. Every task that it began must have ended."""
        before = asyncio.all_tasks()
        task = asyncio.create_task(download.fetch(self.names if donors is None else donors))
        try:
            return await in_time(self.clock, task)
        finally:
            await turns()
            assert asyncio.all_tasks() - before <= {task}, "a task was left behind"

    @property
    def asked(self) -> int:
        """Chunks asked for, all in all."""
        return sum(map(len, self.served.values()))

    @property
    def cut(self) -> Cut:
        """How the state is cut."""
        return Cut(self.state.layout.elements)

    def slow(self, seconds: dict[str, float]) -> None:
        """What a message from these takes, whatever its size."""
        self.network.delay = lambda source, target, size: seconds.get(source, 0.0)


class _Service:
    """A donor, twisted."""

    def __init__(self, donors: Donors, name: PeerId, donor: StateDonor) -> None:
        self._donors, self._name, self._donor = donors, name, donor

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [replace(method, handle=self._handler(method)) for method in self._donor.methods()]

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


async def turns(count: int = 400) -> None:
    """Let everybody go on as far as they can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def in_time(clock: JumpClock, task: asyncio.Task[Any]) -> Any:
    """The task's result; the time jumps whenever nobody can go on."""
    while not task.done():
        await turns()
        if not task.done():
            clock.jump()
    return task.result()


def big_state(elements: int = 16 * 40, seed: int = 0) -> Snapshot:
    """A state of three vectors with so many elements."""
    return snapshot(step=5, layout=FlatLayout.from_shapes([("a", (elements,))]), seed=seed)
