"""Events of a part's state: downloaded, copied, kept on disk. See :mod:`swarm.events`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.events.base import Event
from swarm.ids import PartName, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorDropped(Event):
    """A donor gives no more of a part that is downloaded: it died, stalled, lied, or cannot. What it gave stays."""

    part: PartName
    step: int
    donor: PeerId
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDownloaded(Event):
    """A part was downloaded and its digest matches the record. ``donor`` gave most of it, ``donors`` all that gave any,
    most first; ``bytes_refetched`` arrived beside ``bytes_received`` and did not count."""

    part: PartName
    step: int
    donor: PeerId
    bytes_received: int
    seconds: float
    donors: tuple[PeerId, ...] = ()
    bytes_refetched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFetching(Event):
    """The frozen weights of a part are about to be fetched into ``directory``, whose disk has ``bytes_free``:
    ``bytes_total`` are to come."""

    part: PartName
    bytes_total: int
    bytes_free: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReady(Event):
    """The frozen weights of a part are on this machine's disk now: from its ``source``, "files" or "peers"."""

    part: PartName
    bytes: int
    seconds: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHeld(Event):
    """From ``step`` on this peer keeps a copy of a part that it does not train; ``donor`` gave most of its state."""

    part: PartName
    step: int
    donor: PeerId
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLeftBehind(Event):
    """This peer had to end as the only one that held ``part`` at ``step``, the newest: the best copy that others keep
    was at ``copied``, None without any. ``reason`` says why the state is not on this disk either; "" where it is."""

    part: PartName
    step: int
    copied: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDropped(Event):
    """This peer keeps its copy of a part no longer: another does, it became this peer's part, or it fell behind and
    must be fetched anew."""

    part: PartName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    """A part is on disk, synced and renamed into place."""

    part: PartName
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A part could not be written to disk: training goes on, and nothing that was there was touched. ``kept`` is the
    newest complete step on this machine, None when there is none."""

    part: PartName
    step: int
    reason: str
    kept: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsSetAside(Event):
    """The run went on from ``step``: what this machine kept of these ``steps`` is of a history that does not count any
    more. It lies in the directory ``path`` until the run has passed it."""

    steps: tuple[int, ...]
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRefused(Event):
    """This machine's disk does not take something that this peer must keep: it is tried again, and nothing is lost
    while the peer lives."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTook(Event):
    """What the disk refused is on it now."""

    what: str
