"""What a run's events say, each question a pure fold over all peers' events in any order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from swarm.events import (
    Committed,
    DigestMismatch,
    Event,
    JourneyCompleted,
    JourneyStarted,
    LinkUsage,
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    StepClosed,
)
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.monitoring.reader import Recorded

EventT = TypeVar("EventT", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One closed step. ``closed_at`` is the earliest swap by the writers' wall clocks, ``swapped`` who wrote one."""

    step: int
    loss: float
    tokens: int
    microbatches: int
    grad_norm: float
    clip: float
    lr: float
    seconds: float
    closed_at: float
    swapped: frozenset[PeerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAccount:
    """Where the microbatches went. ``issued`` = committed + ``lost`` + ``open``, as sets of distinct microbatches.

    ``lost`` were issued for a step that closed and are in no closed step; ``open`` were issued for one that did not
    close yet; ``duplicated`` were committed more than once and must be empty; ``unknown`` were committed though
    nobody said they were issued (its trainer's events are missing). Source: invariants I1 and I2.
    """

    issued: frozenset[MicrobatchId]
    completed: frozenset[MicrobatchId]
    committed: frozenset[MicrobatchId]
    lost: frozenset[MicrobatchId]
    open: frozenset[MicrobatchId]
    duplicated: frozenset[MicrobatchId]
    unknown: frozenset[MicrobatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes on all peers' links during a step."""

    sent: int
    received: int
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Replicas of a part that did not agree after a step: who held which digest."""

    step: int
    part: PartName
    digests: dict[str, frozenset[PeerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer's life so far, and why it is as it is."""

    peer: PeerId
    name: str = ""
    role: str = ""
    part: PartName | None = None
    state: Literal["started", "ready", "lost", "stopped"] = "started"
    reason: str = ""


def steps(events: Iterable[Recorded]) -> dict[int, StepRow]:
    """The table of closed steps, by step."""
    rows: dict[int, StepRow] = {}
    for record, event in _only(events, StepClosed):
        known = rows.get(event.step)
        rows[event.step] = StepRow(
            step=event.step,
            loss=event.loss,
            tokens=event.tokens,
            microbatches=event.microbatches,
            grad_norm=event.grad_norm,
            clip=event.clip,
            lr=event.lr,
            seconds=event.seconds if known is None else max(known.seconds, event.seconds),
            closed_at=record.wall if known is None else min(known.closed_at, record.wall),
            swapped=frozenset({record.peer}) | (known.swapped if known else frozenset()),
        )
    return dict(sorted(rows.items()))


def tokens_per_s(events: Iterable[Recorded]) -> float | None:
    """Target tokens of all steps after the first, over the time between the first's and the last's closing.

    What began before the window does not count. None with fewer than two closed steps.
    """
    rows = list(steps(events).values())
    if len(rows) < 2:
        return None
    seconds = rows[-1].closed_at - rows[0].closed_at
    return sum(row.tokens for row in rows[1:]) / seconds if seconds > 0 else None


def microbatch_account(events: Iterable[Recorded]) -> MicrobatchAccount:
    """Every microbatch issued, and its end."""
    records = list(events)
    issued_for: dict[MicrobatchId, set[int]] = defaultdict(set)
    for _, started in _only(records, JourneyStarted):
        issued_for[started.microbatch].add(started.step)
    lists: dict[int, Counter[MicrobatchId]] = defaultdict(Counter)
    for _, commit in _only(records, Committed):
        # A leader and its successor may both write a step's set: their union, not their sum.
        lists[commit.step] |= Counter(commit.microbatches)
    times = sum(lists.values(), Counter[MicrobatchId]())
    closed = {event.step for _, event in _only(records, StepClosed)} | lists.keys()
    issued, committed = frozenset(issued_for), frozenset(times)
    unsettled = frozenset(one for one, at in issued_for.items() if one not in times and not at <= closed)
    return MicrobatchAccount(
        issued=issued,
        completed=frozenset(event.microbatch for _, event in _only(records, JourneyCompleted)),
        committed=committed,
        lost=issued - committed - unsettled,
        open=unsettled,
        duplicated=frozenset(one for one, count in times.items() if count > 1),
        unknown=committed - issued,
    )


def bytes_by_step(events: Iterable[Recorded]) -> dict[int, StepBytes]:
    """Bytes on the wire by step; a peer that reports a step twice counts with its last word."""
    usage: dict[tuple[int, PeerId], LinkUsage] = {}
    for record, event in _only(events, LinkUsage):
        usage[event.step, record.peer] = event
    table: dict[int, StepBytes] = {}
    for (step, _), event in sorted(usage.items()):
        so_far = table.get(step, StepBytes(sent=0, received=0, peers=0))
        table[step] = StepBytes(
            sent=so_far.sent + event.bytes_sent,
            received=so_far.received + event.bytes_received,
            peers=so_far.peers + 1,
        )
    return table


def digest_mismatches(events: Iterable[Recorded]) -> list[Mismatch]:
    """Disagreements that peers reported, and those nobody noticed: peers whose StepClosed names other digests.

    For a reported one the digests are each replica's own; otherwise, of the peers that wrote the step's closing.
    """
    records = list(events)
    found: dict[tuple[int, PartName], dict[str, set[PeerId]]] = defaultdict(lambda: defaultdict(set))
    for _, reported in _only(records, DigestMismatch):
        for replica, digest in reported.digests.items():
            found[reported.step, reported.part][digest].add(replica)
    for record, closing in _only(records, StepClosed):
        for part, digest in closing.digests.items():
            found[closing.step, PartName(part)][digest].add(record.peer)
    return [
        Mismatch(step=step, part=part, digests={digest: frozenset(peers) for digest, peers in sorted(held.items())})
        for (step, part), held in sorted(found.items())
        if len(held) > 1
    ]


def roster(events: Iterable[Recorded]) -> dict[PeerId, PeerRow]:
    """Everybody who was ever there, by the latest word about them; a peer that stopped in order is not lost."""
    rows: dict[PeerId, PeerRow] = {}
    for record in sorted(events, key=lambda record: record.wall):
        event = record.event
        if isinstance(event, PeerStarted | PeerReady | PeerStopped | PeerLost):
            peer = event.peer if isinstance(event, PeerLost) else record.peer
            rows[peer] = _told(rows.get(peer, PeerRow(peer=peer)), event)
    return rows


def _told(row: PeerRow, event: PeerStarted | PeerReady | PeerStopped | PeerLost) -> PeerRow:
    match event:
        case PeerStarted():
            return PeerRow(peer=row.peer, name=event.name, role=event.role)
        case PeerReady():
            return replace(row, part=event.part, state="ready", reason=event.reason)
        case PeerStopped():
            return replace(row, state="stopped", reason=event.reason)
        case PeerLost() if row.state != "stopped":
            return replace(row, name=row.name or event.name, state="lost", reason=event.reason)
    return row


def _only(events: Iterable[Recorded], kind: type[EventT]) -> Iterator[tuple[Recorded, EventT]]:
    for record in events:
        if isinstance(record.event, kind):
            yield record, record.event
