"""Downloading a part's state from several donors at once.

The receiver knows the size from its own model and the digest from a close record; of the donors it believes nothing.
Each has to show hashes that give this digest before it is asked for anything, and every chunk is checked against its
hash before it counts. Donors may die, stall and lie: what was verified stays, and the others give the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.clock import Clock
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Endpoint
from swarm.state.donation import Bucket
from swarm.state.sharing import Sharing
from swarm.state.snapshot import CHUNK_BYTES, HASH_BYTES, Cut, Snapshot, hash_of, root_of
from swarm.state.transfer import CHUNK, DESCRIBE, ChunkRequest, DescribeRequest, Run

logger = logging.getLogger(__name__)

DESCRIBE_S = 30.0
"""How long a donor may take for the hashes: it may have to make them first, at about 1 GB/s."""
_MILDEST_FIRST = (Busy.code, WrongStep.code, Refused.code, DeadlineMissed.code, Unreachable.code)

Progress = Callable[[PeerId, int, int], None]
"""Told (donor of a chunk, bytes verified so far, bytes in all)."""
Dropped = Callable[[PeerId, PeerError], None]
"""Told of a donor that gives no more, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The state to download: its digest from a close record, its layout from our own model."""

    part: PartName
    step: int
    digest: str
    layout: FlatLayout


def _ignore(*_: object) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadContext:
    """What a download works with. ``run`` keeps hashing off the event loop; ``pace`` holds back what is asked for."""

    endpoint: Endpoint
    clock: Clock
    pace: Bucket | None = None
    progress: Progress = _ignore
    dropped: Dropped = _ignore
    run: Run = asyncio.to_thread


def gravest(failures: Sequence[PeerError], nobody: str) -> PeerError | StateError:
    """What to say when nobody could help: the worst of their errors, a lie first, then death, and at last that they are
    busy; a StateError with the reason ``nobody`` when nobody was asked."""
    return max(failures, key=_gravity) if failures else StateError(nobody)


class Download:
    """One state on its way here. Memory: the state's own, from the first donor's hashes on."""

    def __init__(self, context: DownloadContext, wanted: Wanted) -> None:
        self._context, self.wanted = context, wanted
        self._cut = Cut(wanted.layout.elements)
        self._sharing = Sharing(self._cut.chunks)
        self._hashes: memoryview | None = None
        self._snapshot: Snapshot | None = None
        self._calls: dict[asyncio.Task[memoryview], tuple[PeerId, int | None]] = {}
        self._ending: list[asyncio.Task[Any]] = []
        self._given: dict[PeerId, int] = {}
        self._verified = self._received = 0
        self.liars: set[PeerId] = set()

    @property
    def given(self) -> dict[PeerId, int]:
        """Verified bytes by the donor that brought them first."""
        return dict(self._given)

    @property
    def refetched_bytes(self) -> int:
        """Bytes of chunks that arrived whole and did not count: doubled ones, and lies."""
        return self._received - self._verified

    async def fetch(self, donors: Sequence[PeerId]) -> Snapshot:
        """Fetch what is missing; what is returned has the wanted digest. After a failure call it again, with the same
        donors or others: what was verified stays.

        Donors that lied before are not asked. Raises, when no donor is left, the gravest of their errors: Violation for
        a lie, Unreachable, DeadlineMissed (slower than it usually is), Refused, WrongStep (it has another state) and
        Busy; StateError without donors. Cancelled or failed, it leaves no task behind.
        """
        failures: list[PeerError] = []
        for donor in dict.fromkeys(donors):
            if donor not in self.liars:
                self._begin(donor, None, self._agree(donor))
        try:
            while not self._sharing.complete or self._snapshot is None:
                paused_s = self._ask()
                if not self._calls and not (paused_s and self._sharing.donors):
                    wanted = self.wanted
                    raise gravest(failures, f"nobody is left who could give {wanted.part} after step {wanted.step}")
                await self._wait(failures, paused_s)
        finally:
            await self._end()
        return self._snapshot

    # --- the loop's three moves ----------------------------------------------------------------------------------

    def _ask(self) -> float:
        """Give every donor that is free something to bring; returns for how many seconds that must wait."""
        now, pace = self._context.clock.monotonic(), self._context.pace
        for donor in self._sharing.donors:
            while not (paused_s := 0.0 if pace is None else pace.pause_s(CHUNK_BYTES, now)):
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

    def _settle(self, call: asyncio.Task[memoryview], failures: list[PeerError]) -> None:
        donor, chunk = self._calls.pop(call)
        error = call.exception()
        if isinstance(error, PeerError):
            failures.append(error)
            self._drop(donor, error)
        elif error is not None:
            raise error
        elif chunk is None:
            self._accept(call.result())
            self._sharing.joined(donor)
        else:
            self._count(donor, chunk)

    # --- what came of a question ---------------------------------------------------------------------------------

    def _accept(self, hashes: memoryview) -> None:
        """Verified hashes: every donor has the same."""
        wanted = self.wanted
        if self._snapshot is not None:
            return
        self._hashes = hashes
        params, exp_avg, exp_avg_sq = (torch.empty(wanted.layout.elements, dtype=torch.float32) for _ in range(3))
        self._snapshot = Snapshot(
            part=wanted.part,
            step=wanted.step,
            layout=wanted.layout,
            params=params,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )

    def _count(self, donor: PeerId, chunk: int) -> None:
        size = self._cut[chunk].length
        self._received += size
        if not self._sharing.arrived(donor, chunk, self._context.clock.monotonic()):
            return
        self._verified += size
        self._given[donor] = self._given.get(donor, 0) + size
        for call, (other, same) in list(self._calls.items()):
            if same == chunk:
                self._call_off(call)
                self._sharing.called_off(other, chunk)
        self._context.progress(donor, self._verified, self._cut.total_bytes)

    def _drop(self, donor: PeerId, error: PeerError) -> None:
        if isinstance(error, Violation):
            self.liars.add(donor)
        self._sharing.left(donor)
        for call, (other, _) in list(self._calls.items()):
            if other == donor:
                self._call_off(call)
        self._context.dropped(donor, error)
        logger.info("%s of step %d: %s gives no more: %s", self.wanted.part, self.wanted.step, donor, error)

    # --- questions -----------------------------------------------------------------------------------------------

    def _begin(self, donor: PeerId, chunk: int | None, question: Coroutine[Any, Any, memoryview]) -> None:
        self._calls[asyncio.create_task(question)] = (donor, chunk)

    def _call_off(self, call: asyncio.Task[memoryview]) -> None:
        """What it would still bring is not wanted; the donor stops when it hears of it."""
        _, chunk = self._calls.pop(call)
        if call.done() and call.exception() is None and chunk is not None:
            self._received += self._cut[chunk].length
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

    async def _agree(self, donor: PeerId) -> memoryview:
        """Get a lease, and the hashes; they are right when they give the digest that we want."""
        wanted, expected = self.wanted, HASH_BYTES * self._cut.chunks
        body = DescribeRequest(part=wanted.part, step=wanted.step)
        offered, hashes = await self._context.endpoint.call(
            donor, DESCRIBE, body, timeout_s=DESCRIBE_S, max_reply_bytes=expected
        )
        claim = (offered.part, offered.step, offered.digest, offered.elements)
        if claim != (wanted.part, wanted.step, wanted.digest, wanted.layout.elements):
            raise Violation(
                f"it offers {offered.part} after step {offered.step} with another digest or size", peer=donor
            )
        found = root_of(wanted.part, wanted.layout, bytes(hashes))
        if len(hashes) != expected or found != wanted.digest:
            raise Violation(f"the hashes of its chunks do not give the digest {wanted.digest[:12]}…", peer=donor)
        return hashes

    async def _bring(self, donor: PeerId, chunk: int, timeout_s: float) -> memoryview:
        """One chunk, verified and in its place."""
        assert self._hashes is not None and self._snapshot is not None  # noqa: S101, PT018 - a donor has joined
        piece, wanted = self._cut[chunk], self.wanted
        body = ChunkRequest(part=wanted.part, step=wanted.step, chunk=chunk)
        _, payload = await self._context.endpoint.call(
            donor, CHUNK, body, timeout_s=timeout_s, max_reply_bytes=piece.length
        )
        target = self._snapshot.buffers()[piece.vector][piece.start : piece.start + piece.length]
        expected = self._hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]
        if len(payload) != piece.length or not await self._context.run(_place, payload, expected, target):
            raise Violation(f"chunk {chunk} of {self._cut.chunks} is not what its hash says", peer=donor)
        return target


def _gravity(error: PeerError) -> int:
    if isinstance(error, Violation):
        return len(_MILDEST_FIRST) + 1
    return _MILDEST_FIRST.index(error.code) if error.code in _MILDEST_FIRST else len(_MILDEST_FIRST)


async def _sleep(clock: Clock, seconds: float) -> None:
    await clock.sleep(seconds)


def _place(payload: memoryview, expected: memoryview, target: memoryview) -> bool:
    """Put a chunk where it belongs, if it is right. Two threads may do so at once: they write the same bytes."""
    if hash_of(payload) != expected:
        return False
    target[:] = payload
    return True
