"""Faults as data: what can go wrong on purpose, and with which exit codes a peer may end for it.

When they strike is said by :mod:`peers.chaos.plan`, what each does by the world that it is done in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from peers.chaos.strangers.findings import Attack
from peers.exit_codes import EXIT_DRAINED
from swarm.sim.links import LinkShape


class CannotInflict(Exception):
    """The world has no means for a fault; the message says which world, which fault, why, and what to use."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Base of what can go wrong. Peers are named as the world names them."""

    @property
    def name(self) -> str:
        """Its name in ``faults.jsonl``, which the checkers of detection know."""
        return NAMES[type(self)]

    @property
    def victims(self) -> tuple[str, ...]:
        """The peers that it hits, as far as they are known before it strikes."""
        one = getattr(self, "peer", None)
        return tuple(getattr(self, "peers", ())) if one is None else (one,)


@dataclass(frozen=True, slots=True)
class Kill(Fault):
    """kill -9 of these peers, each with all it started, at the same moment."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BulkKill(Fault):
    """Kill ``count`` peers whose names begin with ``among``, drawn from those alive by the plan's seed."""

    count: int
    among: str = "host-"


@dataclass(frozen=True, slots=True)
class KillDaemon(Fault):
    """kill -9 of a peer's libp2p daemon alone."""

    peer: str


@dataclass(frozen=True, slots=True)
class Pause(Fault):
    """SIGSTOP; SIGCONT after ``seconds`` of the world's clock, or by :class:`Resume`."""

    peers: tuple[str, ...]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Resume(Fault):
    """SIGCONT."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Partition(Fault):
    """Nothing passes between two groups (``one_way``: from the first to the other), for ``seconds`` or until Heal."""

    peers: tuple[str, ...]
    others: tuple[str, ...]
    one_way: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Heal(Fault):
    """All links are as described again."""


@dataclass(frozen=True, slots=True)
class SlowLink(Fault):
    """The link between two peers has another shape from now on, in both directions."""

    peers: tuple[str, str]
    shape: LinkShape


@dataclass(frozen=True, slots=True)
class SlowDevice(Fault):
    """A peer's device takes ``factor`` times as long from now on; 1 mends it."""

    peer: str
    factor: float


@dataclass(frozen=True, slots=True)
class FillDisk(Fault):
    """Nothing a peer wants to keep fits on its disk any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class FreeDisk(Fault):
    """There is room again."""

    peer: str


@dataclass(frozen=True, slots=True)
class CorruptBytes(Fault):
    """The next ``messages`` payloads from one peer to the other arrive with a bit flipped."""

    peers: tuple[str, str]
    messages: int = 1


@dataclass(frozen=True, slots=True)
class SkewClock(Fault):
    """A peer's wall clock jumps to ``offset_s`` off."""

    peer: str
    offset_s: float


@dataclass(frozen=True, slots=True)
class Restart(Fault):
    """Kill a peer where it still lives, and start it again with its identity; with or without what was on its disk.
    With a ``lie`` (``KIND:RATE``) it is a program from then on that tells it: :mod:`peers.chaos.liars`."""

    peer: str
    keep_disk: bool = True
    lie: str = ""

    @property
    def name(self) -> str:
        """See :class:`Fault`."""
        return "lie" if self.lie else NAMES[Restart]


@dataclass(frozen=True, slots=True)
class Twin(Fault):
    """Start a second peer with the identity of one that goes on."""

    peer: str


@dataclass(frozen=True, slots=True)
class JoinerStorm(Fault):
    """``count`` stage hosts join at once."""

    count: int


@dataclass(frozen=True, slots=True)
class Stop(Fault):
    """Notice: SIGTERM; what still runs after ``grace_s`` seconds is killed. Returns when the notice is given."""

    peers: tuple[str, ...]
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Disconnect(Fault):
    """These peers are on a network no more: "wan", the one that all regions share, a region's by its name, "" for all
    of theirs. They go on running. For ``seconds`` or until Reconnect."""

    peers: tuple[str, ...]
    network: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reconnect(Fault):
    """They are on it again, at the same address."""

    peers: tuple[str, ...]
    network: str = ""


@dataclass(frozen=True, slots=True)
class SlowLinks(Fault):
    """Every link between a peer of one group and one of the other has another shape, in both directions: late, narrow
    or lossy. For ``seconds`` or until Heal."""

    peers: tuple[str, ...]
    others: tuple[str, ...]
    shape: LinkShape
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LimitCpu(Fault):
    """A peer, with all it started, may use so many processors from now on; 0 lifts the limit."""

    peer: str
    cpus: float


@dataclass(frozen=True, slots=True)
class LimitMemory(Fault):
    """A peer, with all it started, may hold so much memory from now on: below what it holds, the kernel kills it."""

    peer: str
    mib: int


@dataclass(frozen=True, slots=True)
class Upgrade(Fault):
    """Tell a peer to leave in order (kill it after ``grace_s``) and start it again with the same home; among containers
    from another image, where the scenario names one."""

    peer: str
    grace_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Start(Fault):
    """Start a peer of the scenario that was not started at its beginning."""

    peer: str


@dataclass(frozen=True, slots=True)
class Strangers(Fault):
    """``count`` identities that have no credential and know an address, or the run's id as well, attack these peers
    for ``seconds``, as :mod:`peers.chaos.strangers` has it. The process that they are in is hit by nothing."""

    peers: tuple[str, ...]
    attacks: tuple[Attack, ...]
    seconds: float
    count: int = 5
    knows: Literal["address", "run"] = "address"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Moment(Fault):
    """Nothing goes wrong: it names a moment of the run, from which other strikes are counted. No world is asked."""


NAMES: Mapping[type[Fault], str] = {
    Kill: "kill",
    BulkKill: "kill",
    KillDaemon: "kill_daemon",
    Pause: "pause",
    Resume: "resume",
    Partition: "partition",
    Heal: "heal",
    SlowLink: "slow_link",
    SlowDevice: "slow_device",
    FillDisk: "fill_disk",
    FreeDisk: "free_disk",
    CorruptBytes: "corrupt_bytes",
    SkewClock: "skew_clock",
    Restart: "restart",
    Twin: "twin",
    JoinerStorm: "joiner_storm",
    Stop: "stop",
    Disconnect: "disconnect",
    Reconnect: "reconnect",
    SlowLinks: "slow_links",
    LimitCpu: "limit_cpu",
    LimitMemory: "limit_memory",
    Upgrade: "upgrade",
    Start: "start",
    Strangers: "strangers",
    Moment: "moment",
}

KILLED = (-9, 137)
"""How a process ends, or a container, that the kernel has killed."""
LEFT = (EXIT_DRAINED, -15, 143)
"""How one does that was told to leave: once it took part, or before it was asked who it is."""
CODES: Mapping[type[Fault], tuple[int, ...]] = {
    Kill: KILLED,
    BulkKill: KILLED,
    Restart: KILLED,
    LimitMemory: KILLED,
    Stop: (*LEFT, *KILLED),
    Upgrade: (*LEFT, *KILLED),  # the world says what is wrong with the others
}
"""After these faults; those of many peers are inflicted by way of these."""
