"""World of containers: what each fault does to them, and which faults are refused, with what to use instead.

with ContainerWorld(root) as world:
    world.start(PeerSpec(name="bootstrap", role="bootstrap", arguments=("new", "{run}"), files={"run": manifest}))
    plan = FaultPlan(Strike("kill", On("Accumulated", peer="host-0"), Kill(("host-0",))), world=world)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from peers.chaos import container_start, faults
from peers.chaos.common_faults import COMMON
from peers.chaos.container_networks import NO_DELAY
from peers.chaos.container_start import Contained
from peers.chaos.containers import ContainerBase
from peers.chaos.engine import EngineError
from peers.chaos.faults import CannotInflict, Fault
from swarm.clock import SystemClock

DAEMON = "p2pd"
FREEZE_TRIES, FREEZE_AGAIN_S = 10, 0.05
_HOG_S = 20.0
_HOG = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(pid) != os.getpid():
            open(f"/proc/{pid}/oom_score_adj", "w").write("1000")
    except OSError:
        pass
kept = [bytes(range(256)) * 4096 for _ in range(int(sys.argv[1]))]
"""
_NO_MEANS: Mapping[type[Fault], str] = {
    faults.CorruptBytes: "slow_links with loss, or swarm chaos --on processes",
    faults.Twin: "swarm chaos --on processes",
}


def _kill(world: ContainerBase, fault: faults.Kill) -> Iterable[str]:
    names = world.living(fault)
    world.kill([world.peers[name] for name in names])
    return names


def _kill_daemon(world: ContainerBase, fault: faults.KillDaemon) -> Iterable[str]:
    lines = world.engine.call("top", _running(world, fault.peer).container, "-eo", "pid,comm").splitlines()
    daemons = [line.split()[0] for line in lines[1:] if DAEMON in line]
    if not daemons:
        raise CannotInflict(f"{fault.peer} has no daemon now")
    world.nemesis.run([f"kill -9 {' '.join(daemons)}"])
    return (fault.peer,)


def _pause(world: ContainerBase, fault: faults.Pause) -> Iterable[str]:
    names = world.living(fault)
    _freeze(world, names)
    world.lasting(world.pauses, names, fault.seconds, world.resume)
    return names


def _freeze(world: ContainerBase, names: Iterable[str]) -> None:
    """A kernel (cgroup v1) refuses now and then to freeze who has used up his share of a processor, for which he must
    run a little. An engine refuses who is paused already. Raises EngineError."""
    left = FREEZE_TRIES
    while fresh := [world.peers[name].container for name in names if not world.paused(name)]:
        left -= 1
        try:
            world.engine.call("pause", *fresh)
        except EngineError as error:
            if not left or "freeze" not in str(error):
                raise
            world.over.wait(FREEZE_AGAIN_S)
        else:
            return


def _resume(world: ContainerBase, fault: faults.Resume) -> Iterable[str]:
    world.pauses.forget(fault.peers)
    world.resume(fault.peers)
    return fault.peers


def _stop(world: ContainerBase, fault: faults.Stop) -> Iterable[str]:
    names = world.living(fault)
    told = {name: world.peers[name].container for name in names}
    world.engine.call("kill", "--signal", "TERM", *told.values())

    def end() -> None:
        with world.playing():  # nobody is started again between the look and the kill
            world.kill([peer for name, was in told.items() if (peer := world.peers[name]).container == was])

    world.later.after(fault.grace_s, end)
    return names


def _partition(world: ContainerBase, fault: faults.Partition) -> Iterable[str]:
    cause = object()
    world.networks.part(fault.peers, fault.others, both=not fault.one_way, cause=cause)
    world.later.after(fault.seconds, partial(_mend, world, cause))
    return (*fault.peers, *fault.others)


def _mend(world: ContainerBase, cause: object) -> None:
    with world.playing():
        world.networks.mend(cause)


def _heal(world: ContainerBase, fault: faults.Heal) -> Iterable[str]:
    world.networks.mend()
    return ()


