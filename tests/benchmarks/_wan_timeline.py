"""Where a stage host's device time goes in the benchmark ``wan``, from what was observed of one step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

USEFUL = "useful"
KINDS = ("fill", "starved", "drain", "reconcile", "round", "norm", "close")
"""What device time is lost to, in the order in which a step has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """One step as one stage host had it, in seconds of the world's clock.

    Attributes:
        opened: The step before closed here.
        full: Its leader asked the first member to reconcile: the batch was complete.
        summed: This host's sum held what counts, and its part's round began.
        averaged: The round was done here.
        proposed: The leader proposed the record: all had computed their update.
        closed: This host swapped to the decided weights.
        busy: When its device worked, in order and without overlaps.
    """

    opened: float
    full: float
    summed: float
    averaged: float
    proposed: float
    closed: float
    busy: Sequence[Interval]


def breakdown(step: HostStep) -> dict[str, float]:
    """Return the seconds between opening and closing by what the device had them for, 0 included; they add up to all.

    ``useful`` is when it worked, whenever that was. Idle time counts by when it is: ``fill`` before the host's first
    work, ``starved`` between its works, ``drain`` after its last until the batch is full, then ``reconcile``,
    ``round``, ``norm`` (sums of norms, the update and its digest) and ``close`` (proposal, decision, swap).
    """
    early = [one for one in _within(step.busy, step.opened, step.full) if one[1] > one[0]]
    first = early[0][0] if early else step.full
    last = early[-1][1] if early else step.full
    ends = (first, last, step.full, step.summed, step.averaged, step.proposed, step.closed)
    seconds = {USEFUL: _length(_within(step.busy, step.opened, step.closed))}
    begin = step.opened
    for kind, end in zip(KINDS, ends, strict=True):
        end = min(max(begin, end), step.closed)
        seconds[kind] = end - begin - _length(_within(step.busy, begin, end))
        begin = end
    return seconds


def shares(steps: Iterable[HostStep]) -> dict[str, float]:
    """Return the share of all hosts' time, in all steps, that each kind has; they add up to 1. Raises ValueError when
    there are no steps."""
    total: Counter[str] = Counter()
    for step in steps:
        total.update(breakdown(step))
    wall = sum(total.values())
    if wall <= 0:
        raise ValueError("no step was seen from its opening to its closing")
    return {kind: total[kind] / wall for kind in (USEFUL, *KINDS)}


def marked(
    opened: Mapping[int, float], marks: Mapping[str, Mapping[int, float]], busy: Sequence[Interval], step: int
) -> HostStep | None:
    """Return a step of one host from observations by step number; None where one is missing.

    Args:
        opened: When each step opened at the host; the next one's is when this one closed.
        marks: When each of the other moments of :class:`HostStep` was, by its name.
        busy: All intervals of the host's device, in order.
        step: Which.
    """
    if step not in opened or step + 1 not in opened or any(step not in when for when in marks.values()):
        return None
    begin, end = opened[step], opened[step + 1]
    inside = _within(busy, begin, end)
    return HostStep(opened=begin, closed=end, busy=inside, **{name: when[step] for name, when in marks.items()})


def _within(busy: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(start, begin), min(stop, end)) for start, stop in busy if stop > begin and start < end]


def _length(busy: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in busy)
