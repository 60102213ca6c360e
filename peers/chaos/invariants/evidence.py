"""Read the files of a run's peers: every event with its writer and incarnation, and every close record.

A home is a directory with ``events.jsonl``, ``history.jsonl`` or both; of any other directory all homes below it count.
Files are read as a killed peer leaves them: a last line without its end is no failure, any other unreadable line is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm.consensus.history import HistoryLine, earlier
from swarm.consensus.records import CloseRecord
from swarm.events import Event
from swarm.ids import MicrobatchId, PeerId
from swarm.monitoring.reader import UNREADABLE, RawEvent, Recorded, decode_line, read_all

DROPPED = "EventsDropped"
"""What stands where a writer had to drop events, as on a full disk: nothing is known of what it did meanwhile."""
EVENTS, HISTORY = "events.jsonl", "history.jsonl"


@dataclass(frozen=True, slots=True)
class Fact:
    """One event: who wrote it in which incarnation (numbered over the whole run), when, and what. ``wall`` is by its
    writer's wall clock, which may be wrong, or by one clock for all (see :func:`gather`)."""

    peer: PeerId
    incarnation: int
    wall: float
    kind: str
    fields: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The event's step, -1 where it has none."""
        return int(self.fields.get("step", -1))

    @property
    def microbatch(self) -> MicrobatchId:
        """The event's microbatch. Raises KeyError for an event without one."""
        return MicrobatchId(*self.fields["microbatch"])


@dataclass(frozen=True, slots=True)
class Chain:
    """One peer's history file: its records in the order of the file. ``peer`` is its path where no event names it. One
    that is ``aside`` was followed by another."""

    peer: str
    records: tuple[CloseRecord, ...]
    aside: bool = False

    def without_given_up(self, kept: Collection[str]) -> Chain:
        """The same, but for provisional records set aside that are not among those whose hashes are ``kept``."""
        if not self.aside:
            return self
        records = tuple(one for one in self.records if not one.provisional or one.hash() in kept)
        return Chain(self.peer, records, self.aside)


@dataclass(frozen=True, slots=True)
class FaultFact:
    """A fault that was done on purpose: what, to which peers, and for how long. By the harness's clock it was begun at
    ``wall`` and ``done`` after that: at some moment between the two it was true."""

    wall: float
    kind: str
    peers: tuple[str, ...]
    seconds: float | None = None
    took_s: float = 0.0

    @property
    def done(self) -> float:
        """The time from which it was certainly true."""
        return self.wall + self.took_s


