"""Handing a part's state to a peer that needs it: the donor's service, and the download.

The state is the three vectors of a snapshot, one after the other, in raw little-endian float32. The receiver knows the
size from its own model and the digest from a close record; of the donor it believes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from swarm.clock import Clock
from swarm.errors import Busy, PeerError, Refused, StateError, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Answer, Endpoint, Method, Request
from swarm.schema import Count, DigestField, Empty, Message, PartField
from swarm.state.snapshot import Snapshot, digest

CHUNK_BYTES = 4 << 20
WINDOW = 4
"""Chunks asked for at once: 16 MiB under way fill a link of 1 Gbit/s with 100 ms round trip."""

DESCRIBE = "state/1/describe"
CHUNK = "state/1/chunk"

Run = Callable[..., Awaitable[str]]
"""Runs a function and its arguments off the event loop."""

Progress = Callable[[int, int], None]
"""Told (bytes received, bytes in all)."""


def _silent(received: int, total: int) -> None:
    return


class DescribeRequest(Message):
    """Ask for a part; ``step`` None for the newest that the donor has."""

    part: PartField
    step: Count | None


class Description(Message):
    """What the donor offers, and keeps for this caller until it has not asked for ``lease_s`` seconds."""

    part: PartField
    step: Count
    digest: DigestField
    elements: Count
    lease_s: Annotated[float, Field(gt=0)]


class ChunkRequest(Message):
    """``length`` bytes from ``offset`` of the three vectors laid end to end; never across two of them."""

    part: PartField
    step: Count
    offset: Count
    length: Annotated[int, Field(ge=1, le=CHUNK_BYTES)]


@dataclass(slots=True, eq=False)
class _Lease:
    snapshot: Snapshot
    digest: str
    expires: float
    bytes_left: int


class StateDonor:
    """A service that hands out snapshots. Mount it, and :meth:`offer` every state worth having.

    A caller that described a snapshot has a lease on it: it stays pinned while newer ones are offered, until the
    caller falls silent. So at most ``max_downloads`` old states are in memory; a further caller is Busy.
    """

    def __init__(self, clock: Clock, *, max_downloads: int = 4, lease_s: float = 60.0) -> None:
        self._clock, self._max_downloads, self._lease_s = clock, max_downloads, lease_s
        self._offers: dict[PartName, tuple[Snapshot, str]] = {}
        self._leases: dict[tuple[PeerId, PartName], _Lease] = {}

    def methods(self) -> Sequence[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return (
            Method(name=DESCRIBE, request=DescribeRequest, handle=self._describe),
            Method(name=CHUNK, request=ChunkRequest, handle=self._chunk),
        )

    def offer(self, snapshot: Snapshot, digest: str) -> None:
        """Serve this state of its part from now on. Leases on earlier ones stay valid."""
        self._offers[snapshot.part] = (snapshot, digest)

    def pin(self, caller: PeerId, snapshot: Snapshot, digest: str) -> None:
        """Keep this state for a caller that is about to download it, whatever is offered meanwhile. Raises Busy."""
        self._expire()
        key = (caller, snapshot.part)
        lease = self._lease(key, snapshot, digest)
        lease.expires, lease.bytes_left = self._clock.monotonic() + self._lease_s, _total_bytes(snapshot.layout)

    def serves(self, caller: PeerId, part: PartName) -> bool:
        """Whether a state is kept for this caller."""
        self._expire()
        return (caller, part) in self._leases

    def release(self, caller: PeerId, part: PartName) -> None:
        """The caller has what it came for: keep nothing for it any more."""
        self._leases.pop((caller, part), None)

    def tidy(self) -> None:
        """Drop what is kept for callers that fell silent: without it, a state stays until the next one asks."""
        self._expire()

    def withdraw(self, part: PartName) -> None:
        """Offer nothing of a part any more. Leases of downloads under way stay valid; those that had every byte end,
        for nothing would ever come to drop their state."""
        self._offers.pop(part, None)
        self._leases = {
            key: lease for key, lease in self._leases.items() if lease.snapshot.part != part or lease.bytes_left > 0
        }

    @property
    def downloads(self) -> int:
        """Leases of callers that have not had every byte yet."""
        self._expire()
        return sum(lease.bytes_left > 0 for lease in self._leases.values())

    async def _describe(self, request: Request) -> Answer:
        asked: DescribeRequest = request.body
        part, key = PartName(asked.part), (request.caller, PartName(asked.part))
        self._expire()
        lease = self._leases.get(key)
        if lease is None or asked.step != lease.snapshot.step:
            lease = self._grant(key, part, asked.step)
        lease.expires, lease.bytes_left = self._clock.monotonic() + self._lease_s, _total_bytes(lease.snapshot.layout)
        description = Description(
            part=part,
            step=lease.snapshot.step,
            digest=lease.digest,
            elements=lease.snapshot.layout.elements,
            lease_s=self._lease_s,
        )
        return Answer(description)

    def _grant(self, key: tuple[PeerId, PartName], part: PartName, step: int | None) -> _Lease:
        if part not in self._offers:
            raise Refused(f"{part} is not held here")
        snapshot, found = self._offers[part]
        if step is not None and step != snapshot.step:
            raise WrongStep(f"{part} is at step {snapshot.step} here, not {step}")
        return self._lease(key, snapshot, found)

    def _lease(self, key: tuple[PeerId, PartName], snapshot: Snapshot, found: str) -> _Lease:
        others = {other: lease for other, lease in self._leases.items() if other != key}
        if len(others) >= self._max_downloads:
            finished = next((other for other, lease in others.items() if lease.bytes_left <= 0), None)
            if finished is None:
                raise Busy(f"{len(others)} downloads are under way")
            del self._leases[finished]
        self._leases[key] = _Lease(snapshot, found, expires=0.0, bytes_left=0)
        return self._leases[key]

    async def _chunk(self, request: Request) -> Answer:
        asked: ChunkRequest = request.body
        self._expire()
        lease = self._leases.get((request.caller, PartName(asked.part)))
        if lease is None or lease.snapshot.step != asked.step:
            raise WrongStep(f"no lease on {asked.part} at step {asked.step}: describe it first")
        vector_bytes = 4 * lease.snapshot.layout.elements
        index, first = divmod(asked.offset, vector_bytes)
        if index >= len(lease.snapshot.vectors) or first + asked.length > vector_bytes:
            raise Violation(f"{asked.length} bytes at {asked.offset} lie outside a vector of {vector_bytes}")
        lease.expires = self._clock.monotonic() + self._lease_s
        lease.bytes_left -= asked.length
        return Answer(Empty(), lease.snapshot.buffers()[index][first : first + asked.length])

    def _expire(self) -> None:
        now = self._clock.monotonic()
        self._leases = {key: lease for key, lease in self._leases.items() if lease.expires > now}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The state to download: its digest from a close record, its layout from our own model."""

    part: PartName
    step: int
    digest: str
    layout: FlatLayout


