"""Downloading a part's state from several donors at once, into memory or into a file.

The receiver knows the size from its own model and the digest from a close record; of the donors it believes nothing.
Each has to show hashes that give this digest before it is asked for anything, and every chunk is checked against its
hash before it counts. Donors may die, stall and lie: what was verified stays, and the others give the rest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from swarm.clock import Clock
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Endpoint, Rpc
from swarm.schema import Empty
from swarm.state.sharing import DonorT, Sharing
from swarm.state.snapshot import CHUNK_BYTES, HASH_BYTES, Cut, Snapshot, is_chunk, root_of
from swarm.state.transfer import CHUNK, DESCRIBE, ChunkRequest, DescribeRequest, Run
from swarm.waiting import TokenBucket

logger = logging.getLogger(__name__)

DESCRIBE_S = 30.0
"""How long a donor may take for the hashes: it may have to make them first, at about 1 GB/s."""
MAX_UNDER_WAY = 32
"""Chunks asked of all donors together: 32 MiB under way are more than any link brings in a round trip, and however many
donors there are, no more memory goes into what is not verified yet."""
_MILDEST_FIRST = (Busy.code, WrongStep.code, Refused.code, DeadlineMissed.code, Unreachable.code)

ResultT_co = TypeVar("ResultT_co", covariant=True)
Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The state to download: its digest from a close record, its layout from our own model."""

    part: PartName
    step: int
    digest: str
    layout: FlatLayout

    @property
    def cut(self) -> Cut:
        """The cut of the state into chunks."""
        return Cut.of(self.layout)

    def is_of(self, hashes: bytes) -> bool:
        """Return whether these are the hashes of its chunks."""
        right = len(hashes) == HASH_BYTES * self.cut.chunks
        return right and root_of(self.part, self.layout, hashes) == self.digest

    def describe(self) -> DescribeRequest:
        """Ask for its hashes."""
        return DescribeRequest(part=self.part, step=self.step, digest=self.digest)

    def chunk(self, number: int) -> ChunkRequest:
        """Ask for one of its chunks."""
        return ChunkRequest(part=self.part, step=self.step, digest=self.digest, chunk=number)


class ChunkDonor(Protocol):
    """A source of chunks of states that nobody trusts. Every method may raise PeerError."""

    async def hashes(self, wanted: Wanted) -> Data:
        """The hashes of all chunks."""

    async def chunk(self, wanted: Wanted, number: int, timeout_s: float) -> Data:
        """One chunk."""


class PeerChunks:
    """A :class:`ChunkDonor`: a running peer, asked by the two calls of one of its services; by default that which hands
    out states in memory."""

    def __init__(
        self,
        endpoint: Endpoint,
        peer: PeerId,
        describe: Rpc[DescribeRequest, Empty] = DESCRIBE,
        chunk: Rpc[ChunkRequest, Empty] = CHUNK,
    ) -> None:
        self._endpoint, self._peer = endpoint, peer
        self._describe, self._chunk = describe, chunk

    def __str__(self) -> str:
        return str(self._peer)

    async def hashes(self, wanted: Wanted) -> Data:
        """See :class:`ChunkDonor`."""
        most = HASH_BYTES * wanted.cut.chunks
        _, hashes = await self._endpoint.call(
            self._peer, self._describe, wanted.describe(), timeout_s=DESCRIBE_S, max_reply_bytes=most
        )
        return hashes

    async def chunk(self, wanted: Wanted, number: int, timeout_s: float) -> Data:
        """See :class:`ChunkDonor`."""
        most = wanted.cut[number].length
        _, payload = await self._endpoint.call(
            self._peer, self._chunk, wanted.chunk(number), timeout_s=timeout_s, max_reply_bytes=most
        )
        return payload


class Sink(Protocol[ResultT_co]):
    """The destination of a download. Its methods block, and run off the event loop; several chunks are placed at once,
    one of them twice when two donors bring it. An error of any method ends the download, which may be resumed."""

    def begin(self, hashes: bytes) -> Collection[int]:
        """Have room for all of it; the hashes are verified. Returns the chunks that are here already, and right."""

    def place(self, number: int, data: Data) -> None:
        """Put a chunk where it belongs; it is verified."""

    def finish(self) -> ResultT_co:
        """Every chunk is in its place. Called once for each fetch that succeeds."""


