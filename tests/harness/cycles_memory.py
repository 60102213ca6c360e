"""Killing peers of a swarm in virtual time and starting them again, over and over in one run: does anything add up?"""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peers.chaos.faults import Restart
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import Event, PeerReady
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.harness.crashes import SHAPE, part_of
from tests.harness.faults_memory import MemoryWorld

NAMES = ("host-0", "host-1", "host-2", "host-3", "trainer-0", "trainer-1", "trainer-2")
KEPT = re.compile(r"history-\d+\.jsonl")
"""What a peer keeps, on purpose, of the history that it knew before the run went on without it."""
PATIENCE_S = 300.0
"""Virtual seconds that a round may take."""


@dataclass(frozen=True, slots=True)
class Load:
    """What this process holds when everybody is back, after a garbage collection. ``objects`` are those that Python's
    collector knows: memory without what torch and its like take once."""

    memory_bytes: int
    objects: int
    descriptors: int
    tasks: int
    files: int


@dataclass(frozen=True, slots=True)
class Cycled:
    """How often a peer was killed and came back, what was held after each round, and how many steps were closed."""

    cycles: int
    loads: tuple[Load, ...]
    steps: int


def cycle(root: Path, *, rounds: int, seed: int = 1) -> Cycled:
    """So many rounds of two or three deaths, each at a moment drawn by the seed. Raises AssertionError when somebody
    does not come back in time. Costs about a second a round."""
    return run_world(_Cycles(root, seed).run(rounds))


class _Cycles:
    def __init__(self, root: Path, seed: int) -> None:
        shape = {**SHAPE, "trainers": 3, "run": {"steps": 1_000_000}}  # seven voters: the founder has no vote
        self._swarm = SimSwarm(root, links=Links.parse({"default": {"latency_ms": 20}}), **shape)
        self._world, self._rng = MemoryWorld(self._swarm), random.Random(seed)

    async def run(self, rounds: int) -> Cycled:
        await self._swarm.open()
        running = asyncio.ensure_future(self._swarm.run())
        loads, deaths = [], 0
        try:
            await self._until(lambda: all(peer.events.of(PeerReady) for peer in self._swarm.peers.values()), running)
            for _ in range(rounds):
                victims = self._victims()
                await self._round(victims, running)
                deaths += len(victims)
                loads.append(self._load())
            steps = len(self._swarm.history()) - 1
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return Cycled(deaths, tuple(loads), steps)

    def _victims(self) -> list[str]:
        """One of each part that has another, which leaves a majority of the seven. Who comes back may hold another."""
        holders: dict[str, list[str]] = {}
        for name in NAMES:
            part = part_of(self._swarm.peers[self._world.newest(name)])
            assert part is not None
            holders.setdefault(part.spec.name, []).append(name)
        return [self._rng.choice(names) for _, names in sorted(holders.items()) if len(names) > 1]

    async def _round(self, names: Sequence[str], running: asyncio.Future[Any]) -> None:
        """All of them die, each at some event of its own soon, and are started again with their disks."""
        old = [self._world.newest(name) for name in names]
        for name in names:
            self._doom(name, self._rng.randint(1, 12))
        await self._until(
            lambda: all(self._is_back(name, before) for name, before in zip(names, old, strict=True)), running
        )
        for name in old:
            await self._swarm.forget(name)
        for peer in self._swarm.peers.values():
            peer.events.events.clear()

    def _doom(self, name: str, events: int) -> None:
        """It dies at the so-manieth event from now on."""
        left = events

        def listen(event: Event) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._world.inflict(Restart(name))

        self._swarm.peers[self._world.newest(name)].events.listeners.append(listen)

    def _is_back(self, name: str, before: str) -> bool:
        newest = self._world.newest(name)
        return newest != before and bool(self._swarm.peers[newest].events.of(PeerReady))

    async def _until(self, condition: Callable[[], bool], running: asyncio.Future[Any]) -> None:
        clock = self._swarm.network.clock
        end = clock.monotonic() + PATIENCE_S
        while not condition():
            assert not running.done(), running
            assert clock.monotonic() < end, self._standing()
            await clock.sleep(0.5)

    def _standing(self) -> dict[str, Any]:
        """Where everybody is, for who did not come back."""
        last = {name: peer.events.events[-1:] for name, peer in self._swarm.peers.items()}
        return {name: (self._swarm.peers[name].outcome, event) for name, event in last.items()}

    def _load(self) -> Load:
        gc.collect()
        this = psutil.Process()
        return Load(
            memory_bytes=this.memory_info().rss,
            objects=len(gc.get_objects()),
            descriptors=this.num_fds(),
            tasks=len(asyncio.all_tasks()),
            files=sum(not KEPT.fullmatch(path.name) for path in self._swarm.root.rglob("*")),
        )
