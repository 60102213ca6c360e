"""Fold a run's events into answers: steps, traffic, digests, population, and where its microbatches went.

Each question is one :class:`View`: give it every peer's events one by one, in any order, and ask at any time. Adding an
event costs the same however long the run is; asking costs what its docstring says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarm.events import (
    Committed,
    DigestMismatch,
    JourneyCompleted,
    JourneyStarted,
    LinkUsage,
    StepClosed,
)
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.monitoring.reader import Recorded


class View(Protocol):
    """A fold over events; kinds that do not matter to it are passed over."""

    def add(self, record: Recorded) -> None:
        """Take one event into account."""


ViewT = TypeVar("ViewT", bound=View)


def fold(view: ViewT, events: Iterable[Recorded]) -> ViewT:
    """Give a view all of these events, and return it."""
    for record in events:
        view.add(record)
    return view


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One closed step. ``closed_at`` is the earliest swap by the writers' wall clocks, ``seconds`` the longest anybody
    took, ``swapped`` who wrote one; ``loss`` is nats per target token, of which there are ``tokens`` among the
    ``computed``."""

    step: int
    loss: float
    tokens: int
    computed: int
    microbatches: int
    grad_norm: float
    clip: float
    lr: float
    digests: dict[str, str]
    seconds: float
    closed_at: float
    swapped: frozenset[PeerId]

    @property
    def given_up(self) -> bool:
        """True if nothing of it counts: see :class:`swarm.events.StepGivenUp`."""
        return not self.microbatches

    @property
    def tokens_per_s(self) -> float:
        """Target tokens per second of the step's own duration."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Closing:
    event: StepClosed
    seconds: float
    closed_at: float
    swapped: set[PeerId]


class StepTable:
    """The closed steps. ``last`` is the newest one's number, 0 before the first."""

    def __init__(self) -> None:
        self.last = 0
        self._closings: dict[int, _Closing] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._closings

    def __len__(self) -> int:
        return len(self._closings)

    def __getitem__(self, step: int) -> StepRow:
        """A closed step's row; raises KeyError for one that is not closed. Cost: its number of peers."""
        closing = self._closings[step]
        event = closing.event
        return StepRow(
            step=step,
            loss=event.loss,
            tokens=event.tokens,
            computed=event.computed,
            microbatches=event.microbatches,
            grad_norm=event.grad_norm,
            clip=event.clip,
            lr=event.lr,
            digests=event.digests,
            seconds=closing.seconds,
            closed_at=closing.closed_at,
            swapped=frozenset(closing.swapped),
        )

    def add(self, record: Recorded) -> None:
        """See :class:`View`."""
        event = record.event
        if not isinstance(event, StepClosed):
            return
        known = self._closings.get(event.step)
        if known is None:
            self._closings[event.step] = _Closing(event, event.seconds, record.wall, {record.peer})
            self.last = max(self.last, event.step)
            return
        known.seconds = max(known.seconds, event.seconds)
        known.closed_at = min(known.closed_at, record.wall)
        known.swapped.add(record.peer)

    def rows(self) -> list[StepRow]:
        """All closed steps, ascending. Cost: a pass over them."""
        return [self[step] for step in sorted(self._closings)]

    def tokens_per_s(self) -> float | None:
        """Target tokens of all steps after the first, over the time between the first's and the last's closing.

        What began before the window does not count: None with fewer than two closed steps. Cost: a pass over them.
        """
        if len(self) < 2:
            return None
        first, last = self._closings[min(self._closings)], self._closings[self.last]
        seconds = last.closed_at - first.closed_at
        tokens = sum(closing.event.tokens for closing in self._closings.values()) - first.event.tokens
        return tokens / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes on all peers' links during a step, and how many peers said so."""

    sent: int = 0
    received: int = 0
    peers: int = 0


class TrafficView:
    """Bytes on the wire. ``by_step`` has the steps that somebody reported; a peer that reports a step twice counts with
    its last word."""

    def __init__(self) -> None:
        self.by_step: dict[int, StepBytes] = {}
        self._told: dict[tuple[int, PeerId], LinkUsage] = {}

    def add(self, record: Recorded) -> None:
        """See :class:`View`."""
        event = record.event
        if not isinstance(event, LinkUsage):
            return
        before, so_far = self._told.get((event.step, record.peer)), self.by_step.get(event.step, StepBytes())
        self._told[event.step, record.peer] = event
        self.by_step[event.step] = StepBytes(
            sent=so_far.sent + event.bytes_sent - (before.bytes_sent if before else 0),
            received=so_far.received + event.bytes_received - (before.bytes_received if before else 0),
            peers=so_far.peers + (before is None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Replicas of a part that did not agree after a step: who held which digest."""

    step: int
    part: PartName
    digests: dict[str, frozenset[PeerId]]


class Digests:
    """Disagreements that peers reported, and those nobody noticed: peers whose StepClosed names other digests.

    For a reported one the digests are each replica's own; otherwise, of the peers that wrote the step's closing.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, PartName], dict[str, set[PeerId]]] = defaultdict(lambda: defaultdict(set))

    def add(self, record: Recorded) -> None:
        """See :class:`View`."""
        match record.event:
            case DigestMismatch(step=step, part=part, digests=reported):
                for replica, digest in reported.items():
                    self._found[step, part][digest].add(replica)
            case StepClosed(step=step, digests=decided):
                for name, digest in decided.items():
                    self._found[step, PartName(name)][digest].add(record.peer)

    def mismatches(self) -> list[Mismatch]:
        """By step and part; must be empty. Cost: a pass over all steps."""
        return [
            Mismatch(step=step, part=part, digests={digest: frozenset(peers) for digest, peers in sorted(held.items())})
            for (step, part), held in sorted(self._found.items())
            if len(held) > 1
        ]


# --- the account of microbatches -------------------------------------------------------------------------------------
# It must balance, whatever failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAccount:
    """The account of all microbatches: ``issued`` and ``unknown`` together are ``committed``, ``lost``, ``open`` and
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
        """Return the account of all microbatches. Cost: a pass over all of them."""
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
        """Return the fate of a microbatch issued for a step that does not count it. Steps close in order, so one that a
        later closing follows has closed too."""
        if step in self._lists:
            return "lost"
        return "unlisted" if step <= self._closed_through else "open"
