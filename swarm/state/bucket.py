"""How many bytes may go now, so that all of them together keep to a rate (pure)."""

from __future__ import annotations

BURST_BYTES = 8 << 20


class Bucket:
    """A token bucket: ``bytes_s``, which may change at any time, and a burst that may go at once. Times are of one
    monotonic clock."""

    def __init__(self, bytes_s: float) -> None:
        self._rate, self._allowed, self._since = bytes_s, float(BURST_BYTES), 0.0

    @property
    def bytes_s(self) -> float:
        """The rate at this time."""
        return self._rate

    def change(self, bytes_s: float, now: float) -> None:
        """Another rate from now on."""
        self._refill(now)
        self._rate = bytes_s

    def pause_s(self, size: int, now: float) -> float:
        """Seconds until ``size`` bytes may go; 0 when they may go at once. More than a burst waits for a full one."""
        self._refill(now)
        missing = min(size, BURST_BYTES) - self._allowed
        return missing / self._rate if missing >= 1.0 else 0.0  # less is rounding, too short for a clock to show

    def take(self, size: int, now: float) -> None:
        """So many bytes go now."""
        self._refill(now)
        self._allowed -= size

    def _refill(self, now: float) -> None:
        self._allowed = min(float(BURST_BYTES), self._allowed + (now - self._since) * self._rate)
        self._since = now
