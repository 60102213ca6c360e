"""Assign the chunks of a download to donors (pure): a free donor gets the next, so fast donors give more."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.waiting import AdaptiveDeadline

MAX_WINDOW = 8
"""Chunks asked of one donor at once: 8 MiB under way fill a link of 640 Mbit/s with 100 ms round trip."""
QUICK_S, SLOW_S = 1.0, 4.0
"""A donor whose chunks take less is asked for one more at once, one whose chunks take longer for one less: so a slow
link is never given more than it can bring before the deadline."""
LATE = 2.0
"""A chunk that is under way for so many times as long as another donor usually takes is asked of that one, too."""
FLOOR_S, CEILING_S = 5.0, 120.0
_RECENT = 16

DonorT = TypeVar("DonorT")


@dataclass(slots=True)
class _Pace:
    """One donor's chunks in flight (chunk -> start time), and its speed."""

    window: int = 1
    under_way: dict[int, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    deadline: AdaptiveDeadline = field(default_factory=lambda: AdaptiveDeadline(FLOOR_S, CEILING_S))

    @property
    def late_s(self) -> float | None:
        """The seconds after which another donor's chunk is late by this one's pace; None before it brought one."""
        return LATE * statistics.median(self.recent) if self.recent else None

    def took(self, seconds: float) -> None:
        self.recent.append(seconds)
        self.deadline.observe(seconds)
        if seconds < QUICK_S:
            self.window = min(self.window + 1, MAX_WINDOW)
        elif seconds > SLOW_S:
            self.window = max(self.window - 1, 1)


class Sharing(Generic[DonorT]):
    """The chunks of one download, and the donors among which they are shared. All times are of one monotonic clock."""

    def __init__(self, chunks: int) -> None:
        self._open = deque(range(chunks))
        self._missing = set(self._open)
        self._donors: dict[DonorT, _Pace] = {}

    @property
    def complete(self) -> bool:
        """True if every chunk is here."""
        return not self._missing

    @property
    def donors(self) -> tuple[DonorT, ...]:
        """Those that are ready to give."""
        return tuple(self._donors)

    def found(self, chunks: Collection[int]) -> None:
        """These need nobody to bring them: they are here already, and right."""
        self._missing.difference_update(chunks)
        self._open = deque(chunk for chunk in self._open if chunk in self._missing)

    def joined(self, donor: DonorT) -> None:
        """A donor is ready to give; what is known of its speed from an earlier time is forgotten."""
        self._donors[donor] = _Pace()

    def left(self, donor: DonorT) -> None:
        """It gives no more. What was under way there is asked of others first."""
        pace = self._donors.pop(donor, None)
        for chunk in () if pace is None else pace.under_way:
            if chunk in self._missing and not self._holders(chunk):
                self._open.appendleft(chunk)

    def next(self, donor: DonorT, now: float) -> int | None:
        """The chunk to ask of this donor now, which counts as under way there; None when there is none for it."""
        pace = self._donors[donor]
        if len(pace.under_way) >= pace.window:
            return None
        while self._open:
            chunk = self._open.popleft()
            if chunk in self._missing:
                break
        else:
            late = [(since, chunk) for since, chunk in self._doublable(donor, pace) if since <= now]
            if not late:
                return None
            chunk = min(late)[1]
        pace.under_way[chunk] = now
        return chunk

    def arrived(self, donor: DonorT, chunk: int, now: float) -> bool:
        """A chunk is here, and right; False when another donor's copy came first."""
        pace = self._donors.get(donor)
        if pace is not None and chunk in pace.under_way:
            pace.took(now - pace.under_way.pop(chunk))
        first = chunk in self._missing
        self._missing.discard(chunk)
        return first

    def called_off(self, donor: DonorT, chunk: int) -> None:
        """Cancel this donor's request for a chunk: another donor brought it."""
        pace = self._donors.get(donor)
        if pace is not None:
            pace.under_way.pop(chunk, None)

    def deadline_s(self, donor: DonorT) -> float:
        """Return the seconds to wait for this donor's next chunk: measured, see :class:`AdaptiveDeadline`."""
        return self._donors[donor].deadline.seconds()

    def look_again_s(self, now: float) -> float | None:
        """In how many seconds :meth:`next` may have something for a donor that has none now, though nothing arrives;
        None when only an arrival or a failure changes anything."""
        if self._open:
            return None
        idle = [(donor, pace) for donor, pace in self._donors.items() if len(pace.under_way) < pace.window]
        due = [late for donor, pace in idle for late, _ in self._doublable(donor, pace)]
        return max(0.0, min(due) - now) if due else None

    def _doublable(self, donor: DonorT, pace: _Pace) -> Iterator[tuple[float, int]]:
        """(late from when on, chunk) of what one other donor alone has under way."""
        late_s = pace.late_s
        if late_s is None:
            return
        for other, its in self._donors.items():
            if other != donor:
                for chunk, since in its.under_way.items():
                    if chunk not in pace.under_way and self._holders(chunk) == 1:
                        yield since + late_s, chunk

    def _holders(self, chunk: int) -> int:
        return sum(chunk in pace.under_way for pace in self._donors.values())
