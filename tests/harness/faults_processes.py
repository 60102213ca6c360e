"""Faults among real peers on loopback: signals, limits and proxies, without privileges.

    with by_hand(tmp_path) as hand, shaped() as links, ProcessWorld(hand, links) as world:
        world.start("bootstrap", "new", str(manifest))
        plan = FaultPlan(Strike("kill", On(Accumulated, peer="host-0"), Kill(("host-0",))), world=world)

A watcher thread reads what the peers write, so a fault strikes some 10 ms after its event. A peer's processes are
the one that was started and all its descendants, the daemon among them.
"""

from __future__ import annotations

import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.chaos import faults
from peers.chaos.faults import CannotInflict, Fault
from swarm.clock import SystemClock
from swarm.monitoring.reader import RawEvent, Recorded, decode_line
from tests.harness.by_hand import ByHand, Started
from tests.harness.faults_means import PipedHand, Slowed, forget_all_but_identity, signal_all
from tests.harness.processes import children_of
from tests.harness.shaping import ShapedLinks

LOOK_EVERY_S = 0.005
DAEMON = "p2pd"

Hear = Callable[[str, str, Mapping[str, Any]], None]


@dataclass(slots=True)
class RealPeer:
    """One peer of the world and all its starts. ``read`` is how far the newest one's output is read."""

    name: str
    home: Path
    arguments: tuple[str, ...]
    starts: list[Started] = field(default_factory=list)
    read: int = 0
    identity: str = ""

    @property
    def pid(self) -> int:
        """Of the newest start."""
        return self.starts[-1].process.pid

    @property
    def alive(self) -> bool:
        """Whether the newest start runs."""
        return self.starts[-1].process.poll() is None

    def pids(self) -> list[int]:
        """Everything of the newest start, the first process first."""
        return [self.pid, *(child.pid for child in children_of(self.pid))] if self.alive else []


