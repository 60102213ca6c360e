"""Measure the links to the other members from a round's own traffic; nothing is sent for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from swarm.ids import PeerId
from swarm.schema import MAX_BYTES_PER_S, MAX_LATENCY_US

MEASURED_BYTES = 64 << 10
"""A smaller payload says more about latency than about bandwidth."""


class LinkMeasurement(NamedTuple):
    """The link to one other member: microseconds one way, and the rate of its payloads in bytes a second while any was
    in flight; 0 where there is no measurement."""

    latency_us: int
    bytes_per_s: int


class RoundMeter:
    """One round's. Pure; times are seconds of one clock."""

    def __init__(self) -> None:
        self._latency_s: dict[PeerId, float] = {}
        self._coming: Counter[PeerId] = Counter()
        self._since: dict[PeerId, float] = {}
        self._busy_s: dict[PeerId, float] = {}
        self._bytes: Counter[PeerId] = Counter()

    def answered(self, peer: PeerId, seconds: float) -> None:
        """A question that takes the other no time was answered: there and back."""
        self._latency_s[peer] = seconds / 2

    def begins(self, peer: PeerId, size: int, now: float) -> None:
        """A payload has been let in. Those that come at the same time share the link, so their time counts once."""
        if size >= MEASURED_BYTES:
            if not self._coming[peer]:
                self._since[peer] = now
            self._coming[peer] += 1

    def arrived(self, peer: PeerId, size: int, now: float) -> None:
        """It is there."""
        if size < MEASURED_BYTES or not self._coming[peer]:
            return
        self._bytes[peer] += size
        self._coming[peer] -= 1
        self._busy_s[peer] = self._busy_s.get(peer, 0.0) + now - self._since[peer]
        self._since[peer] = now

    def heard(self) -> Mapping[PeerId, LinkMeasurement]:
        """Return the measurements so far."""
        return {
            peer: LinkMeasurement(_bounded(latency_s * 1e6, MAX_LATENCY_US), self._rate(peer))
            for peer, latency_s in self._latency_s.items()
        }

    def _rate(self, peer: PeerId) -> int:
        busy_s = self._busy_s.get(peer, 0.0)
        return _bounded(self._bytes[peer] / busy_s, MAX_BYTES_PER_S) if busy_s > 0 else 0


def heard_in_all(rounds: Iterable[Mapping[PeerId, LinkMeasurement]]) -> dict[PeerId, LinkMeasurement]:
    """Merge several rounds' measurements of each member. The best counts: a member met twice may have sent nothing
    worth clocking the second time, and what else goes on only ever makes a link look worse."""
    best: dict[PeerId, LinkMeasurement] = {}
    for peer, one in (item for heard in rounds for item in heard.items()):
        other = best.get(peer, one)
        latencies = [each.latency_us for each in (one, other) if each.latency_us]
        best[peer] = LinkMeasurement(min(latencies, default=0), max(one.bytes_per_s, other.bytes_per_s))
    return best


def _bounded(value: float, most: int) -> int:
    return max(1, int(min(value, most)))
