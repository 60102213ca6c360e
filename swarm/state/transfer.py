"""Handing a part's state to peers that need it: what is asked, and the service that hands out what is in memory. The
receiver is in ``swarm.state.download``; the service that hands out files is in
``checkpoint_service`` of ``swarm.state.checkpoints``.

The state is the vectors of a snapshot in raw little-endian float32, cut into chunks; the donor says what each
chunk's hash is, and the digest that a close record names attests these (``swarm.state.snapshot``).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.clock import Clock
from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Count, DigestField, Empty, Message, PartField
from swarm.state.sharing import MAX_WINDOW
from swarm.state.snapshot import Chunk, Cut, Snapshot, hashes_of
from swarm.waiting import TokenBucket

BURST_BYTES = 8 << 20
MAX_BYTES_S = 64 << 20
"""While nothing suffers: half a gigabit a second, and about half of a processor's time for the streams."""
LEAST_BYTES_S = 2 << 20
SUFFERS = 1.05
"""A step that takes so much longer than most steps without a download is one that suffers."""
SLOWER, FASTER = 0.7, 1.2
_REMEMBERED = 32
_ENOUGH = 4


class Donation:
    """The rate at which a donor hands out its state, so that its own work does not suffer, and the bytes that may go at
    once; a :class:`~swarm.waiting.TokenBucket` keeps to it. Pure. It falls while steps take longer than without a
    download, and rises again when they do not: nobody has to know what the link and the processor can bear. Before our
    first step there is nothing that could suffer, and no limit.

    Steps are compared with the upper quartile of those without a download, since a median would take noise for harm.
    """

    def __init__(self, *, most: float = MAX_BYTES_S, least: float = LEAST_BYTES_S) -> None:
        self._most, self._least = most, least
        self._bucket = TokenBucket(most, BURST_BYTES)
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed: float | None = None
        self._given = 0

    @property
    def bytes_s(self) -> float:
        """The rate at this time."""
        return self._bucket.rate

    def pause_s(self, size: int, now: float) -> float:
        """Seconds until ``size`` bytes may go; 0 when they may go at once. More than a burst waits for a full one."""
        if self._closed is None:
            return 0.0
        return self._bucket.pause_s(size, now)

    def give(self, size: int, now: float) -> None:
        """So many bytes go now."""
        self._bucket.take(size, now)
        self._given += size

    def step_closed(self, now: float) -> None:
        """One step of our own work is done."""
        before, given = self._closed, self._given
        self._closed, self._given = now, 0
        if before is None:
            return
        if not given:
            self._quiet.append(now - before)
        elif len(self._quiet) >= _ENOUGH:
            usual = statistics.quantiles(self._quiet, n=4)[2]
            change = SLOWER if now - before > SUFFERS * usual else FASTER
            self._bucket.change(min(self._most, max(self._least, self.bytes_s * change)), now)


# --- answers on their way to one caller ------------------------------------------------------------------------------
# Bounded: a caller that never reads what it asked for holds no more of them.


def _all_alike(body: Any) -> str:
    return ""


FEW = 2


class OpenAnswers:
    """Counts calls from their admission until they are over, the answer's way included: one more than ``most`` of a
    caller and of one ``kind`` is Busy. When there are ``in_all`` a caller has FEW, so that those who read nothing keep
    nobody out, until there are twice as many: identities are free, memory is not. For methods that take no payload:
    give them :meth:`admit` and :meth:`over`.

    The endpoint's own bound is for small answers: as many of some MiB each would be a gigabyte.
    """

    def __init__(self, most: int, in_all: float = math.inf, *, kind: Callable[[Any], str] = _all_alike) -> None:
        self._most, self._in_all, self._kind = most, in_all, kind
        self._open: Counter[tuple[PeerId, str]] = Counter()

    def admit(self, caller: PeerId, body: Any, payload_bytes: int) -> None:
        """See :class:`~swarm.network.protocols.Method`. Raises Busy, and Violation for a payload."""
        if payload_bytes:
            raise Violation("this takes no payload", peer=caller)
        key = caller, self._kind(body)
        if self._open[key] >= self._most:
            raise Busy(f"{self._most} answers to this peer are on their way")
        in_all = self._open.total()
        if in_all >= (2 if self._open[key] < FEW else 1) * self._in_all:
            raise Busy(f"{in_all} answers are on their way")
        self._open[key] += 1

    def over(self, caller: PeerId, body: Any) -> None:
        """See :class:`~swarm.network.protocols.Method`."""
        key = caller, self._kind(body)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