class ProcessWorld:
    """Implements :class:`peers.chaos.plan.World`; a context manager, whose peers the given ByHand stops.

    ``links`` are needed for partitions, slow links and corrupted bytes: without them those faults are refused.
    """

    def __init__(self, hand: ByHand, links: ShapedLinks | None = None) -> None:
        self.root, self._hand, self._links = hand.home.parent, hand, links
        self.peers: dict[str, RealPeer] = {}
        self._options: dict[str, tuple[str, ...]] = {}
        self._hear: list[Hear] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="faults", daemon=True)
        self._slowed: dict[str, Slowed] = {}
        self._limits: dict[int, tuple[int, int]] = {}
        self._timers: list[threading.Timer] = []
        self._join: tuple[str, ...] = ()

    def __enter__(self) -> ProcessWorld:
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()
        for timer in self._timers:
            timer.cancel()
        for slowed in self._slowed.values():
            slowed.end()
        for peer in self.peers.values():
            signal_all(peer.pids(), signal.SIGCONT)

    def start(self, name: str, *arguments: str) -> Started:
        """Start ``swarm ARGUMENTS`` as this peer, in a home of its own, reached through its proxy where there are
        links. The arguments of the first ``join`` without ``--data`` are those of a storm's joiners."""
        with self._lock:
            peer = self.peers[name] = RealPeer(name, self.root / "homes" / name, arguments)
            peer.home.mkdir(parents=True, mode=0o700)
            if self._links is not None:
                self._options[name] = self._links.options(name)
            if arguments[0] == "join" and "--data" not in arguments and not self._join:
                self._join = arguments
            return self._begin(peer)

    def _begin(self, peer: RealPeer) -> Started:
        started = self._hand.start(*peer.arguments, *self._options.get(peer.name, ()), home=peer.home)
        peer.starts.append(started)
        peer.read = 0
        if self._links is not None:
            self._links.belongs(peer.name, peer.pid)
        return started

    # --- the seam ------------------------------------------------------------------------------------------------

    def wall(self) -> float:
        """See :class:`~peers.chaos.plan.World`."""
        return SystemClock().wall()

    def identity(self, name: str) -> str:
        """See :class:`~peers.chaos.plan.World`; "" for a peer that has not said anything yet."""
        return self.peers[name].identity

    def listen(self, hear: Hear) -> None:
        """See :class:`~peers.chaos.plan.World`. What was written before is told too."""
        with self._lock:
            self._hear.append(hear)

    def check(self, fault: Fault) -> None:
        """See :class:`~peers.chaos.plan.World`. Peers may still be to be started: names are not checked."""
        kind = type(fault)
        if kind is faults.SkewClock:
            raise CannotInflict("a process's wall clock is the machine's: plan skew_clock in a SimSwarm")
        if kind in (faults.Partition, faults.Heal, faults.SlowLink, faults.CorruptBytes) and self._links is None:
            raise CannotInflict(f"{fault.name} needs proxies: ProcessWorld(hand, links) with links from shaped()")
        if kind is faults.FillDisk and not isinstance(self._hand, PipedHand):
            raise CannotInflict("fill_disk would take the peer's voice as well: start it by a PipedHand")
        if kind not in _DOERS:
            raise CannotInflict(f"this world has no means for {fault.name}")

    def inflict(self, fault: Fault) -> Iterable[str]:
        """See :class:`~peers.chaos.plan.World`."""
        with self._lock:
            return tuple(_DOERS[type(fault)](self, fault))

    # --- watching ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with self._lock:
                for peer in list(self.peers.values()):
                    self._look(peer)

    def _look(self, peer: RealPeer) -> None:
        if not self._hear:
            return
        with peer.starts[-1].output.open("rb") as file:
            file.seek(peer.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        peer.read += len(whole)
        for line in whole.splitlines():
            if line.startswith(b"{"):
                self._tell(peer, decode_line(line))

    def _tell(self, peer: RealPeer, recorded: Recorded) -> None:
        peer.identity = recorded.peer or peer.identity
        event = recorded.event
        fields = event.fields if isinstance(event, RawEvent) else event.fields()
        for hear in self._hear:
            hear(peer.name, event.kind, fields)

    def _after(self, seconds: float | None, act: Callable[[], object]) -> None:
        if seconds is not None:
            timer = threading.Timer(seconds, act)
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    # --- what can be done ----------------------------------------------------------------------------------------

    def kill(self, fault: faults.Kill) -> Iterable[str]:
        """See the fault."""
        alive = [self.peers[name] for name in fault.peers if self.peers[name].alive]
        signal_all([peer.pid for peer in alive], signal.SIGSTOP)  # so that it starts nothing while we look
        everything = [pid for peer in alive for pid in peer.pids()]
        signal_all(everything, signal.SIGKILL)
        for name in fault.peers:
            self.peers[name].starts[-1].process.wait()
        return fault.peers

    def bulk_kill(self, fault: faults.BulkKill) -> Iterable[str]:
        """See the fault. The first in the order of names: real time has no seed."""
        alive = sorted(name for name, peer in self.peers.items() if name.startswith(fault.among) and peer.alive)
        return self.kill(faults.Kill(tuple(alive[: fault.count])))

    def kill_daemon(self, fault: faults.KillDaemon) -> Iterable[str]:
        """See the fault."""
        daemons = [child.pid for child in children_of(self.peers[fault.peer].pid) if DAEMON in child.command]
        if not daemons:
            raise CannotInflict(f"{fault.peer} has no daemon now")
        signal_all(daemons, signal.SIGKILL)
        return (fault.peer,)

    def pause(self, fault: faults.Pause) -> Iterable[str]:
        """See the fault."""
        signal_all([pid for name in fault.peers for pid in self.peers[name].pids()], signal.SIGSTOP)
        self._after(fault.seconds, lambda: self.inflict(faults.Resume(fault.peers)))
        return fault.peers

    def resume(self, fault: faults.Resume) -> Iterable[str]:
        """See the fault."""
        signal_all([pid for name in fault.peers for pid in self.peers[name].pids()], signal.SIGCONT)
        return fault.peers

    def partition(self, fault: faults.Partition) -> Iterable[str]:
        """See the fault."""
        assert self._links is not None
        self._links.cut(fault.peers, fault.others, both=not fault.one_way)
        self._after(fault.seconds, lambda: self.inflict(faults.Heal()))
        return (*fault.peers, *fault.others)

    def heal(self, fault: faults.Heal) -> Iterable[str]:
        """See the fault."""
        assert self._links is not None
        self._links.heal()
        return ()

    def slow_link(self, fault: faults.SlowLink) -> Iterable[str]:
        """See the fault."""
        assert self._links is not None
        self._links.slow(*fault.peers, fault.shape)
        return fault.peers

    def corrupt_bytes(self, fault: faults.CorruptBytes) -> Iterable[str]:
        """See the fault. Streams are authenticated: what shows is a connection that breaks."""
        assert self._links is not None
        self._links.spoil(*fault.peers, fault.messages)
        return fault.peers

    def slow_device(self, fault: faults.SlowDevice) -> Iterable[str]:
        """See the fault. The whole first process gets that share of a processor, its network loop too."""
        before = self._slowed.pop(fault.peer, None)
        if before is not None:
            before.end()
        if fault.factor > 1.0:
            self._slowed[fault.peer] = Slowed(self.peers[fault.peer].pid, fault.factor)
        return (fault.peer,)

    def fill_disk(self, fault: faults.FillDisk) -> Iterable[str]:
        """See the fault. No file of the peer can grow (EFBIG where a full disk says ENOSPC): both are OSErrors of the
        write."""
        pid = self.peers[fault.peer].pid
        self._limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, self._limits[pid][1]))
        return (fault.peer,)

    def free_disk(self, fault: faults.FreeDisk) -> Iterable[str]:
        """See the fault."""
        pid = self.peers[fault.peer].pid
        if (limit := self._limits.pop(pid, None)) is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        return (fault.peer,)

    def restart(self, fault: faults.Restart) -> Iterable[str]:
        """See the fault."""
        peer = self.peers[fault.peer]
        self.kill(faults.Kill((fault.peer,)))
        if not fault.keep_disk:
            forget_all_but_identity(peer.home)
        self._begin(peer)
        return (fault.peer,)

    def twin(self, fault: faults.Twin) -> Iterable[str]:
        """See the fault: a second peer ``<name>-twin``, with a copy of the first one's key."""
        peer = self.peers[fault.peer]
        other = RealPeer(f"{peer.name}-twin", self.root / "homes" / f"{peer.name}-twin", peer.arguments)
        for key in peer.home.glob("*/identity.key"):
            copy = other.home / key.relative_to(peer.home)
            copy.parent.mkdir(parents=True, mode=0o700)
            shutil.copy(key, copy)
        self.peers[other.name] = other
        self._begin(other)
        return (fault.peer,)

    def joiner_storm(self, fault: faults.JoinerStorm) -> Iterable[str]:
        """See the fault."""
        if not self._join:
            raise CannotInflict("nobody has joined yet: nothing says how joiners are started")
        first = sum(name.startswith("joiner-") for name in self.peers) + 1
        names = [f"joiner-{number}" for number in range(first, first + fault.count)]
        for name in names:
            self.start(name, *self._join)
        return names


_DOERS: Mapping[type[Fault], Callable[[ProcessWorld, Any], Iterable[str]]] = {
    faults.Kill: ProcessWorld.kill,
    faults.BulkKill: ProcessWorld.bulk_kill,
    faults.KillDaemon: ProcessWorld.kill_daemon,
    faults.Pause: ProcessWorld.pause,
    faults.Resume: ProcessWorld.resume,
    faults.Partition: ProcessWorld.partition,
    faults.Heal: ProcessWorld.heal,
    faults.SlowLink: ProcessWorld.slow_link,
    faults.CorruptBytes: ProcessWorld.corrupt_bytes,
    faults.SlowDevice: ProcessWorld.slow_device,
    faults.FillDisk: ProcessWorld.fill_disk,
    faults.FreeDisk: ProcessWorld.free_disk,
    faults.Restart: ProcessWorld.restart,
    faults.Twin: ProcessWorld.twin,
    faults.JoinerStorm: ProcessWorld.joiner_storm,
}
