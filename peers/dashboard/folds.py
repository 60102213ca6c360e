"""What is kept of a run to be shown: its steps, what each peer contributed, who came and went, and rates. Pure.

All of it is bounded, however long the run is and however many peers it has had.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.console.event_words import describe, harmless
from peers.dashboard.liveness import Silences
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member, Roster
from swarm.events import (
    DataOpened,
    Draining,
    Event,
    HeldOutLoss,
    PartAssigned,
    Participation,
    PeerReady,
    PeerStarted,
    PeerStopped,
    Reachability,
    TermBegan,
    Waiting,
)
from swarm.network.addresses import without_addresses

MAX_POINTS = 1500
"""Of a curve; of a longer run every second, fourth, … step is kept."""
MAX_LOGGED = 300
REVISABLE = 256
"""Steps that may turn out not to count, and are taken back then: a branch without a majority is shorter."""
WINDOW_STEPS = 8
"""Over how many steps the present speed is taken."""


def clean(text: str) -> str:
    """Return text of others as one harmless line without network addresses."""
    return harmless(without_addresses(text))


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StepPoint:
    """One closed step. ``at`` is when it closed, seconds since the epoch, None where nobody who tells was there;
    ``loss`` is None for a step that was given up."""

    step: int
    loss: float | None
    tokens: int
    microbatches: int
    members: int | None = None
    seconds: float | None = None
    at: float | None = None
    term: int = 0

    def row(self) -> list[float | int | None]:
        """As it travels: step, loss, tokens a second, microbatches, members, time."""
        speed = self.tokens / self.seconds if self.seconds else None
        return [self.step, self.loss, speed, self.microbatches, self.members, self.at]


class StepSeries:
    """The curve of a run. Of a long one every second, fourth, … step is kept, and the newest. ``tokens`` and
    ``microbatches`` are those of all steps from the ``first`` to the ``last``, 0 before there is one."""

    def __init__(self) -> None:
        self._points: dict[int, StepPoint] = {}
        self._recent: deque[StepPoint] = deque(maxlen=REVISABLE)
        self._stride = 1
        self.first = self.last = 0
        self.tokens = self.microbatches = 0

    def point(self, step: int) -> StepPoint | None:
        """Return a kept step."""
        return self._points.get(step)

    @property
    def newest(self) -> StepPoint | None:
        """The last one; None before the first."""
        return self._points.get(self.last)

    def add(self, point: StepPoint) -> None:
        """Take the next step, or what somebody else says of one that is known; an older one that is not kept any more
        is passed over."""
        known = self._points.get(point.step)
        if known is not None:
            _complete(known, point)
        elif point.step > self.last:
            self.tokens += point.tokens
            self.microbatches += point.microbatches
            if self.last % self._stride:
                self._points.pop(self.last, None)  # it was kept as the newest only
            self._points[point.step] = point
            self._recent.append(point)
            self.first, self.last = self.first or point.step, point.step
            self._thin()

    def rewind(self, step: int) -> None:
        """Steps from this one on did not count."""
        self.tokens -= sum(point.tokens for point in self._recent if point.step >= step)
        self.microbatches -= sum(point.microbatches for point in self._recent if point.step >= step)
        self._points = {known: point for known, point in self._points.items() if known < step}
        self._recent = deque((point for point in self._recent if point.step < step), maxlen=REVISABLE)
        if self._recent:
            self._points.setdefault(self._recent[-1].step, self._recent[-1])
        self.last = max(self._points, default=0)

    def tokens_per_s(self) -> float | None:
        """Target tokens a second over the newest steps; None where their times are not known."""
        timed = [point for point in list(self._recent)[-WINDOW_STEPS - 1 :] if point.at is not None]
        if len(timed) >= 2 and (span := (timed[-1].at or 0.0) - (timed[0].at or 0.0)) > 0:
            return sum(point.tokens for point in timed[1:]) / span
        known = self.newest
        return known.tokens / known.seconds if known is not None and known.seconds else None

    def step_s(self) -> float | None:
        """Return what a step took lately; None where that is not known."""
        took = [point.seconds for point in list(self._recent)[-WINDOW_STEPS:] if point.seconds]
        return statistics.median(took) if took else None

    def rows(self) -> list[list[float | int | None]]:
        """All kept steps, ascending."""
        return [self._points[step].row() for step in sorted(self._points)]

    def _thin(self) -> None:
        if len(self._points) > MAX_POINTS:
            self._stride *= 2
            kept = {step: point for step, point in self._points.items() if step % self._stride == 0}
            self._points = {**kept, self.last: self._points[self.last]}


def _complete(known: StepPoint, point: StepPoint) -> None:
    """Fill in what is not known of a step yet."""
    for name in ("members", "seconds", "at"):
        if getattr(known, name) is None:
            setattr(known, name, getattr(point, name))
    if point.at is not None and known.at is not None:
        known.at = min(known.at, point.at)


# --- what counts of each peer's work ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Share:
    """What close records count of one peer: microbatches whose gradient it held at its stage, with their target tokens,
    and those that it brought as a trainer."""

    microbatches: int = 0
    tokens: int = 0
    trained_microbatches: int = 0
    trained_tokens: int = 0

    def add(self, other: Share, sign: int = 1) -> None:
        """Count another's in, or out again."""
        self.microbatches += sign * other.microbatches
        self.tokens += sign * other.tokens
        self.trained_microbatches += sign * other.trained_microbatches
        self.trained_tokens += sign * other.trained_tokens