def _slow_link(world: ContainerBase, fault: faults.SlowLink) -> Iterable[str]:
    world.networks.shape(fault.peers[:1], fault.peers[1:], fault.shape)
    return fault.peers


def _slow_links(world: ContainerBase, fault: faults.SlowLinks) -> Iterable[str]:
    cause = object()
    world.networks.shape(fault.peers, fault.others, fault.shape, cause=cause)
    world.later.after(fault.seconds, partial(_mend, world, cause))
    return tuple(dict.fromkeys((*fault.peers, *fault.others)))


def _limit_cpu(world: ContainerBase, fault: faults.LimitCpu | faults.SlowDevice) -> Iterable[str]:
    """The whole container gets that share of the processors. Its later starts have no more: the machine has become a
    slower one."""
    peer, share = _running(world, fault.peer), world.specs.share(fault)
    quota = -1 if share is None else container_start.quota_us(share)
    period = str(container_start.PERIOD_US)
    world.engine.call("update", "--cpu-period", period, "--cpu-quota", str(quota), peer.container)
    peer.spec = replace(peer.spec, cpus=share)
    return (fault.peer,)


def _limit_memory(world: ContainerBase, fault: faults.LimitMemory) -> Iterable[str]:
    """Kernels refuse (cgroup v1) or defer a limit below what is held: then it is what is held now. Something in the
    container asks for more at once, and the kernel kills the peer, as it would at its own next request."""
    peer = _running(world, fault.peer)
    held = int(world.engine.call("exec", peer.container, "sh", "-c", _USAGE))
    for mib in (fault.mib, *((held >> 20) + extra for extra in (1, 16, 64))):
        try:
            world.engine.call("update", "--memory", f"{mib}m", "--memory-swap", f"{mib}m", peer.container)
            break
        except EngineError:
            if mib > (held >> 20) + 32:
                raise
    # As much as the whole limit: a part of what is held may be files that were read, which the kernel just lets go.
    world.beside(partial(_hog, world, peer, mib + 32))
    return (fault.peer,)


_USAGE = "cat /sys/fs/cgroup/memory/memory.usage_in_bytes /sys/fs/cgroup/memory.current 2>/dev/null | head -n 1"


def _hog(world: ContainerBase, peer: Contained, mib: int) -> None:
    """Ask for so much in a peer's container, the peer being the first to be killed for it."""
    try:
        world.engine.call(
            "exec", "--env", "LD_PRELOAD=", peer.container, "python3", "-c", _HOG, str(mib), timeout_s=_HOG_S
        )
    except EngineError:
        return  # its container is gone: that is what it was for


def _fill_disk(world: ContainerBase, fault: faults.FillDisk) -> Iterable[str]:
    peer = _running(world, fault.peer)
    if peer.spec.disk_mib is None:
        raise CannotInflict(f"fill_disk: {fault.peer} has the machine's disk; give it one with a limit of disk_mib")
    fill = f"cat /dev/zero >{container_start.HOME}/{container_start.FILLER} 2>/dev/null || true"
    world.engine.call("exec", container_start.holder(world, peer), "sh", "-c", fill)
    return (fault.peer,)


def _free_disk(world: ContainerBase, fault: faults.FreeDisk) -> Iterable[str]:
    filler = f"{container_start.HOME}/{container_start.FILLER}"
    world.engine.call("exec", container_start.holder(world, world.peers[fault.peer]), "rm", "-f", filler)
    return (fault.peer,)


def _skew_clock(world: ContainerBase, fault: faults.SkewClock) -> tuple[str, ...]:
    """Set the wall clock that a peer's processes see, in its later starts as well, but for the daemon's, whose program
    calls no library. Raises EngineError, and CannotInflict where it has no effect, or none that could be seen: of a
    peer that does not run or is paused."""
    if fault.peer not in world.skewed:
        raise CannotInflict(f"skew_clock: {fault.peer} was started without libfaketime; check() it before")
    world.living(fault)
    if world.paused(fault.peer):
        raise CannotInflict(f"skew_clock: {fault.peer} is paused, and nobody could see its clock")
    (world.root / "clocks" / fault.peer).write_text(f"{fault.offset_s:+f}\n")
    _check_clock(world, fault)
    return (fault.peer,)


