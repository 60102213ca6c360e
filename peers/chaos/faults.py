"""What can go wrong on purpose, as data: see :mod:`peers.chaos.plan` for when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.sim.links import LinkShape


class CannotInflict(Exception):
    """The world has no means for a fault; the message says which world, which fault, why, and what to use."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Base of what can go wrong. Peers are named as the world names them."""

    @property
    def name(self) -> str:
        """How it is called in ``faults.jsonl``: what the checkers of detection know."""
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
    """A peer's wall clock jumps to ``seconds`` off."""

    peer: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Restart(Fault):
    """Kill a peer where it still lives, and start it again with its identity; with or without what was on its disk."""

    peer: str
    keep_disk: bool = True


@dataclass(frozen=True, slots=True)
class Twin(Fault):
    """Start a second peer with the identity of one that goes on."""

    peer: str


@dataclass(frozen=True, slots=True)
class JoinerStorm(Fault):
    """``count`` stage hosts join at once."""

    count: int


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
}
