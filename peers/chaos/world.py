"""World that a scenario is played in: what a peer is started with, and the protocol of processes and containers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from peers.chaos.plan import World
from swarm.clock import SystemClock

Role = Literal["bootstrap", "stage", "trainer", "stranger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """One peer as a scenario wants it.

    ``arguments`` are those of ``swarm``, without what only the world knows (home, addresses, output). ``files`` are
    given to it to read, by a name: ``{name}`` in the arguments becomes the path where the peer finds that file or
    directory, ``{home}`` its home.
    ``region`` is the network that it shares with its neighbours, beside the one that all regions share; "" for that one
    alone. ``behind_nat``: it can call others and cannot be called. Limits that are None are the machine's. ``program``
    is the module that is run in the place of ``swarm``, "" for none.
    """

    name: str
    role: Role
    arguments: tuple[str, ...]
    files: Mapping[str, Path] = field(default_factory=dict)
    region: str = ""
    behind_nat: bool = False
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    program: str = ""

    def with_invite(self, invite: str) -> PeerSpec:
        """The same with ``{invite}`` in its arguments filled in."""
        return replace(self, arguments=tuple(one.replace("{invite}", invite) for one in self.arguments))


def filled(arguments: Iterable[str], paths: Mapping[str, str]) -> list[str]:
    """The arguments with ``{name}`` replaced by the path of that name; what names no file stays as it is."""
    return [argument.format_map(_Paths(paths)) for argument in arguments]


class _Paths(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


class SteadyWall:
    """The wall clock as it was when this was made, whatever becomes of the machine's meanwhile."""

    def __init__(self) -> None:
        self._epoch = SystemClock().wall() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._epoch


class Stamps:
    """Peers of one machine share its monotonic clock, which nobody sets; their wall clocks may be wrong on purpose, and
    the one who listens to them may be late, for it strikes too. So a moment is what the peer's monotonic clock said
    plus ``offset``: the least that ``wall`` was ever ahead of it when a line was read, which is wrong by no more than
    the quickest reading took. The clock may be that of a virtual machine which the peers run in."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self.wall = wall
        self.offset: float | None = None
        self.told_at = 0.0

    def tell(self, monotonic: float) -> None:
        """An event is told now: from here on it is ``told_at`` the moment when it was written."""
        ahead = self.wall() - monotonic
        self.offset = ahead if self.offset is None else min(self.offset, ahead)
        self.told_at = monotonic + self.offset


class PlayWorld(World, Protocol):
    """A world that peers are started in. A context manager: whatever was started in it is gone after it, whatever
    happened; entering it raises what says that it cannot be had (no engine, no image), with the command that helps.
    ``stamps`` say when the event was written that listeners are told now."""

    stamps: Stamps

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, spec: PeerSpec) -> None:
        """Start this peer; returns when its process or container is there, not when it is ready. What it is started
        with is remembered for restarts and joiner storms."""

    def expect(self, spec: PeerSpec) -> None:
        """Remember a peer that a fault (:class:`~peers.chaos.faults.Start`) may start later."""

    def order(self, name: str, words: Sequence[str]) -> str:
        """Have ``swarm`` carry these words out where a peer runs; returns what it prints on stdout. Blocks, for
        seconds. Raises CannotInflict with what it says when it fails."""

    def alive(self, name: str) -> bool:
        """Return whether its newest start runs."""

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of its newest start; None while it runs."""

    def stop(self, names: Iterable[str], grace_s: float) -> None:
        """Tell all of them to leave (SIGTERM) and wait until they are gone; killed after ``grace_s``."""

    def problems(self) -> Sequence[str]:
        """Return problems after a fault returned: ends of faults that could not be done."""

    def unkept(self) -> Sequence[str]:
        """Return the peers' evidence that was lost as the world ended; complete once it has."""

    def homes(self) -> Sequence[Path]:
        """Directories with the events and histories of all starts, those whose disk was lost too."""

    def log(self, name: str) -> Path:
        """Return the output of its newest start, for a person who looks for the cause of a failure."""