Run = Callable[..., Awaitable[Any]]
"""Runs a function and its arguments off the event loop."""


class DescribeRequest(Message):
    """Ask for the hashes of a state's chunks: the payload of the answer, HASH_BYTES each."""

    part: PartField
    step: Count
    digest: DigestField


class ChunkRequest(DescribeRequest):
    """Ask for one chunk of a state, by its number: the payload of the answer."""

    chunk: Count


DESCRIBE = Rpc("state/1/describe", DescribeRequest, Empty)
CHUNK = Rpc("state/1/chunk", ChunkRequest, Empty)


@dataclass(slots=True, eq=False)
class _Held:
    """A state that is handed out: shared by all who were promised it. Its hashes are made when first asked for, and to
    the end, no matter who hangs up meanwhile."""

    snapshot: Snapshot
    digest: str
    hashes: asyncio.Future[bytes] | None = None

    @property
    def cut(self) -> Cut:
        return Cut.of(self.snapshot.layout)

    def is_called(self, part: str, step: int, digest: str) -> bool:
        return (self.snapshot.part, self.snapshot.step, self.digest) == (part, step, digest)


SLOWEST_BYTES_S = LEAST_BYTES_S / 8
"""Who fetches more slowly, after a first ``lease_s``, makes room when somebody else needs it."""


@dataclass(slots=True, eq=False)
class _Lease:
    """``began`` and ``given`` are the caller's of all states of the part, one after the other: to begin another
    download buys no time."""

    held: _Held
    expires: float
    bytes_left: int
    began: float
    given: int = 0

    def behind_s(self, now: float, lease_s: float) -> float:
        """By how many seconds it is behind what is asked of a download while others wait."""
        return now - self.began - lease_s - self.given / SLOWEST_BYTES_S


class _Lapses:
    """Who let a lease lapse, without having fetched all: it gets none for two leases' time while others were refused
    one, so that it is not the first again whenever one ends. Of REMEMBERED callers at most."""

    REMEMBERED = 64

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lapsed: dict[PeerId, float] = {}
        self._refused = -math.inf

    def lapsed(self, caller: PeerId, now: float) -> None:
        """Its lease ended now."""
        self._lapsed.pop(caller, None)
        self._lapsed[caller] = now
        if len(self._lapsed) > self.REMEMBERED:
            del self._lapsed[next(iter(self._lapsed))]

    def refused(self, now: float) -> None:
        """Somebody got no lease."""
        self._refused = now

    def check(self, caller: PeerId, now: float) -> None:
        """Raises Busy for one that has to let others go first."""
        lapsed = self._lapsed.get(caller, -math.inf)
        if now - lapsed < 2 * self._lease_s and now - self._refused <= self._lease_s:
            raise Busy("others wait for a lease, and this caller let one lapse")


