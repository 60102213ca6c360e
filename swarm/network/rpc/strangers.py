"""Bounds on what peers that are no members of the run may cost: identities are free, so all of them share one budget.

Nobody is turned away for calling too often: reading from the stream pauses until the budget has room, as TCP does, so a
peer that joins slows down with the rest. A peer that sends more than :data:`MAX_AHEAD` frames into a pause is cut off,
and may open no stream for :data:`BARRED_S`: an identity costs nothing, but each needs a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.clock import Clock
from swarm.ids import PeerId
from swarm.waiting import TokenBucket

MAX_STRANGER_BODY_BYTES = 64 << 10
"""Of one request. What a peer says before it is a member, its request to join included, is below two kilobytes."""

FRAMES_S, FRAMES_AT_ONCE = 125.0, 250.0
"""Of one stream. A download asks for 64 chunks a second at most (``swarm.state.donation``)."""

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
        """Whether streams of this peer are not served now."""
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
