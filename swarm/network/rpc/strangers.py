"""Bounds on what peers that are no members of the run may cost: identities are free, so all of them share one budget.

Nobody is turned away for calling too often: reading from the stream pauses until the budget has room, as TCP does, so a
peer that joins slows down with the rest. A peer that sends more than :data:`MAX_AHEAD` frames into a pause is cut off,
and may open no stream for :data:`BARRED_S`: an identity costs nothing, but each needs a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.clock import Clock
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.waiting import TokenBucket

MAX_STRANGER_BODY_BYTES = 64 << 10
"""Of one request. What a peer says before it is a member, its request to join included, is below two kilobytes."""

FRAMES_S, FRAMES_AT_ONCE = 125.0, 250.0
"""Of one stream. A download asks for 64 chunks a second at most (``swarm.state.transfer``)."""

ALL_FRAMES_S, ALL_AT_ONCE = 250.0, 500.0
"""Of all strangers together: some 5 % of one core, unless they have many streams, each of which pauses by itself."""

EXPECTED_FRAMES_S = 20.0
"""More of all together for each peer that is expected to join: they poll, and they download."""

BYTES_A_FRAME = 16 << 10
"""A frame counts as one, and as one more for so many bytes of content."""

STREAM_FRAMES = 4.0
"""What a new stream counts as."""

LONGEST_PAUSE_S = 5.0
"""A stream never pauses for longer because of others: what they owe is theirs."""

MAX_AHEAD = 64
"""Frames that a stream may deliver while it pauses: what a joiner may have asked in one go."""


BARRED_S, MAX_BARRED = 30.0, 1024

QUESTIONS_S, QUESTIONS_AT_ONCE = 10.0, 40.0
"""To the directory, of one stranger: a joiner asks some ten as it enters, and one every few seconds then."""

ALL_QUESTIONS_S, ALL_QUESTIONS_AT_ONCE = 100.0, 200.0
"""Of all strangers together: each takes a millisecond, and more with what is told or asked (BYTES_A_FRAME)."""

LONGEST_WAIT_S = 1.0
"""A question that would wait for longer is refused: who asked gives up after two seconds."""

MAX_ASKING = 1024
"""Strangers whose questions are counted apart."""


class StrangerBudget:
    """What all strangers together may send. ``known`` tells who is no stranger; nobody is one until it is set.

    ``expected`` peers are to join. Times are of ``clock``'s steady one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._barred: dict[PeerId, float] = {}
        self._all = TokenBucket(ALL_FRAMES_S, ALL_AT_ONCE)
        self.known: Callable[[PeerId], bool] = lambda peer: True

    def expect(self, peers: int) -> None:
        """Leave room for so many peers that are to join."""
        self._all.change(ALL_FRAMES_S + peers * EXPECTED_FRAMES_S, self._clock.monotonic())

    def bar(self, peer: PeerId) -> None:
        """Serve no stream that this peer opens for a while. Of too many the one barred first is forgotten."""
        self._barred.pop(peer, None)
        self._barred[peer] = self._clock.monotonic() + BARRED_S
        if len(self._barred) > MAX_BARRED:
            del self._barred[next(iter(self._barred))]

    def barred(self, peer: PeerId) -> bool:
        """Return whether streams of this peer are not served now."""
        return self._barred.get(peer, 0.0) > self._clock.monotonic() and not self.known(peer)

    def stream(self) -> StreamBudget:
        """Return the budget of one new stream, whose opening counts with its first frame."""
        budget = StreamBudget(self._clock, self._all)
        budget.pause_s(0, frames=STREAM_FRAMES)
        return budget


class StreamBudget:
    """The share of one stranger's stream."""

    def __init__(self, clock: Clock, everybody: TokenBucket) -> None:
        self._clock, self._all = clock, everybody
        self._own = TokenBucket(FRAMES_S, FRAMES_AT_ONCE)

    def pause_s(self, content_bytes: int, *, frames: float = 1.0) -> float:
        """Count a frame; return for how many seconds nothing more of this stream may be read, 0 for none."""
        now, cost = self._clock.monotonic(), frames + content_bytes / BYTES_A_FRAME
        self._own.take(cost, now)
        if self._all.pause_s(0, now) < LONGEST_PAUSE_S:  # or those that come later would pay for a flood that is over
            self._all.take(cost, now)
        return max(self._own.pause_s(0, now), min(self._all.pause_s(0, now), LONGEST_PAUSE_S))


class QuestionBudget:
    """What strangers may ask our directory, which answers calls that are no streams. ``known`` tells who is no
    stranger; nobody is one until it is set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = TokenBucket(ALL_QUESTIONS_S, ALL_QUESTIONS_AT_ONCE)
        self._each: dict[PeerId, TokenBucket] = {}
        self.known: Callable[[PeerId], bool] = lambda peer: True

    async def admit(self, peer: PeerId, size: int) -> None:
        """Count a question of ``size`` bytes, and wait until it may be answered, LONGEST_WAIT_S at most. Raises Busy
        for one that would have to wait for longer, which is not counted."""
        if self.known(peer):
            return
        now, cost = self._clock.monotonic(), 1 + size / BYTES_A_FRAME
        own = self._bucket(peer)
        pause_s = max(own.pause_s(cost, now), self._all.pause_s(cost, now))
        if pause_s > LONGEST_WAIT_S:
            raise Busy("more questions than peers that are no members may ask", peer=peer)
        own.take(cost, now)
        self._all.take(cost, now)
        if pause_s:
            await self._clock.sleep(pause_s)

    def answered(self, peer: PeerId, size: int) -> None:
        """Count the bytes of an answer: a directory that is full has megabytes to tell."""
        if not self.known(peer):
            now = self._clock.monotonic()
            self._bucket(peer).take(size / BYTES_A_FRAME, now)
            self._all.take(size / BYTES_A_FRAME, now)

    def _bucket(self, peer: PeerId) -> TokenBucket:
        """That of a peer; of too many the one that asked first is forgotten."""
        bucket = self._each.pop(peer, None) or TokenBucket(QUESTIONS_S, QUESTIONS_AT_ONCE)
        self._each[peer] = bucket
        if len(self._each) > MAX_ASKING:
            del self._each[next(iter(self._each))]
        return bucket