class IntoMemory:
    """A :class:`Sink`: a snapshot. Its memory is taken with the first donor's hashes."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._snapshot: Snapshot | None = None
        self._taking = threading.Lock()  # the thread of a download that was cancelled may be at it still

    def begin(self, hashes: bytes) -> Collection[int]:
        """See :class:`Sink`."""
        wanted = self._wanted
        with self._taking:
            self._snapshot = self._snapshot or Snapshot.blank(wanted.part, wanted.step, wanted.layout)
        return ()

    def place(self, number: int, data: Data) -> None:
        """See :class:`Sink`."""
        piece = self._wanted.cut[number]
        self.finish().buffers()[piece.vector][piece.start : piece.start + piece.length] = data

    def finish(self) -> Snapshot:
        """See :class:`Sink`."""
        assert self._snapshot is not None  # noqa: S101 - begun
        return self._snapshot


def _ignore(*_: object) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadContext(Generic[DonorT]):
    """The shared objects of a download.

    Attributes:
        donor: Whom to ask for what a donor of :meth:`Download.fetch` has.
        pace: Holds back what is asked for.
        progress: Told (donor of a chunk, bytes verified so far, bytes in all), first when the first donor's hashes are
            verified.
        dropped: Told of a donor that gives no more, and why; returns in how many seconds to ask it again, None for
            never. One that lied is never asked again.
        run: Keeps hashing and the sink off the event loop.
    """

    donor: Callable[[DonorT], ChunkDonor]
    clock: Clock
    pace: TokenBucket | None = None
    progress: Callable[[DonorT, int, int], None] = _ignore
    dropped: Callable[[DonorT, PeerError], float | None] = _ignore
    run: Run = asyncio.to_thread


def gravest(failures: Sequence[PeerError], nobody: str) -> PeerError | StateError:
    """Return the error when nobody could help: the worst of the donors' errors, a lie first, then death, and at last
    that they are busy; a StateError with the reason ``nobody`` when nobody was asked."""
    return max(failures, key=_gravity) if failures else StateError(nobody)


@dataclass(slots=True)
class _Bytes:
    """Bytes of chunks that arrived whole, and of those that counted."""

    received: int = 0
    verified: int = 0


class Download(Generic[DonorT, ResultT_co]):
    """One state on its way into a sink."""

    def __init__(self, context: DownloadContext[DonorT], wanted: Wanted, sink: Sink[ResultT_co]) -> None:
        self._context, self.wanted, self._sink = context, wanted, sink
        self._cut = wanted.cut
        self._sharing = Sharing[DonorT](self._cut.chunks)
        self._hashes: bytes | None = None
        self._beginning = asyncio.Lock()
        self._calls: dict[asyncio.Task[None], tuple[DonorT, int | None]] = {}
        self._ending: list[asyncio.Task[None]] = []
        self._given: dict[DonorT, int] = {}
        self._bytes = _Bytes()
        self.liars: set[DonorT] = set()

    @property
    def given(self) -> dict[DonorT, int]:
        """Verified bytes by the donor that brought them first."""
        return dict(self._given)

    @property
    def refetched_bytes(self) -> int:
        """Bytes of chunks that arrived whole and did not count: doubled ones, and lies."""
        return self._bytes.received - self._bytes.verified

    async def fetch(self, donors: Sequence[DonorT]) -> ResultT_co:
        """Fetch what is missing; what the sink then returns has the wanted digest. After a failure call it again, with
        the same donors or others: what was verified stays.

        Donors that lied before are not asked. Raises, when no donor is left, the gravest of their errors: Violation for
        a lie, Unreachable, DeadlineMissed (slower than it usually is), Refused, WrongStep (it has another state) and
        Busy; StateError without donors; and what the sink raises. Cancelled or failed, it leaves no task behind.
        """
        failures: list[PeerError] = []
        for donor in dict.fromkeys(donors):
            if donor not in self.liars:
                self._begin(donor, None, self._agree(donor))
        try:
            while not self._sharing.complete or self._hashes is None:
                paused_s = self._ask()
                if not self._calls and not (paused_s and self._sharing.donors):
                    wanted = self.wanted
                    raise gravest(failures, f"nobody is left who could give {wanted.part} after step {wanted.step}")
                await self._wait(failures, paused_s)
        finally:
            await self._end()
        result: ResultT_co = await self._context.run(self._sink.finish)
        return result

    # --- the loop's three moves ----------------------------------------------------------------------------------

    def _ask(self) -> float:
        """Give every donor that is free something to bring; returns for how many seconds that must wait."""
        now, pace = self._context.clock.monotonic(), self._context.pace
        for donor in self._sharing.donors:
            while not (paused_s := 0.0 if pace is None else pace.pause_s(CHUNK_BYTES, now)):
                if sum(chunk is not None for _, chunk in self._calls.values()) >= MAX_UNDER_WAY:
                    return 0.0
                chunk = self._sharing.next(donor, now)
                if chunk is None:
                    break
                if pace is not None:
                    pace.take(self._cut[chunk].length, now)
                self._begin(donor, chunk, self._bring(donor, chunk, self._sharing.deadline_s(donor)))
            if paused_s:
                return paused_s
        return 0.0

    async def _wait(self, failures: list[PeerError], paused_s: float) -> None:
        """Until something came of a question, or it is time to ask for more, or another donor for what is late."""
        again_s = paused_s or self._sharing.look_again_s(self._context.clock.monotonic())
        timers = [] if again_s is None else [asyncio.create_task(_sleep(self._context.clock, again_s))]
        try:
            await asyncio.wait({*self._calls, *timers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for timer in timers:
                timer.cancel()
            await asyncio.gather(*timers, return_exceptions=True)
        for call in [call for call in self._calls if call.done()]:
            if call in self._calls:  # not called off by the one before it
                self._settle(call, failures)

    def _settle(self, call: asyncio.Task[None], failures: list[PeerError]) -> None:
        donor, chunk = self._calls.pop(call)
        error = call.exception()
        if isinstance(error, PeerError):
            failures.append(error)
            self._drop(donor, error)
        elif error is not None:
            raise error
        elif chunk is None:
            self._sharing.joined(donor)
        else:
            self._count(donor, chunk)

    # --- what came of a question ---------------------------------------------------------------------------------

    def _count(self, donor: DonorT, chunk: int) -> None:
        size = self._cut[chunk].length
        self._bytes.received += size
        if not self._sharing.arrived(donor, chunk, self._context.clock.monotonic()):
            return
        self._bytes.verified += size
        self._given[donor] = self._given.get(donor, 0) + size
        for call, (other, same) in list(self._calls.items()):
            if same == chunk:
                self._call_off(call)
                self._sharing.called_off(other, chunk)
        self._context.progress(donor, self._bytes.verified, self._cut.total_bytes)

    def _drop(self, donor: DonorT, error: PeerError) -> None:
        self._sharing.left(donor)
        for call, (other, _) in list(self._calls.items()):
            if other == donor:
                self._call_off(call)
        logger.info("%s of step %d: %s gives no more: %s", self.wanted.part, self.wanted.step, donor, error)
        again_s = self._context.dropped(donor, error)
        if isinstance(error, Violation):
            self.liars.add(donor)
        elif again_s is not None:
            self._begin(donor, None, self._agree(donor, again_s))

    # --- questions -----------------------------------------------------------------------------------------------

    def _begin(self, donor: DonorT, chunk: int | None, question: Coroutine[Any, Any, None]) -> None:
        self._calls[asyncio.create_task(question)] = (donor, chunk)

    def _call_off(self, call: asyncio.Task[None]) -> None:
        """Cancel a donor's requests; the donor stops when it hears of it."""
        _, chunk = self._calls.pop(call)
        if call.done() and call.exception() is None and chunk is not None:
            self._bytes.received += self._cut[chunk].length
        call.cancel()
        self._ending.append(call)

    async def _end(self) -> None:
        """Forget every donor, keep every chunk."""
        for donor in self._sharing.donors:
            self._sharing.left(donor)
        for call in list(self._calls):
            self._call_off(call)
        ending, self._ending = self._ending, []
        await asyncio.gather(*ending, return_exceptions=True)

    async def _agree(self, donor: DonorT, after_s: float = 0.0) -> None:
        """Get its hashes; they are right when they give the digest that we want. The first ones begin the sink."""
        wanted = self.wanted
        if after_s:
            await self._context.clock.sleep(after_s)
        hashes = bytes(await self._context.donor(donor).hashes(wanted))
        if not wanted.is_of(hashes):
            raise Violation(f"the hashes of its chunks do not give the digest {wanted.digest[:12]}…", peer=str(donor))
        async with self._beginning:
            if self._hashes is None:
                here = await self._context.run(self._sink.begin, hashes)
                self._hashes = hashes
                self._sharing.found(here)
                self._bytes.verified = self._bytes.received = sum(self._cut[chunk].length for chunk in here)
                self._context.progress(donor, self._bytes.verified, self._cut.total_bytes)

    async def _bring(self, donor: DonorT, chunk: int, timeout_s: float) -> None:
        """One chunk, verified and in its place."""
        payload = await self._context.donor(donor).chunk(self.wanted, chunk, timeout_s)
        if len(payload) != self._cut[chunk].length or not await self._context.run(self._place, chunk, payload):
            raise Violation(f"chunk {chunk} of {self._cut.chunks} is not what its hash says", peer=str(donor))

    def _place(self, chunk: int, payload: Data) -> bool:
        """Put a chunk where it belongs, if it is right. Two threads may do so at once: they write the same bytes."""
        assert self._hashes is not None  # noqa: S101 - a donor has joined
        if not is_chunk(self._hashes, chunk, payload):
            return False
        self._sink.place(chunk, payload)
        return True


def _gravity(error: PeerError) -> int:
    if isinstance(error, Violation):
        return len(_MILDEST_FIRST) + 1
    return _MILDEST_FIRST.index(error.code) if error.code in _MILDEST_FIRST else len(_MILDEST_FIRST)


async def _sleep(clock: Clock, seconds: float) -> None:
    await clock.sleep(seconds)
