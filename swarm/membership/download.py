"""A part's state on its way to this peer, told as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, Ending, PeerError, RunEnded, StateError
from swarm.events import DonorDropped, StateDownloaded, SyncProgress
from swarm.ids import PartName, PeerId
from swarm.membership.part_memory import check_memory
from swarm.membership.parts import build_empty
from swarm.membership.roles import PeerContext
from swarm.models.registry import family_of
from swarm.optim.part import PartState, TrainedPart
from swarm.state.download import ChunkDonor, Download, DownloadContext, IntoMemory, PeerChunks, Wanted
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from swarm.waiting import ExponentialBackoff, TokenBucket

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.3
BUSY_PAUSE_S = 0.2
"""Seconds before a busy donor is asked again, at first."""


class PartDownload:
    """The state of one part that a close record attests, on its way to this peer. Raises StateError when the record
    names no such part.

    Args:
        around: What the peer works with.
        record: The record after which the part is wanted.
        part: The part that is to have that state.
        donor: How a peer is asked; by default for a state in its memory.
        pace: Holds back what is fetched for a copy, of which no progress is told. None for this peer's own part.
    """

    def __init__(
        self,
        around: PeerContext,
        record: CloseRecord,
        part: PartState,
        donor: Callable[[PeerId], ChunkDonor] | None = None,
        pace: TokenBucket | None = None,
    ) -> None:
        self._around, self.record, self.part = around, record, part
        name = part.spec.name
        if name not in record.digests:
            raise StateError(f"the record of step {record.step} names no {name}")
        self._began = self._told = around.clock.monotonic()
        context = DownloadContext(
            donor=donor or partial(PeerChunks, around.endpoint),
            clock=around.clock,
            pace=pace,
            progress=self._progress if pace is None else (lambda *_: None),
            dropped=self._dropped,
        )
        wanted = Wanted(part=name, step=record.step, digest=record.digests[name], layout=part.layout)
        self._download = Download(context, wanted, IntoMemory(wanted))

    @property
    def verified_bytes(self) -> int:
        """Return what is here already, whatever becomes of the donors."""
        return sum(self._download.given.values())

    @property
    def liars(self) -> frozenset[PeerId]:
        """Donors that gave what is not the state."""
        return frozenset(self._download.liars)

    @property
    def seconds(self) -> float:
        """Return how long ago it began."""
        return self._around.clock.monotonic() - self._began

    async def fetch(self, donors: Sequence[PeerId]) -> tuple[Snapshot, tuple[PeerId, ...]]:
        """Fetch what is missing from these donors at once; returns the whole, and who gave of it, the most first.
        Call it again after a failure: see :meth:`swarm.state.download.Download.fetch` for what it raises. Progress is
        told a few times a second."""
        snapshot, given = await self._download.fetch(donors), self._download.given
        return snapshot, tuple(sorted(given, key=lambda donor: -given[donor]))

    async def run(self, donors: Sequence[PeerId]) -> None:
        """As :meth:`fetch`, and install the whole as this peer's own part."""
        snapshot, gave = await self.fetch(donors)
        await self._around.device.run(self.part.install, snapshot)
        self._around.events.emit(
            StateDownloaded(
                part=self.part.spec.name,
                step=self.record.step,
                donor=gave[0] if gave else donors[0],
                bytes_received=self.verified_bytes,
                seconds=self.seconds,
                donors=gave,
                bytes_refetched=self._download.refetched_bytes,
            )
        )

    def _progress(self, donor: PeerId, received: int, total: int) -> None:
        now = self._around.clock.monotonic()
        if now - self._told >= PROGRESS_EVERY_S or received == total:
            self._told = now
            self._around.events.emit(
                SyncProgress(
                    part=self.part.spec.name,
                    step=self.record.step,
                    donor=donor,
                    bytes_received=received,
                    bytes_total=total,
                )
            )

    def _dropped(self, donor: PeerId, error: PeerError) -> None:
        self._around.events.emit(
            DonorDropped(
                part=self.part.spec.name, step=self.record.step, donor=donor, code=error.code, reason=error.reason
            )
        )


