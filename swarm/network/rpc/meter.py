"""Count the bytes of an endpoint's streams by peer, and keep them within the rates that its owner set.

A rate is a token bucket, filled with so many bytes a second and emptied by what is sent or received. It may be
overdrawn: a chunk goes once the bucket is not empty, and the next one waits until that is paid for. Small frames go
on into a reserve below, so that a heartbeat or a vote does not wait behind a payload; they wait when they alone
exceed the rate. Then a payload goes, too, now and then: it waits for a bounded time. Times are the running loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.network.protocols import LinkStatistics
from swarm.network.rpc.framing import CHUNK_BYTES
from swarm.waiting import TokenBucket

MAX_METERED = 4096
"""Peers whose bytes are counted apart, of all that were ever met."""

SMALL_BYTES = 64 << 10
"""A frame of at most so many bytes that is no chunk of a payload is control, which goes before payloads."""

READ_BYTES = 64 << 10
"""One read from a stream with a limited rate takes at most so much."""

BURST_S = 0.25
"""A stream that was idle may send what the rate allows for so long at once; small frames so much beyond a payload."""

TURN_S = 0.001
"""Between two streams that go on being read: so that the first has been read when the second is looked at."""

MIN_RATE = 125_000
"""Bytes a second, 1 Mbit/s. Below it the largest frame would not arrive within the time that a receiver gives it."""


class _Counts(dict[PeerId, int]):
    """Numbers by peer, 0 at first. Before there are too many, those with the least become one, that of no peer."""

    def __missing__(self, peer: PeerId) -> int:
        if len(self) >= MAX_METERED:
            nobody = PeerId("")
            least = sorted(self.keys() - {nobody}, key=self.__getitem__)[: MAX_METERED // 2]
            self[nobody] = self.get(nobody, 0) + sum(map(self.pop, least))
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Bytes a second that a peer may send and receive in its calls; None: as many as go. At least MIN_RATE."""

    upload: float | None = None
    download: float | None = None

    @property
    def any(self) -> bool:
        """Return whether there is one."""
        return self.upload is not None or self.download is not None


class _Tokens:
    """A bucket for a rate, overdrawn by whole frames: a payload goes once nothing is owed, small frames as long as no
    more is owed than the ``reserve``, and a payload that has waited for ``patience_s`` as those do."""

    def __init__(self, rate: float) -> None:
        burst = max(float(CHUNK_BYTES), rate * BURST_S)
        self._bucket, self._reserve = TokenBucket(rate, burst), CHUNK_BYTES + burst
        self.patience_s = 2 * self._reserve / rate  # twice what paying for all that can be owed takes, with no control

    def wait_s(self, now: float, *, small: bool) -> float:
        """Return the seconds until a frame may go."""
        return self._bucket.pause_s(-self._reserve if small else 0.0, now)

    def spend(self, size: int, now: float) -> None:
        """Count what goes."""
        self._bucket.take(size, now)


class SendRate:
    """Lets frames of all streams go at a rate: small ones first, payloads in the order in which they came.

    In any T seconds at most ``rate * T`` bytes go, and once beyond that the burst, the reserve and one frame.
    """

    def __init__(self, rate: float) -> None:
        self._tokens = _Tokens(rate)
        self._small, self._large = asyncio.Lock(), asyncio.Lock()

    async def turn(self, size: int, *, payload: bool, lost: Callable[[], bool]) -> None:
        """Return when a frame of ``size`` bytes may be written, a chunk of a ``payload`` or another; it is counted
        then. Returns as soon as its turn comes, too, when its stream is ``lost``, and counts no more of it. Cancelled
        before that, what was counted of a frame larger than a chunk stays so."""
        if size <= SMALL_BYTES and not payload:
            async with self._small:
                await self._take(size, lost, small=True)
            return
        async with self._large:
            for begin in range(0, size, CHUNK_BYTES):
                await self._take_large(min(CHUNK_BYTES, size - begin), lost)

    def gone(self, size: int) -> None:
        """So many bytes went without a turn: what comes after them waits for it."""
        self._tokens.spend(size, asyncio.get_running_loop().time())

    async def _take_large(self, size: int, lost: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._tokens.patience_s):
                await self._take(size, lost, small=False)
        except TimeoutError:
            async with self._small:  # behind those that wait there now, and before those that come
                await self._take(size, lost, small=True)

    async def _take(self, size: int, lost: Callable[[], bool], *, small: bool) -> None:
        loop = asyncio.get_running_loop()
        while not lost():
            wait_s = self._tokens.wait_s(loop.time(), small=small)
            if wait_s <= 0:
                self._tokens.spend(size, loop.time())
                return
            await asyncio.sleep(wait_s)


