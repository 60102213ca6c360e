"""Machines that come and go under the stage hosts of a simulated swarm, as a trace says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peers.chaos.schedule import Removal
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending
from swarm.events import Event, PartAssigned, PeerReady, RunStarted, StepClosed
from swarm.ids import PartName

NOTICE_S = 30.0
"""Between notice and end: the shortest that a cloud gives."""


@dataclass(slots=True)
class MarketMachine:
    """One machine, and the peer on it."""

    name: str
    started_s: float
    part: PartName | None = None
    ready_s: float | None = None
    ended_s: float | None = None
    leaving: bool = False

    @property
    def holds(self) -> bool:
        """Return whether its stage can count on it."""
        return self.ready_s is not None and self.ended_s is None and not self.leaving


def by_number(place: int, number: int) -> str:
    """The name of the peer that comes to a place, the so manieth of all."""
    return f"spot-{number}"


@dataclass(slots=True)
class SpotMarket:
    """Plays a trace on a swarm's stage hosts, by virtual time, and keeps account of who was there when.

    A place whose machine is taken gets another one later: a new peer, with another identity and nothing on disk, that
    takes the stage which needs it most. The last replica of a stage is spared. Trainers and bootstrap are not on the
    market. ``named`` names the peer that comes to a place, of so many in all. ``counts`` say what was done,
    ``machines`` are all that there ever were.
    """

    swarm: SimSwarm
    trace: Sequence[Removal]
    named: Callable[[int, int], str] = by_number
    machines: dict[str, MarketMachine] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    began_s: float = 0.0
    _places: list[MarketMachine] = field(default_factory=list)
    _taking: list[asyncio.Task[None]] = field(default_factory=list)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.swarm.on_added.append(self._added)

    @property
    def now_s(self) -> float:
        """The world's clock."""
        return self.swarm.network.clock.monotonic()

    def join_seconds(self) -> list[float]:
        """From start to ready, of those that came later."""
        late = (one for one in self.machines.values() if one.started_s > self.began_s and one.ready_s is not None)
        return [one.ready_s - one.started_s for one in late if one.ready_s is not None]

    # --- account -------------------------------------------------------------------------------------------------

    def _added(self, name: str) -> None:
        if name.startswith("host-"):
            self._places.append(self._start(name))
        if name == "bootstrap" or name in self.machines:
            self.swarm.peers[name].events.listeners.append(lambda event: self._hear(name, event))

    def _start(self, name: str) -> MarketMachine:
        machine = self.machines[name] = MarketMachine(name, self.now_s)
        return machine

    def _hear(self, name: str, event: Event) -> None:
        if name == "bootstrap":
            self._time(event)
            return
        machine = self.machines[name]
        if isinstance(event, PartAssigned) and event.part is not None:
            machine.part = event.part
        if isinstance(event, PeerReady) and machine.ready_s is None:
            machine.ready_s = self.now_s

    def _time(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.began_s = self.now_s
            self._begun.set()
        if isinstance(event, StepClosed) and event.step >= self.swarm.manifest.run.steps:
            self._over.set()

    # --- playing -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the last step is closed."""
        await self._begun.wait()
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(self._play(group))
            await self._over.wait()
            for task in (playing, *self._taking):
                task.cancel()

    async def _play(self, group: asyncio.TaskGroup) -> None:
        for removal in self.trace:
            await self._until(self.began_s + removal.at_s)
            for place, back_s in zip(removal.places, removal.back_s, strict=True):
                taking = self._take(place, self.began_s + back_s, noticed=removal.noticed)
                self._taking.append(group.create_task(taking))

    async def _until(self, at_s: float) -> None:
        await self.swarm.network.clock.sleep(max(0.0, at_s - self.now_s))

    async def _take(self, place: int, back_s: float, *, noticed: bool) -> None:
        """One machine is taken back, and replaced."""
        machine = self._places[place]
        if machine.ended_s is not None or machine.leaving:
            self.counts["spared"] += 1  # it was to be replaced by now, but had been spared or still leaves
            return
        if self._is_last(machine):
            self.counts["spared"] += 1
            return
        self.counts["noticed" if noticed else "killed"] += 1
        if noticed:
            await self._give_notice(machine)
        else:
            self.swarm.kill(machine.name)
        machine.ended_s = self.now_s
        await self._until(back_s)
        self.counts["replaced"] += 1
        number = self.counts["replaced"]
        name = self.named(place, number)
        self._places[place] = self._start(name)
        await self.swarm.join(name, "stage", 10_000 + number, may_fail=True)

    def _is_last(self, machine: MarketMachine) -> bool:
        if machine.ready_s is None:
            return False
        return not any(one.holds and one.part == machine.part for one in self._places if one is not machine)

    async def _give_notice(self, machine: MarketMachine) -> None:
        """As a peer that gets SIGTERM: it leaves in order, and is killed when its time is up."""
        peer = self.swarm.peers[machine.name]
        machine.leaving = True
        if peer.membership is not None:
            peer.membership.leave("this machine is taken back", Ending.DRAINED)
        if peer.task is None:
            return
        done, _ = await asyncio.wait([peer.task], timeout=NOTICE_S)
        if not done and not self._is_last(machine):
            self.counts["cut_short"] += 1
            self.swarm.kill(machine.name)
        elif not done:
            self.counts["spared"] += 1
            await asyncio.wait([peer.task])