class StateDonor:
    """A service that hands out snapshots. Mount it, and :meth:`offer` every state worth having.

    A caller that described a snapshot has a lease on it: it stays pinned while newer ones are offered, until the
    caller has fetched nothing of it for ``lease_s``. So at most ``max_downloads`` old states are in memory; a further
    caller is Busy, unless one has all, one has several leases, or one is slower than SLOWEST_BYTES_S: that one's lease
    ends then. So nobody keeps others out who does not download. How fast all
    of them together are served is for ``donation`` to say: tell it of every step by :meth:`step_closed`. They take
    turns by chunk, and who has twice the chunks of a part on their way that a download asks for is Busy.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_downloads: int = 4,
        lease_s: float = 60.0,
        donation: Donation | None = None,
        run: Run = asyncio.to_thread,
    ) -> None:
        self._clock, self._max_downloads, self._lease_s = clock, max_downloads, lease_s
        self._donation, self._run = donation or Donation(), run
        self._offers: dict[PartName, _Held] = {}
        self._leases: dict[tuple[PeerId, PartName], _Lease] = {}
        self._lapses = _Lapses(lease_s)
        self._turn = asyncio.Lock()
        self._chunks = OpenAnswers(2 * MAX_WINDOW, kind=lambda asked: asked.part)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        chunks = self._chunks
        return (
            DESCRIBE.handled_with_payload(self._describe),
            CHUNK.handled_with_payload(self._chunk, admit=chunks.admit, over=chunks.over),
        )

    # --- what is handed out --------------------------------------------------------------------------------------

    def offer(self, snapshot: Snapshot, digest: str) -> None:
        """Serve this state of its part from now on. Leases on earlier ones stay valid."""
        self._offers[snapshot.part] = self._shared(snapshot, digest)

    def pin(self, caller: PeerId, snapshot: Snapshot, digest: str) -> None:
        """Keep this state for a caller that is about to download it, whatever is offered meanwhile. Raises Busy."""
        self._expire()
        self._lease((caller, snapshot.part), self._shared(snapshot, digest))

    def pinned(self, part: PartName, step: int) -> Snapshot | None:
        """A state of this step that is kept for somebody, so that others may have it too."""
        self._expire()
        leases = self._leases.values()
        found = (lease.held.snapshot for lease in leases if lease.held.snapshot.part == part)
        return next((snapshot for snapshot in found if snapshot.step == step), None)

    def serves(self, caller: PeerId, part: PartName) -> bool:
        """Return whether a state is kept for this caller."""
        self._expire()
        return (caller, part) in self._leases

    def heard(self, caller: PeerId, part: PartName, *, within_s: float) -> bool:
        """Return whether it has asked for a state that is kept for it, or for more of one, so short a time ago."""
        lease = self._leases.get((caller, part))
        return lease is not None and lease.expires > self._clock.monotonic() + self._lease_s - within_s

    def keeps_up(self, caller: PeerId, since: float) -> bool:
        """Return whether it has downloaded a state since then, no more slowly than it may while others wait, and is not
        done. A lease that began later buys no time."""
        self._expire()
        seconds = self._clock.monotonic() - since - self._lease_s
        leases = (lease for (peer, _), lease in self._leases.items() if peer == caller)
        return any(lease.bytes_left > 0 and seconds <= lease.given / SLOWEST_BYTES_S for lease in leases)

    def release(self, caller: PeerId, part: PartName) -> None:
        """The caller has what it came for: keep nothing for it any more."""
        self._leases.pop((caller, part), None)

    def tidy(self) -> None:
        """Drop what is kept for callers that fell silent: without it, a state stays until the next one asks."""
        self._expire()

    def step_closed(self) -> None:
        """One step of this peer's own work is done: did it suffer?"""
        self._donation.step_closed(self._clock.monotonic())

    def withdraw(self, part: PartName) -> None:
        """Offer nothing of a part any more. Leases of downloads under way stay valid; those that had every byte end,
        for nothing would ever come to drop their state."""
        self._offers.pop(part, None)
        self._leases = {key: lease for key, lease in self._leases.items() if key[1] != part or lease.bytes_left > 0}

    @property
    def downloads(self) -> int:
        """Leases of callers that have not had every byte yet."""
        self._expire()
        return sum(lease.bytes_left > 0 for lease in self._leases.values())

    def serves_others(self, caller: PeerId) -> bool:
        """Return whether anybody but this caller has not had every byte yet."""
        self._expire()
        return any(lease.bytes_left > 0 for (peer, _), lease in self._leases.items() if peer != caller)

    def _shared(self, snapshot: Snapshot, digest: str) -> _Held:
        held = [lease.held for lease in self._leases.values()] + list(self._offers.values())
        same = (one for one in held if one.is_called(snapshot.part, snapshot.step, digest))
        return next(same, None) or _Held(snapshot, digest)

    # --- answers -------------------------------------------------------------------------------------------------

    async def _describe(self, caller: PeerId, asked: DescribeRequest, incoming: Incoming) -> Answer[Empty]:
        key = caller, PartName(asked.part)
        self._expire()
        lease = self._leases.get(key)
        if lease is None or not lease.held.is_called(asked.part, asked.step, asked.digest):
            lease = self._lease(key, self._offered(asked))
        return Answer(Empty(), await self._hashes(lease.held))

    async def _hashes(self, held: _Held) -> bytes:
        if held.hashes is None or (held.hashes.done() and _failed(held.hashes)):
            held.hashes = asyncio.ensure_future(self._run(hashes_of, held.snapshot.buffers()))
            held.hashes.add_done_callback(_failed)  # nobody may be left to hear of it
        return await asyncio.shield(held.hashes)

    def _offered(self, asked: DescribeRequest) -> _Held:
        held = self._offers.get(PartName(asked.part))
        if held is None:
            raise Refused(f"{asked.part} is not held here")
        if not held.is_called(asked.part, asked.step, asked.digest):
            raise WrongStep(
                f"{asked.part} is at step {held.snapshot.step} with digest {held.digest[:12]}… here, not at step "
                f"{asked.step} with {asked.digest[:12]}…"
            )
        return held

    def _lease(self, key: tuple[PeerId, PartName], held: _Held) -> _Lease:
        now, before = self._clock.monotonic(), self._leases.get(key)
        if before is None:
            self._lapses.check(key[0], now)
            if len(self._leases) >= self._max_downloads:
                self._end(self._dispensable(key[0]))
        lease = _Lease(held, now + self._lease_s, held.cut.total_bytes, now)
        if before is not None:
            lease.began, lease.given = before.began, before.given
        self._leases[key] = lease
        return lease

    def _dispensable(self, caller: PeerId) -> tuple[PeerId, PartName]:
        """Return whose lease ends when this caller needs one. Raises Busy."""
        now, leases = self._clock.monotonic(), self._leases
        finished = next((key for key, lease in leases.items() if lease.bytes_left <= 0), None)
        if finished is not None:
            return finished
        held = Counter(peer for peer, _ in leases)
        behind = {key: lease.behind_s(now, self._lease_s) for key, lease in leases.items()}
        several = [key for key in leases if held[key[0]] > 1 and caller not in held]
        late = [key for key in leases if behind[key] > 0]
        if not (several or late):
            self._lapses.refused(now)
            raise Busy(f"{len(leases)} downloads are under way")
        return max(several or late, key=lambda key: behind[key])

    async def _chunk(self, caller: PeerId, asked: ChunkRequest, incoming: Incoming) -> Answer[Empty]:
        self._expire()
        lease = self._leases.get((caller, PartName(asked.part)))
        if lease is None or not lease.held.is_called(asked.part, asked.step, asked.digest):
            raise WrongStep(f"no lease on {asked.part} at step {asked.step}: describe it first")
        chunk = chunk_asked(lease.held.cut, asked)
        lease.expires = self._clock.monotonic() + self._lease_s
        await self._allowed(chunk.length)
        lease.expires = self._clock.monotonic() + self._lease_s
        lease.bytes_left -= chunk.length
        lease.given += chunk.length
        vector = lease.held.snapshot.buffers()[chunk.vector]
        # a copy: the part may write there once the snapshot is let go, and the lease may end while this is sent
        return Answer(Empty(), bytes(vector[chunk.start : chunk.start + chunk.length]))

    async def _allowed(self, size: int) -> None:
        """Wait until so many bytes may go; who hangs up before has taken nothing from the others."""
        async with self._turn:
            pause_s = self._donation.pause_s(size, self._clock.monotonic())
            if pause_s > 0:
                await self._clock.sleep(pause_s)
            self._donation.give(size, self._clock.monotonic())

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, lease in self._leases.items() if lease.expires <= now]:
            self._end(key)

    def _end(self, key: tuple[PeerId, PartName]) -> None:
        if self._leases.pop(key).bytes_left > 0:
            self._lapses.lapsed(key[0], self._clock.monotonic())


def chunk_asked(cut: Cut, asked: ChunkRequest) -> Chunk:
    """Return the chunk of a request. Raises Violation for a number that is none."""
    if asked.chunk >= cut.chunks:
        raise Violation(f"chunk {asked.chunk} of {cut.chunks}")
    return cut[asked.chunk]


def _failed(work: asyncio.Future[bytes]) -> bool:
    return work.cancelled() or work.exception() is not None