class Contributions:
    """Sums of committed work by peer, from close records: the same for everybody who has the same history. ``since`` is
    the first step that is counted; 0 before it."""

    def __init__(self) -> None:
        self.by_peer: dict[str, Share] = {}
        self.since = 0
        self._steps: deque[tuple[int, dict[str, Share]]] = deque(maxlen=REVISABLE)

    def add(self, record: CloseRecord) -> None:
        """Count a step's."""
        found: dict[str, Share] = {}
        for one in record.committed:
            brought = found.setdefault(one.microbatch.trainer, Share())
            brought.trained_microbatches += 1
            brought.trained_tokens += one.tokens
            for peer in one.route:
                held = found.setdefault(peer, Share())
                held.microbatches += 1
                held.tokens += one.tokens
        self._steps.append((record.step, found))
        self.since = self.since or record.step
        for peer, share in found.items():
            self.by_peer.setdefault(peer, Share()).add(share)

    def rewind(self, step: int) -> None:
        """Steps from this one on did not count. Of more than are remembered nothing is known any more: what counts is
        counted from here on."""
        if self._steps and self._steps[0][0] > step:
            self._steps.clear()
            self.by_peer.clear()
            self.since = 0
        while self._steps and self._steps[-1][0] >= step:
            for peer, share in self._steps.pop()[1].items():
                self.by_peer[peer].add(share, -1)


# --- what happened ---------------------------------------------------------------------------------------------------


_QUIET = (Participation, TermBegan, Waiting)
"""Told elsewhere on the page, or of interest to one peer alone."""
_OF_ONE = (PeerStarted, PeerReady, PeerStopped, PartAssigned, Draining, DataOpened, HeldOutLoss, Reachability)
"""About the peer that tells it; what is not is told by many, and shown once."""