class ReceiveRate:
    """Has streams read no faster than a rate, all together: one that brings a payload beyond it is held, and released
    in turn. One that brings small frames is held only when the reserve is used up, too; while those alone use up the
    rate, one that is held is released all the same, now and then.

    What is not read fills the buffers between the sender and us, and then makes the sender wait.
    """

    def __init__(self, rate: float) -> None:
        self._tokens = _Tokens(rate)
        self._held: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # the last release, or when the first was held

    def came(self, size: int, *, payload: bool) -> bool:
        """Count received bytes. Returns whether their stream is to be held now."""
        now = asyncio.get_running_loop().time()
        self._tokens.spend(size, now)
        return self._tokens.wait_s(now, small=not payload) > 0

    def hold(self, stream: object, release: Callable[[], None]) -> None:
        """Call ``release`` when it is the stream's turn to be read again."""
        self._held[stream] = release
        if self._timer is None:
            self._since = asyncio.get_running_loop().time()
            self._look()

    def holds(self, stream: object) -> bool:
        """Return whether it is held."""
        return stream in self._held

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(TURN_S, self._wait_s(loop.time())), self._next)

    def _next(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        if self._wait_s(now) <= 0:
            self._since = now
            self._held.pop(next(iter(self._held)))()
        if self._held:
            self._look()

    def _wait_s(self, now: float) -> float:
        """The seconds until one that is held may be released."""
        in_the_end_s = max(self._since + self._tokens.patience_s - now, self._tokens.wait_s(now, small=True))
        return min(self._tokens.wait_s(now, small=False), in_the_end_s)


class ByteMeter:
    """Bytes by remote peer, for the life of an endpoint; of very many peers, those with the least only in the sum.

    With ``limits`` it also says when the streams may go on. ``me`` is who has no limit: this very peer.
    """

    def __init__(self, limits: RateLimits | None = None, me: PeerId | None = None) -> None:
        limits = limits or RateLimits()
        self.sent = _Counts()
        self.sent_by: dict[str, _Counts] = {}
        self.received = _Counts()
        self._sending = None if limits.upload is None else SendRate(limits.upload)
        self._receiving = None if limits.download is None else ReceiveRate(limits.download)
        self._me = me

    def sends_bytes(self, peer: PeerId, size: int, method: str) -> None:
        """Count what is sent for a call of a method, asked or answered: of those only that are called or served here,
        so that no peer adds names; "" for what is said of no call."""
        self.sent[peer] += size
        self.sent_by.setdefault(method, _Counts())[peer] += size

    def statistics(self) -> LinkStatistics:
        """A copy; by method as it is when one looks, for that is many numbers, and each heartbeat asks for the rest."""
        return LinkStatistics(dict(self.sent), dict(self.received), self.sent_by)

    def sends(self, peer: PeerId) -> SendRate | None:
        """The rate at which streams to this peer send; None: any."""
        return None if peer == self._me else self._sending

    def receives(self, peer: PeerId) -> ReceiveRate | None:
        """The rate at which streams of this peer are read; None: any."""
        return None if peer == self._me else self._receiving