def _check_clock(world: ContainerBase, fault: faults.SkewClock) -> None:
    """Programs pass over a library that was made for others: the clock must be nearer to what it was set to than to
    ours, but for the second that it does not show and the time that it takes to look."""
    clock = SystemClock()
    before = clock.wall()
    shown = float(world.engine.call("exec", world.peers[fault.peer].container, "date", "+%s"))
    off = max(before + fault.offset_s - shown, shown - clock.wall() - fault.offset_s)
    if off > 1.0 + abs(fault.offset_s) / 2:
        raise CannotInflict(
            f"skew_clock: the clock of {fault.peer} was set {fault.offset_s:+g} s off and is {shown - before:+.0f} s: "
            f"libfaketime of {world.nemesis.image} does not fit its image; make both from one base"
        )


def _restart(world: ContainerBase, fault: faults.Restart) -> Iterable[str]:
    peer = world.peers[fault.peer]
    world.kill([peer])
    if not fault.keep_disk:
        container_start.lose_disk(world, peer)
    world.begin(peer)
    return (fault.peer,)


def _upgrade(world: ContainerBase, fault: faults.Upgrade) -> Iterable[str]:
    peer = _running(world, fault.peer)
    was = peer.container
    world.engine.call("kill", "--signal", "TERM", was)

    def come_back() -> None:
        world.watcher.wait([was], fault.grace_s)
        with world.playing():
            if peer.container == was:
                world.check_left(peer.name, world.exit_code(peer.name))
                world.kill([peer])
                peer.image = world.upgrade
                world.begin(peer)

    world.beside(come_back)
    return (fault.peer,)


def _running(world: ContainerBase, name: str) -> Contained:
    if not world.alive(name):
        raise CannotInflict(f"{name} does not run now")
    return world.peers[name]


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
    faults.SlowDevice: _limit_cpu,
    faults.LimitCpu: _limit_cpu,
    faults.LimitMemory: _limit_memory,
    faults.FillDisk: _fill_disk,
    faults.FreeDisk: _free_disk,
    faults.SkewClock: _skew_clock,
    faults.Restart: _restart,
    faults.Upgrade: _upgrade,
}


class ContainerWorld(ContainerBase):
    """Implements :class:`peers.chaos.world.PlayWorld`: containers, and the faults that can be done to them."""

    def check(self, fault: Fault) -> None:
        """See :class:`~peers.chaos.plan.World`. Raises CannotInflict, with what to use instead, for a fault that this
        world has no means for. Notes who is to have its clock set, which needs a library from the start on."""
        if isinstance(fault, faults.SkewClock):
            if fault.peer in self.peers and fault.peer not in self.skewed:
                raise CannotInflict(
                    f"skew_clock: {fault.peer} is already started without libfaketime; check() it before"
                )
            self.skewed.add(fault.peer)
        if isinstance(fault, faults.LimitMemory) and fault.mib < 6:
            raise CannotInflict("limit_memory: engines take 6 MiB and more")
        shapes = [fault.shape] if isinstance(fault, faults.SlowLink | faults.SlowLinks) else []
        if any(shape.latency_s for shape in shapes) and not self.networks.has_delay():
            raise CannotInflict(f"{fault.name}: {NO_DELAY}")
        if type(fault) not in DOERS:
            instead = _NO_MEANS.get(type(fault), "swarm chaos --on processes")
            raise CannotInflict(f"containers have no means for {fault.name}: {instead}")

    def _strike(self, fault: Fault) -> Iterable[str]:
        """Raises EngineError too."""
        return DOERS[type(fault)](self, fault)
