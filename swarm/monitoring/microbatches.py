"""Where a run's microbatches went: the account that must balance, whatever failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from swarm.events import Committed, JourneyCompleted, JourneyStarted, StepClosed
from swarm.ids import MicrobatchId
from swarm.monitoring.reader import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAccount:
    """Where the microbatches went: ``issued`` and ``unknown`` together are ``committed``, ``lost``, ``open`` and
    ``unlisted`` together, as sets of distinct microbatches; one issued for several steps is judged by the last.

    ``lost`` were issued for a step whose list of committed ones leaves them out, and are in no other list. ``open``
    were issued for a step that did not close. ``unlisted`` were issued for one that closed though no event lists what
    it counts (its leader's are missing), so their end is not known. ``duplicated`` were committed more than once, which
    must not be; ``unknown`` were committed though nobody said they were issued (their trainer's events are missing).
    """

    issued: frozenset[MicrobatchId]
    completed: frozenset[MicrobatchId]
    committed: frozenset[MicrobatchId]
    lost: frozenset[MicrobatchId]
    open: frozenset[MicrobatchId]
    unlisted: frozenset[MicrobatchId]
    duplicated: frozenset[MicrobatchId]
    unknown: frozenset[MicrobatchId]


class Microbatches:
    """Counts every microbatch issued, and its end. Events may come in any order."""

    def __init__(self) -> None:
        self._issued_for: dict[MicrobatchId, int] = {}
        self._completed: set[MicrobatchId] = set()
        self._lists: dict[int, Counter[MicrobatchId]] = defaultdict(Counter)
        self._closed_through = 0

    def add(self, record: Recorded) -> None:
        """Take one event into account, at a cost that does not grow with the run."""
        match record.event:
            case JourneyStarted(microbatch=microbatch, step=step):
                self._issued_for[microbatch] = max(step, self._issued_for.get(microbatch, 0))
            case JourneyCompleted(microbatch=microbatch):
                self._completed.add(microbatch)
            case Committed(microbatches=listed, step=step):
                # A leader and its successor may both write a step's set: their union, not their sum.
                self._lists[step] |= Counter(listed)
                self._closed_through = max(self._closed_through, step)
            case StepClosed(step=step):
                self._closed_through = max(self._closed_through, step)

    def account(self) -> MicrobatchAccount:
        """Where they all went. Cost: a pass over all microbatches."""
        times: Counter[MicrobatchId] = Counter()
        for listed in self._lists.values():
            times.update(listed)
        ends: dict[str, set[MicrobatchId]] = {"lost": set(), "open": set(), "unlisted": set()}
        for microbatch, step in self._issued_for.items():
            if microbatch not in times:
                ends[self._end_in(step)].add(microbatch)
        issued, committed = frozenset(self._issued_for), frozenset(times)
        return MicrobatchAccount(
            issued=issued,
            completed=frozenset(self._completed),
            committed=committed,
            lost=frozenset(ends["lost"]),
            open=frozenset(ends["open"]),
            unlisted=frozenset(ends["unlisted"]),
            duplicated=frozenset(one for one, count in times.items() if count > 1),
            unknown=committed - issued,
        )

    def _end_in(self, step: int) -> str:
        """What became of a microbatch issued for a step that does not count it. Steps close in order, so one that a
        later closing follows has closed too."""
        if step in self._lists:
            return "lost"
        return "unlisted" if step <= self._closed_through else "open"