async def download(
    endpoint: Endpoint,
    donor: PeerId,
    wanted: Wanted,
    *,
    chunk_timeout_s: float,
    progress: Progress = _silent,
    run: Run = asyncio.to_thread,
) -> Snapshot:
    """Fetch a part's state from one donor; what is returned has the wanted digest.

    ``chunk_timeout_s`` bounds each call, ``progress`` is told of every chunk, ``run`` keeps hashing off the event loop.
    Raises the donor's PeerError (Busy, WrongStep, Refused: ask another), Unreachable or DeadlineMissed, Violation for
    an answer of the wrong size, and StateError when all arrived and the digest is wrong. Cancelled or failed, it leaves
    no task behind.
    """
    await _agree(endpoint, donor, wanted, chunk_timeout_s)
    params, exp_avg, exp_avg_sq = (torch.empty(wanted.layout.elements, dtype=torch.float32) for _ in range(3))
    snapshot = Snapshot(
        part=wanted.part,
        step=wanted.step,
        layout=wanted.layout,
        params=params,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )
    pieces = _pieces(snapshot)
    received, total = 0, _total_bytes(wanted.layout)

    async def fetch() -> None:
        nonlocal received
        for offset, target in pieces:
            body = ChunkRequest(part=wanted.part, step=wanted.step, offset=offset, length=len(target))
            _, payload = await endpoint.call(
                donor, CHUNK, body, Empty, timeout_s=chunk_timeout_s, max_reply_bytes=len(target)
            )
            if len(payload) != len(target):
                raise Violation(f"a chunk of {len(payload)} bytes instead of {len(target)}", peer=donor)
            target[:] = payload
            received += len(payload)
            progress(received, total)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(WINDOW):
                group.create_task(fetch())
    except ExceptionGroup as failures:
        raise next((e for e in failures.exceptions if isinstance(e, PeerError)), failures) from failures
    found = await run(digest, snapshot)
    if found != wanted.digest:
        raise StateError(
            f"{wanted.part} after step {wanted.step} from {donor} has digest {found[:12]}…, the record says "
            f"{wanted.digest[:12]}…: nothing was installed. Try another donor."
        )
    return snapshot


async def _agree(endpoint: Endpoint, donor: PeerId, wanted: Wanted, timeout_s: float) -> None:
    """Get a lease, and notice early when the donor has something else."""
    body = DescribeRequest(part=wanted.part, step=wanted.step)
    offered, _ = await endpoint.call(donor, DESCRIBE, body, Description, timeout_s=timeout_s)
    claim = (offered.part, offered.step, offered.digest, offered.elements)
    if claim != (wanted.part, wanted.step, wanted.digest, wanted.layout.elements):
        raise Violation(f"it offers {offered.part} after step {offered.step} with another digest or size", peer=donor)


def _pieces(snapshot: Snapshot) -> Iterator[tuple[int, memoryview]]:
    """(offset, where its bytes go), chunk by chunk. One iterator is shared by all who fetch."""
    base = 0
    for buffer in snapshot.buffers():
        for first in range(0, len(buffer), CHUNK_BYTES):
            yield base + first, buffer[first : first + CHUNK_BYTES]
        base += len(buffer)


def _total_bytes(layout: FlatLayout) -> int:
    return 12 * layout.elements