async def _read_from_files(around: PeerContext, record: CloseRecord, part: TrainedPart) -> bool:
    """Install the weights of the model's files, if they are those with which the run begins; whether they are."""
    began, model, name = around.clock.monotonic(), around.manifest.model, part.spec.name

    def read() -> bool:
        weights = family_of(model).initial_weights(around.manifest.run.seed, part.spec, around.files.directory)
        snapshot = initial_snapshot(name, part.layout, weights)
        same = digest(snapshot) == record.digests.get(name)
        if same:
            part.install(snapshot)
        return same

    try:
        same = await around.device.run(read)
    except StateError as error:
        logger.warning("downloads %s: its files cannot be used: %s", name, error)
        return False
    if not same:
        logger.warning("downloads %s: the files in %s have other weights", name, around.files.directory)
        return False
    seconds, me = around.clock.monotonic() - began, around.endpoint.peer
    around.events.emit(StateDownloaded(part=name, step=0, donor=me, bytes_received=0, seconds=seconds, donors=(me,)))
    return True


class StateFetch:
    """The part that this peer is to hold, and what was verified so far of the state that is on its way.

    A failure keeps what was verified, for as long as somebody has the rest. ``liars`` are donors that gave something
    else.
    """

    def __init__(self, around: PeerContext) -> None:
        self._around = around
        self.part: TrainedPart | None = None
        self.liars: set[PeerId] = set()
        self._download: PartDownload | None = None

    @property
    def begun(self) -> CloseRecord | None:
        """The record whose state is here in part; None when nothing is under way."""
        return None if self._download is None else self._download.record

    @property
    def verified_bytes(self) -> int:
        """Bytes of that state that are here."""
        return 0 if self._download is None else self._download.verified_bytes

    async def run(self, name: PartName, donors: Sequence[PeerId], record: CloseRecord) -> None:
        """Bring the part to the state that ``record`` attests. Raises as :meth:`PartDownload.run`."""
        if self.part is None or self.part.spec.name != name:
            await asyncio.to_thread(check_memory, self._around, name)
            self.part = await build_empty(self._around, name, _who_may_have(record, name, donors))
        download = self._download
        if download is None or download.part is not self.part or download.record.hash() != record.hash():
            download = self._download = PartDownload(self._around, record, self.part)
        try:
            await download.run(donors)
        finally:
            self.liars |= download.liars
        self._download = None

    async def revive(self, name: PartName, record: CloseRecord, latest: Callable[[], Snapshot | None]) -> None:
        """Hold on with a part that nobody but its owner may have, and none of whose hosts is there: as it is here, else
        as it was ``latest`` on this machine's disk. From ``record`` on it is what replicas of it begin with. Raises
        RunEnded where there is nothing of it."""
        around, began, part = self._around, self._around.clock.monotonic(), self.part
        self._download = None
        if part is None or part.spec.name != name or part.empty:
            await asyncio.to_thread(check_memory, around, name)
            state = await asyncio.to_thread(latest)
            if state is None:
                raise RunEnded(
                    f"no state of {name} is on this machine, and its owner keeps it to itself: nobody else has any",
                    Ending.MISUSED,
                    remedy="Start a host of it where one was before.",
                )
            part = self.part = await build_empty(around, name, record.members.peers)
            seconds, me = around.clock.monotonic() - began, around.endpoint.peer
            around.events.emit(
                StateDownloaded(part=name, step=state.step, donor=me, bytes_received=0, seconds=seconds, donors=(me,))
            )
        else:
            state = await around.device.run(part.snapshot)
        await around.device.run(part.install, replace(state, step=record.step))

    async def digest(self) -> str | None:
        """Return that of the state that is here; None where nothing is."""
        part = self.part
        return None if part is None else await self._around.device.run(lambda: digest(part.snapshot()))


def _who_may_have(record: CloseRecord, name: PartName, donors: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Peers that may have a part's frozen weights: who gives its state, and all others that hold or copy parts."""
    return tuple(dict.fromkeys((*donors, *record.members.replicas(name), *record.members.peers)))


async def download_part(around: PeerContext, record: CloseRecord, part: TrainedPart, *donors: PeerId) -> None:
    """Install the state that ``record`` attests: that of the run's beginning from the model's files, where this
    machine has them and they give the same. Raises as :meth:`PartDownload.run`, but when all are busy they are asked
    again, until the caller gives up."""
    if around.files.directory is not None and record.step == 0 and await _read_from_files(around, record, part):
        return
    download, patience = PartDownload(around, record, part), ExponentialBackoff(BUSY_PAUSE_S)
    while True:
        try:
            return await download.run(donors)
        except Busy:
            await around.clock.sleep(patience.pause_s())
