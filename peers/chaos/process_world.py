"""World of processes: what each fault does to them, and which faults are refused, with what to use instead.

with ProcessWorld(root) as world:
    world.start(PeerSpec(name="bootstrap", role="bootstrap", arguments=("new", "{run}"), files={"run": manifest}))
    plan = FaultPlan(Strike("kill", On("Accumulated", peer="host-0"), Kill(("host-0",))), world=world)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from peers.chaos import faults, means
from peers.chaos.cast import twin_of
from peers.chaos.common_faults import COMMON
from peers.chaos.faults import CannotInflict, Fault
from peers.chaos.processes import ProcessBase
from peers.chaos.shaping import APART

DAEMON = "p2pd"
LINKED = (
    faults.Partition,
    faults.Heal,
    faults.SlowLink,
    faults.SlowLinks,
    faults.CorruptBytes,
    faults.Disconnect,
    faults.Reconnect,
)
"""What is done with proxies."""


def _kill(world: ProcessBase, fault: faults.Kill) -> Iterable[str]:
    names = world.living(fault)
    alive = [world.peers[name] for name in names]
    means.signal_all([peer.pid for peer in alive], signal.SIGSTOP)  # all at the same moment
    means.signal_all([pid for peer in alive for pid in peer.pids()], signal.SIGKILL)
    for peer in alive:
        world.kill(peer)
    return names


def _kill_daemon(world: ProcessBase, fault: faults.KillDaemon) -> Iterable[str]:
    world.living(fault)
    daemons = [one.pid for one in means.family(world.peers[fault.peer].pid)[1:] if DAEMON in means.command_of(one)]
    if not daemons:
        raise CannotInflict(f"{fault.peer} has no daemon now")
    means.signal_all(daemons, signal.SIGKILL)
    return (fault.peer,)


def _pause(world: ProcessBase, fault: faults.Pause) -> Iterable[str]:
    names = world.living(fault)
    for name in names:
        world.pause(world.peers[name])
    world.lasting(world.pauses, names, fault.seconds, partial(_let_go, world))
    return names


def _resume(world: ProcessBase, fault: faults.Resume) -> Iterable[str]:
    world.pauses.forget(fault.peers)
    _let_go(world, fault.peers)
    return fault.peers


def _let_go(world: ProcessBase, names: Iterable[str]) -> None:
    for name in names:
        world.resume(world.peers[name])


def _stop(world: ProcessBase, fault: faults.Stop) -> Iterable[str]:
    names = world.living(fault)
    told = [(world.peers[name], world.peers[name].starts[-1]) for name in names]
    means.signal_all([peer.pid for peer, _ in told], signal.SIGTERM)

    def end() -> None:
        with world.playing():  # nobody is started again between the look and the kill
            for peer, start in told:
                if peer.starts[-1] is start:
                    world.kill(peer)

    world.later.after(fault.grace_s, end)
    return names


def _partition(world: ProcessBase, fault: faults.Partition) -> Iterable[str]:
    if world.links is not None:
        cause = object()
        world.links.cut(fault.peers, fault.others, both=not fault.one_way, cause=cause)
        world.later.after(fault.seconds, partial(world.links.heal, only=cause))
    return (*fault.peers, *fault.others)


def _heal(world: ProcessBase, fault: faults.Heal) -> Iterable[str]:
    if world.links is not None:
        world.links.heal(but=APART)  # who is off a network stays so until reconnect
    return ()


def _slow_link(world: ProcessBase, fault: faults.SlowLink) -> Iterable[str]:
    if world.links is not None:
        world.links.slow(*fault.peers, fault.shape)
    return fault.peers


def _slow_links(world: ProcessBase, fault: faults.SlowLinks) -> Iterable[str]:
    if world.links is not None:
        cause = object()
        for one, other in product(fault.peers, fault.others):
            if one != other:
                world.links.slow(one, other, fault.shape, cause=cause)
        world.later.after(fault.seconds, partial(world.links.heal, only=cause))
    return tuple(dict.fromkeys((*fault.peers, *fault.others)))


def _corrupt_bytes(world: ProcessBase, fault: faults.CorruptBytes) -> Iterable[str]:
    """Streams are authenticated: what shows is a connection that breaks."""
    if world.links is not None:
        world.links.corrupt(*fault.peers, fault.messages)
        world.corrupted.add(fault.peers)
    return fault.peers


def _limit_cpu(world: ProcessBase, fault: faults.LimitCpu | faults.SlowDevice) -> Iterable[str]:
    """The whole first process gets that share of a processor, its network loop too. Its later starts have no more: the
    machine has become a slower one."""
    world.living(fault)
    peer, share = world.peers[fault.peer], world.specs.share(fault)
    world.slow(peer, 1 / share if share is not None and share < 1 else 1.0)
    peer.spec = replace(peer.spec, cpus=share)
    return (fault.peer,)


def _fill_disk(world: ProcessBase, fault: faults.FillDisk) -> Iterable[str]:
    """No file of the peer can grow (EFBIG where a full disk says ENOSPC): both are OSErrors of the write. A start that
    finds its disk full has the same limit."""
    world.living(fault)
    pid = world.peers[fault.peer].pid
    before = means.growth_of_files(pid)
    _, hard = world.limits.setdefault(fault.peer, before)  # of a disk that is full already the first one's counts
    means.let_files_grow(pid, (0, hard))
    return (fault.peer,)


def _free_disk(world: ProcessBase, fault: faults.FreeDisk) -> Iterable[str]:
    limit = world.limits.pop(fault.peer, None)
    if limit is not None and world.alive(fault.peer):
        means.let_files_grow(world.peers[fault.peer].pid, limit)
    return (fault.peer,)


def _skew_clock(world: ProcessBase, fault: faults.SkewClock) -> Iterable[str]:
    """The wall clock that its processes see, but for the daemon's, whose program calls no library."""
    if world.clocks is None:
        raise CannotInflict(means.NO_FAKETIME)
    world.living(fault)
    (world.clocks / fault.peer).write_text(f"{fault.offset_s:+f}\n")
    return (fault.peer,)


