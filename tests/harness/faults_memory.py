"""Faults in a swarm in memory: a :class:`LocalSwarm` in real time, or a :class:`SimSwarm` in virtual time.

In real time a pause is what others see of one (nothing reaches the peer or leaves it), and a device cannot be slowed;
in virtual time a paused or killed peer does not run one instruction. Daemons there are none.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from peers.chaos import faults
from peers.chaos.faults import CannotInflict, Fault
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import Event
from swarm.ids import PeerId
from swarm.sim.loop import as_peer
from swarm.sim.network import SimEndpoint
from tests.harness.faults_disks import FullDisks
from tests.harness.swarm import LocalSwarm

Hear = Callable[[str, str, Mapping[str, Any]], None]


class MemoryWorld:
    """Implements :class:`peers.chaos.plan.World`. Use as a context manager where disks are filled.

    Peers that are started again are other entries of ``swarm.peers`` (``host-1-again-1``) with the same identity;
    events and faults call each by the name it had at first, and a fault hits the newest start.
    """

    def __init__(self, swarm: LocalSwarm, *, seed: int = 0) -> None:
        self.swarm, self.root = swarm, swarm.root
        self._rng = random.Random(seed)
        self._hear: list[Hear] = []
        self._starts: dict[str, list[str]] = {}
        self._base: dict[str, str] = {}
        self._heard: set[str] = set()
        self._disks = FullDisks()
        self._joined = 0
        self._later: list[asyncio.Task[None]] = []
        swarm.on_added.append(self._attach)

    def __enter__(self) -> MemoryWorld:
        self._disks.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._disks.remove()

    # --- the seam ------------------------------------------------------------------------------------------------

    def wall(self) -> float:
        """See :class:`~peers.chaos.plan.World`."""
        return self.swarm.network.clock.wall()

    def identity(self, name: str) -> str:
        """See :class:`~peers.chaos.plan.World`."""
        return self.swarm.peers[name].endpoint.peer  # all starts of a peer have it

    def newest(self, name: str) -> str:
        """The entry of ``swarm.peers`` that a name means now."""
        return next(start for start in reversed(self._starts.get(name, [name])) if start in self.swarm.peers)

    def listen(self, hear: Hear) -> None:
        """See :class:`~peers.chaos.plan.World`."""
        self._hear.append(hear)
        for name in self.swarm.peers:
            self._attach(name)

    def check(self, fault: Fault) -> None:
        """See :class:`~peers.chaos.plan.World`."""
        kind, virtual = type(fault), isinstance(self.swarm, SimSwarm)
        if kind is faults.KillDaemon:
            raise CannotInflict("in memory there are no daemons to kill: plan kill_daemon in a ProcessWorld")
        if kind in (faults.SlowDevice, faults.SkewClock) and not virtual:
            raise CannotInflict(f"a LocalSwarm's devices and clocks are real: plan {fault.name} in a SimSwarm")
        if kind is faults.FillDisk and not self._disks.installed:
            raise CannotInflict("disks fill only inside `with MemoryWorld(...) as world:`")
        if kind not in _DOERS:
            raise CannotInflict(f"this world has no means for {fault.name}")
        known = self._names()
        for name in (*fault.victims, *getattr(fault, "others", ())):
            if name not in known:
                raise CannotInflict(f"{fault.name} names {name}; there are {', '.join(sorted(known))}")

    def inflict(self, fault: Fault) -> Iterable[str]:
        """See :class:`~peers.chaos.plan.World`. Nothing of it belongs to the peer whose event set it off."""
        return as_peer("").run(_DOERS[type(fault)], self, fault)

    # --- who is here ---------------------------------------------------------------------------------------------

    def _names(self) -> set[str]:
        planned = {"bootstrap", *(f"host-{index}" for index in range(self.swarm.hosts))}
        return planned | {f"trainer-{index}" for index in range(len(self.swarm.shards))} | set(self.swarm.peers)

    def _attach(self, name: str) -> None:
        if name in self._heard or not self._hear:
            return
        self._heard.add(name)

        def listen(event: Event) -> None:
            self.tell(name, event.kind, event.fields())

        self.swarm.peers[name].events.listeners.append(listen)

    def tell(self, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Something that happens to a peer, of the start ``name``: its events are told so, and what others add."""
        for hear in self._hear:
            hear(self._base.get(name, name), kind, fields)

    def _alive(self, name: str) -> bool:
        return self.swarm.network.find(self._endpoint(name).peer) is self._endpoint(name)

    def _endpoint(self, name: str) -> SimEndpoint:
        endpoint = self.swarm.peers[self.newest(name)].endpoint
        assert isinstance(endpoint, SimEndpoint)
        return endpoint

    def _ids(self, names: Iterable[str]) -> list[PeerId]:
        return [self._endpoint(name).peer for name in names]

    def _after(self, seconds: float | None, act: Callable[[], object]) -> None:
        """The fault's own end, by the world's clock."""

        async def later() -> None:
            assert seconds is not None
            await self.swarm.network.clock.sleep(seconds)
            act()

        if seconds is not None:
            self._later.append(self.swarm._group.create_task(later()))

    # --- what can be done ----------------------------------------------------------------------------------------

    def kill(self, fault: faults.Kill) -> Iterable[str]:
        """See the fault."""
        for name in fault.peers:
            if self._alive(name):
                self.swarm.kill(self.newest(name))
        return fault.peers

    def bulk_kill(self, fault: faults.BulkKill) -> Iterable[str]:
        """See the fault."""
        bases = dict.fromkeys(self._base.get(name, name) for name in self.swarm.peers)
        alive = sorted(name for name in bases if name.startswith(fault.among) and self._alive(name))
        return self.kill(faults.Kill(tuple(self._rng.sample(alive, fault.count))))

    def pause(self, fault: faults.Pause) -> Iterable[str]:
        """See the fault."""
        for name in fault.peers:
            if isinstance(self.swarm, SimSwarm):
                self.swarm.pause(self.newest(name))
            else:
                self.swarm.network.hold(self._endpoint(name).peer)
        self._after(fault.seconds, lambda: self.resume(faults.Resume(fault.peers)))
        return fault.peers

    def resume(self, fault: faults.Resume) -> Iterable[str]:
        """See the fault. A peer that was killed meanwhile stays dead."""
        for name in filter(self._alive, fault.peers):
            if isinstance(self.swarm, SimSwarm):
                self.swarm.resume(self.newest(name))
            else:
                self.swarm.network.release(self._endpoint(name).peer)
        return fault.peers

    def partition(self, fault: faults.Partition) -> Iterable[str]:
        """See the fault."""
        pairs = [(one, other) for one in self._ids(fault.peers) for other in self._ids(fault.others)]
        for one, other in pairs:
            self.swarm.network.cut(one, other)
            if not fault.one_way:
                self.swarm.network.cut(other, one)
        self._after(fault.seconds, lambda: [self.swarm.network.mend(*pair) for pair in pairs])
        return (*fault.peers, *fault.others)

    def heal(self, fault: faults.Heal) -> Iterable[str]:
        """See the fault."""
        self.swarm.network.heal()
        return ()

    def slow_link(self, fault: faults.SlowLink) -> Iterable[str]:
        """See the fault."""
        one, other = self._ids(fault.peers)
        self.swarm.network.slow(one, other, fault.shape)
        return fault.peers

    def slow_device(self, fault: faults.SlowDevice) -> Iterable[str]:
        """See the fault."""
        assert isinstance(self.swarm, SimSwarm)
        self.swarm.devices[self.newest(fault.peer)].slowness = fault.factor
        return (fault.peer,)

    def fill_disk(self, fault: faults.FillDisk) -> Iterable[str]:
        """See the fault."""
        self._disks.full.add(self.swarm.peers[self.newest(fault.peer)].settings.home)
        return (fault.peer,)

    def free_disk(self, fault: faults.FreeDisk) -> Iterable[str]:
        """See the fault."""
        self._disks.full.discard(self.swarm.peers[self.newest(fault.peer)].settings.home)
        return (fault.peer,)

    def corrupt_bytes(self, fault: faults.CorruptBytes) -> Iterable[str]:
        """See the fault."""
        one, other = self._ids(fault.peers)
        self.swarm.network.corrupt(one, other, fault.messages)
        return fault.peers

    def skew_clock(self, fault: faults.SkewClock) -> Iterable[str]:
        """See the fault."""
        assert isinstance(self.swarm, SimSwarm)
        self.swarm.clocks[self.newest(fault.peer)].skew_s = fault.offset_s
        self._endpoint(fault.peer).skew_s = fault.offset_s
        return (fault.peer,)

    def restart(self, fault: faults.Restart) -> Iterable[str]:
        """See the fault."""
        self.kill(faults.Kill((fault.peer,)))
        self._again(fault.peer, keep_disk=fault.keep_disk)
        return (fault.peer,)

    def twin(self, fault: faults.Twin) -> Iterable[str]:
        """See the fault. The twin has a disk of its own, a copy of the other's."""
        self._again(fault.peer, keep_disk=True, twin=True)
        return (fault.peer,)

    def joiner_storm(self, fault: faults.JoinerStorm) -> Iterable[str]:
        """See the fault."""
        names = []
        for _ in range(fault.count):
            self._joined += 1
            names.append(f"joiner-{self._joined}")
            self._join(names[-1], "stage", 5000 + self._joined)
        return ()

    # --- starting ------------------------------------------------------------------------------------------------

    def _again(self, base: str, *, keep_disk: bool, twin: bool = False) -> None:
        old = self.swarm.peers[self.newest(base)]
        starts = self._starts.setdefault(base, [base])
        name = f"{base}-again-{len(starts)}"
        starts.append(name)
        self._base[name] = base
        if keep_disk:
            _take_disk(old.settings.home, self.root / name, copy=twin)
        if twin:
            self.swarm.twins.add(old.endpoint.peer)
        key = "data" if old.settings.role == "trainer" else "stage"
        more = {key: getattr(old.settings.options, key)}
        self._join(name, old.settings.role, old.number, **more)

    def _join(self, name: str, role: str, number: int, **settings: Any) -> None:
        contact = next(
            (
                other
                for other, peer in self.swarm.peers.items()
                if self._base.get(other, other) != self._base.get(name, name)
                and self.swarm.network.find(peer.endpoint.peer) is peer.endpoint
                and peer.membership is not None
                and peer.endpoint.peer in peer.membership.roster
            ),
            "bootstrap",
        )
        work = self.swarm.join(name, role, number, contact=contact, may_fail=True, **settings)
        self._later.append(self.swarm._group.create_task(_drop(work)))