@dataclass(frozen=True)
class Evidence:
    """The input of all checkers. ``unreadable`` are complaints about the files themselves."""

    facts: tuple[Fact, ...]
    chains: tuple[Chain, ...]
    faults: tuple[FaultFact, ...] = ()
    unreadable: tuple[str, ...] = ()

    @cached_property
    def _by_kind(self) -> Mapping[str, tuple[Fact, ...]]:
        found: dict[str, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            found[fact.kind].append(fact)
        return {kind: tuple(facts) for kind, facts in found.items()}

    def of(self, *kinds: str) -> Iterator[Fact]:
        """All events of these kinds; of one incarnation in the order in which they were written."""
        if len(kinds) == 1:
            yield from self._by_kind.get(kinds[0], ())
        else:
            yield from (fact for fact in self.facts if fact.kind in kinds)

    @cached_property
    def records(self) -> Mapping[int, CloseRecord]:
        """By step, the record that most histories have: the run's, where peers agree. I20 says where they do not.

        A record that founds a run anew after a step is in :attr:`founding`, and here only where the step's is not."""
        closed = _common(record for chain in self.chains for record in chain.records if not founds_anew(record))
        return dict(sorted({**self.founding, **closed}.items()))

    @cached_property
    def founding(self) -> Mapping[int, CloseRecord]:
        """By step, the record with which a run went on from a checkpoint of that step."""
        return _common(record for chain in self.chains for record in chain.records if founds_anew(record))

    def common(self, record: CloseRecord) -> CloseRecord:
        """Return the record that most histories have in this place."""
        return (self.founding if founds_anew(record) else self.records)[record.step]

    def opened_with(self, step: int) -> CloseRecord | None:
        """The record whose roster takes part in a step; None when it is not known."""
        return self.founding.get(step - 1) or self.records.get(step - 1)

    @cached_property
    def peers(self) -> frozenset[PeerId]:
        """Those whose events are here."""
        return frozenset(fact.peer for fact in self.facts)


@dataclass(slots=True)
class Gatherer:
    """Collects a run's evidence piece by piece; each list of events added is a start (an incarnation) of its own.
    ``offset`` as in :func:`gather`."""

    facts: list[Fact] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    faults: list[FaultFact] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    offset: float | None = None
    _incarnations: int = 0

    def recorded(self, events: Iterable[Recorded], source: str = "") -> str:
        """Add what one file holds; returns who wrote it, "" for an empty one. A second PeerStarted begins another
        incarnation: a peer that was started again in the same home. A line that the next one tells of as dropped is
        the beginning for which a full disk had room."""
        self._incarnations += 1
        peer, began, torn = "", False, ""
        for entry in events:
            if torn and not entry.dropped:
                self.unreadable.append(torn)
            torn = ""
            if entry.event.kind == UNREADABLE:
                torn = f"{source}: {_fields(entry.event).get('text', '')!r:.80}"
                continue
            if entry.event.kind == "PeerStarted":
                self._incarnations += began
                began = True
            peer = entry.peer
            if entry.dropped:
                gap = Fact(peer, self._incarnations, _at(entry, self.offset), DROPPED, {"events": entry.dropped})
                self.facts.append(gap)
            if entry.event.kind == "LineageGivenUp":
                self._forget(int(_fields(entry.event)["step"]))
            if entry.event.kind == "WentBack":
                self._forget(int(_fields(entry.event)["step"]) + 1)
            self.facts.append(
                Fact(peer, self._incarnations, _at(entry, self.offset), entry.event.kind, _fields(entry.event)),
            )
        if torn:
            self.unreadable.append(torn)
        return peer

    def _forget(self, step: int) -> None:
        """Drop this start's work from a step on, which by its own report does not count."""
        mine = [fact for fact in self.facts if fact.incarnation == self._incarnations and fact.step >= step]
        given_up = set(map(id, mine))
        self.facts = [fact for fact in self.facts if id(fact) not in given_up]

    def history(self, peer: str, lines: Sequence[bytes], source: str = "", *, aside: bool = False) -> None:
        """Add one history file, given as its whole lines; ``aside`` when the peer has begun another since."""
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(HistoryLine.decode(line).record)
            except ValueError as error:
                self.unreadable.append(f"{source}, line {number}: {error}")
        self.chains.append(Chain(peer, tuple(records), aside))

    def home(self, path: Path) -> None:
        """Add a peer's home. Raises OSError for files that cannot be read."""
        peer = self.recorded(read_all(path / EVENTS), str(path / EVENTS))
        for file in (*earlier(path / HISTORY), path / HISTORY):
            if file.exists():
                lines = _whole_lines(file.read_bytes())
                self.history(peer or str(path), lines, str(file), aside=file.name != HISTORY)

    def evidence(self) -> Evidence:
        """All of it, but for the provisional records that were set aside and are in nobody's history, and for steps
        that were repeated since, as the run went back to a checkpoint before them."""
        kept = {record.hash() for chain in self.chains if not chain.aside for record in chain.records}
        chains = tuple(chain.without_given_up(kept) for chain in self.chains)
        returns = {record.hash(): record for chain in chains for record in chain.records if record.repeats}
        undone, facts = _undone(chains, returns.values()), self.facts
        for back in returns.values():
            told = [fact.wall for fact in facts if fact.kind == "WentBack" and fact.fields["returns"] == back.returns]
            at = min(told, default=math.inf)
            facts = [fact for fact in facts if not (back.step < fact.step <= back.repeats and fact.wall < at)]
        chains = tuple(replace(chain, records=_without(chain.records, undone)) for chain in chains)
        return Evidence(tuple(facts), chains, tuple(self.faults), tuple(self.unreadable))


def _undone(chains: Iterable[Chain], returns: Iterable[CloseRecord]) -> set[str]:
    """The records, by hash, of steps before one of ``returns`` and after the step to which the run went back."""
    known, undone = {record.hash(): record for chain in chains for record in chain.records}, set[str]()
    for back in returns:
        before = known.get(back.previous)
        while before is not None and before.step > back.step:
            undone.add(before.hash())
            before = known.get(before.previous)
    return undone


def _without(records: Sequence[CloseRecord], undone: Container[str]) -> tuple[CloseRecord, ...]:
    return tuple(record for record in records if record.hash() not in undone)


def gather(directories: Iterable[Path], offset: float | None = None) -> Evidence:
    """The evidence below these directories. Raises FileNotFoundError naming one that holds no home.

    ``offset`` is for peers of one machine: what its monotonic clock lies behind the wall clock that faults are stamped
    with. Events are then stamped by that clock too, whatever their writers' wall clocks said."""
    gatherer = Gatherer(offset=offset)
    for directory in directories:
        homes = sorted({path.parent for name in (EVENTS, HISTORY) for path in directory.rglob(name)})
        if not homes:
            raise FileNotFoundError(f"{directory}: neither {EVENTS} nor {HISTORY} in it or below")
        # Of a peer that lost its disk the earlier one first.
        for home in sorted(homes, key=lambda home: _began(home, offset)):
            gatherer.home(home)
        for path in sorted(directory.rglob("faults.jsonl")):
            gatherer.faults += map(_fault, _whole_lines(path.read_bytes()))
    return gatherer.evidence()


def founds_anew(record: CloseRecord) -> bool:
    """Return whether it closes no step but names who goes on after one."""
    return record.step > 0 and not record.committed


def event_hash(evidence: Evidence) -> str:
    """Hex sha256 over every event with its writer and time, for worlds that must repeat themselves (I29). The order is
    that of the homes and, within one, of writing."""
    digest = hashlib.sha256()
    for fact in evidence.facts:
        text = json.dumps([fact.peer, fact.wall, fact.kind, dict(fact.fields)], sort_keys=True, default=str)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def _common(records: Iterable[CloseRecord]) -> dict[int, CloseRecord]:
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    known: dict[str, CloseRecord] = {}
    for record in records:
        digest = record.hash()
        votes[record.step][digest] += 1
        known[digest] = record
    return {step: known[max(sorted(counts), key=counts.__getitem__)] for step, counts in sorted(votes.items())}


def _at(entry: Recorded, offset: float | None) -> float:
    return entry.wall if offset is None else entry.monotonic + offset


def _began(home: Path, offset: float | None) -> float:
    """Return the time of the first event of a home; 0 if there is none."""
    try:
        with (home / EVENTS).open("rb") as file:
            return _at(decode_line(file.readline()), offset)
    except FileNotFoundError:
        return 0.0


def _fields(event: Event | RawEvent) -> dict[str, Any]:
    return event.fields if isinstance(event, RawEvent) else event.fields()


def _whole_lines(data: bytes) -> list[bytes]:
    return [line for line in data[: data.rfind(b"\n") + 1].splitlines() if line]


def _fault(line: bytes) -> FaultFact:
    value = json.loads(line)
    seconds = value.get("seconds")
    return FaultFact(
        float(value["t"]),
        str(value["kind"]),
        tuple(map(str, value["peers"])),
        None if seconds is None else float(seconds),
        float(value.get("took_s", 0.0)),
    )