class Log:
    """The newest entries of a kind. Each has an ``id``, and a number ``n`` that grows whenever one changes: by it a
    reader knows what is new."""

    def __init__(self, most: int = MAX_LOGGED) -> None:
        self._numbers = itertools.count(1)
        self._told: deque[tuple[str, str]] = deque(maxlen=64)
        self._kept: deque[dict[str, Any]] = deque(maxlen=most)

    def __iter__(self) -> Any:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, **entry: Any) -> None:
        """Append one, unless it is the newest again: that is counted in its ``times``."""
        last = self._kept[-1] if self._kept else {}
        same = {key: value for key, value in last.items() if key not in ("id", "n", "times", "at")}
        if same and same == {key: value for key, value in entry.items() if key != "at"}:
            self._kept[-1] = {**last, "n": next(self._numbers), "times": last.get("times", 1) + 1}
            return
        number = next(self._numbers)
        self._kept.append({"id": number, "n": number, **entry})

    def tell(self, event: Event, at: float, who: str, clean: Callable[[str], str]) -> None:
        """Append an event in words, if it has any; what many tell alike is told once."""
        said = None if isinstance(event, _QUIET) else describe(event)
        if said is None or (said in self._told and not isinstance(event, _OF_ONE)):
            return
        self._told.append(said)
        label, text = said
        self.add(at=at, label=label, text=clean(text.partition("\n")[0]), who=who)


def changes(record: CloseRecord, before: Roster) -> Iterable[tuple[str, str, str]]:
    """Return who came and went with a record, and who holds another part from now on: (what, peer, part)."""
    after, absent = record.members, set(record.absent)
    for peer in after.peers:
        if peer not in before:
            yield "joined", peer, after[peer].part or after[peer].role
        elif after[peer].part != before[peer].part:
            yield "moved", peer, after[peer].part or after[peer].role
    for peer in before.peers:
        if peer not in after:
            yield ("lost" if peer in absent else "left"), peer, before[peer].part or before[peer].role


# --- who was there ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Gone:
    """A peer that was in the roster and is not any more."""

    member: Member
    state: str
    step: int
    why: str = ""


@dataclass(slots=True)
class KnownPeers:
    """What is known of peers beside the roster: who is gone, who does not answer, who said that it leaves, why one
    stopped, and all names."""

    gone: dict[str, Gone] = field(default_factory=dict)
    silences: Silences = field(default_factory=Silences)
    leaving: set[str] = field(default_factory=set)
    stopped: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def leaves(self, peer: str, *, leaving: bool) -> None:
        """It says that it is about to leave, or that it is not: its silence then is no trouble."""
        (self.leaving.add if leaving else self.leaving.discard)(peer)


# --- rates -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PeerRates:
    """A peer's shares of time and its bytes a second, between two of its answers; None before the second."""

    busy: float | None = None
    waiting: float | None = None
    idle: float | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    links: dict[str, float] = field(default_factory=dict)


class Rates:
    """Differences between what a peer said last and says now. ``WINDOW_S`` apart at least, so that a share means
    something."""

    WINDOW_S = 2.0

    def __init__(self) -> None:
        self.by_peer: dict[str, PeerRates] = {}
        self._before: dict[str, Mapping[str, Any]] = {}

    def look(self, vitals: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the answers of all; who gave none has no rate any more."""
        self._before = {peer: said for peer, said in self._before.items() if peer in vitals}
        self.by_peer = {peer: rates for peer, rates in self.by_peer.items() if peer in vitals}
        for peer, said in vitals.items():
            before = self._before.setdefault(peer, said)
            spent = [said[kind] - before[kind] for kind in ("busy_s", "waiting_s", "idle_s")]
            seconds = sum(spent)
            if min(spent) < 0:  # it was started anew
                self._before[peer] = said
            elif seconds >= self.WINDOW_S:
                self.by_peer[peer] = _rates(before, said, spent, seconds)
                self._before[peer] = said


def _rates(before: Mapping[str, Any], said: Mapping[str, Any], spent: list[float], seconds: float) -> PeerRates:
    busy, waiting, idle = (part / seconds for part in spent)
    old = {link["peer"]: link["bytes_sent"] for link in before["links"]}
    links = {
        link["peer"]: max(0, link["bytes_sent"] - old[link["peer"]]) / seconds
        for link in said["links"]
        if link["peer"] in old
    }
    return PeerRates(
        busy=busy,
        waiting=waiting,
        idle=idle,
        sent_per_s=max(0, said["bytes_sent"] - before["bytes_sent"]) / seconds,
        received_per_s=max(0, said["bytes_received"] - before["bytes_received"]) / seconds,
        links=links,
    )