def _take_disk(old: Path, new: Path, *, copy: bool) -> None:
    """The same disk under another name, or (``copy``) another with the same on it. What tells of the life that ended
    stays where it was."""
    if copy:
        shutil.copytree(old, new, ignore=shutil.ignore_patterns("events.jsonl"))
        return
    old.rename(new)
    old.mkdir(mode=0o700)
    (new / "events.jsonl").rename(old / "events.jsonl")
    for file in new.glob("history*.jsonl"):
        shutil.copy(file, old)


async def _drop(work: Any) -> None:
    await work


_DOERS: Mapping[type[Fault], Callable[[MemoryWorld, Any], Iterable[str]]] = {
    faults.Kill: MemoryWorld.kill,
    faults.BulkKill: MemoryWorld.bulk_kill,
    faults.Pause: MemoryWorld.pause,
    faults.Resume: MemoryWorld.resume,
    faults.Partition: MemoryWorld.partition,
    faults.Heal: MemoryWorld.heal,
    faults.SlowLink: MemoryWorld.slow_link,
    faults.SlowDevice: MemoryWorld.slow_device,
    faults.FillDisk: MemoryWorld.fill_disk,
    faults.FreeDisk: MemoryWorld.free_disk,
    faults.CorruptBytes: MemoryWorld.corrupt_bytes,
    faults.SkewClock: MemoryWorld.skew_clock,
    faults.Restart: MemoryWorld.restart,
    faults.Twin: MemoryWorld.twin,
    faults.JoinerStorm: MemoryWorld.joiner_storm,
}