def _restart(world: ProcessBase, fault: faults.Restart) -> Iterable[str]:
    peer = world.peers[fault.peer]
    world.kill(peer)
    if not fault.keep_disk:
        means.lose_disk(peer.home, world.root / "lost" / f"{peer.name}-{len(peer.starts)}")
        world.limits.pop(peer.name, None)  # the empty one has room
    world.begin(peer)
    return (fault.peer,)


def _upgrade(world: ProcessBase, fault: faults.Upgrade) -> Iterable[str]:
    """There is one version on this machine: what is left of it is to leave in order, and to come back."""
    world.living(fault)
    peer = world.peers[fault.peer]
    start = peer.starts[-1]
    means.signal_all([peer.pid], signal.SIGTERM)
    waits = iter(range(int(fault.grace_s / _LOOK_S)))

    def look() -> None:
        with world.playing():
            if peer.starts[-1] is not start:
                return
            if peer.alive and next(waits, None) is not None:
                world.later.after(_LOOK_S, look)
                return
            world.check_left(fault.peer, start.process.poll())
            _restart(world, faults.Restart(fault.peer))

    world.later.after(_LOOK_S, look)
    return (fault.peer,)


def _twin(world: ProcessBase, fault: faults.Twin) -> Iterable[str]:
    """A second peer ``<name>-twin``, with a copy of the first one's key."""
    peer = world.peers[fault.peer]
    spec = replace(peer.spec, name=twin_of(peer.name))
    means.copy_keys(peer.home, world.root / "homes" / spec.name)
    world.start(spec)
    return (fault.peer,)


_LOOK_S = 0.1

DOERS: Mapping[type[Fault], Callable[[Any, Any], Iterable[str]]] = {
    **COMMON,
    faults.Kill: _kill,
    faults.KillDaemon: _kill_daemon,
    faults.Pause: _pause,
    faults.Resume: _resume,
    faults.Stop: _stop,
    faults.Partition: _partition,
    faults.Heal: _heal,
    faults.SlowLink: _slow_link,
    faults.SlowLinks: _slow_links,
    faults.CorruptBytes: _corrupt_bytes,
    faults.SlowDevice: _limit_cpu,
    faults.LimitCpu: _limit_cpu,
    faults.FillDisk: _fill_disk,
    faults.FreeDisk: _free_disk,
    faults.SkewClock: _skew_clock,
    faults.Restart: _restart,
    faults.Upgrade: _upgrade,
    faults.Twin: _twin,
}


class ProcessWorld(ProcessBase):
    """Implements :class:`peers.chaos.world.PlayWorld`: processes, and the faults that can be done to them."""

    def check(self, fault: Fault) -> None:
        """See :class:`~peers.chaos.plan.World`. Raises CannotInflict, with what to use instead, for a fault that this
        world has no means for. Peers may still be to be started: names are not checked."""
        if isinstance(fault, faults.SkewClock) and (self.clocks is None or means.faketime_library() is None):
            raise CannotInflict(means.NO_FAKETIME)
        if isinstance(fault, LINKED) and self.links is None:
            raise CannotInflict(f"{fault.name} needs proxies: a ProcessWorld with links from shaped()")
        if isinstance(fault, faults.LimitCpu) and 1 <= fault.cpus < (os.cpu_count() or 1):
            raise CannotInflict("limit_cpu among processes is a share of one processor, below 1: or --on containers")
        if type(fault) not in DOERS:
            raise CannotInflict(f"processes have no means for {fault.name}: swarm chaos --on containers")

    def _strike(self, fault: Fault) -> Iterable[str]:
        return DOERS[type(fault)](self, fault)
