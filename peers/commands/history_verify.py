"""Verify a chain of close records by itself: the checks of ``swarm history --verify`` for each record.

What it proves: each record follows the one before, and more than half of those whom that one names have signed it. So
anyone who believes the first record can believe the last. The first is proven too where a run begins with it, as
everybody in it has signed it; the one with which a peer joined a run in progress is taken on trust. A chain that begins
where the run went back to a checkpoint goes on from the one before, of which what was since counts no more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swarm.consensus.faults import barring, check_faults
from swarm.consensus.history import HistoryLine
from swarm.consensus.records import NO_RECORD, CloseRecord, check_acceptances, check_confirmed
from swarm.consensus.roster import Roster
from swarm.errors import Refused, StateError, Violation
from swarm.ids import MicrobatchId, PeerId

Verify = Callable[[PeerId, bytes, bytes], bool]


@dataclass(slots=True)
class ChainCheck:
    """Takes a chain's lines in order. Memory: the id of every committed microbatch, some 200 bytes each."""

    verify: Verify
    before: CloseRecord | None = None
    before_hash: str = NO_RECORD
    records: int = 0
    trusted: int | None = None
    """The step of the first record, where its signatures cannot be judged."""

    provisional: int | None = None
    """The step since which it counts only when a majority agrees, if it ends like that."""

    _fork: tuple[CloseRecord, Roster] | None = None
    _committed: dict[MicrobatchId, int] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """The number of distinct committed microbatches."""
        return len(self._committed)

    def take(self, line: HistoryLine) -> None:
        """Check one more. Raises StateError with what is wrong with it; nothing of it counts then. Cost: 0.1 ms a
        voter."""
        record, before = line.record, self.before
        for problem in self._problems(line):
            raise StateError(problem)
        if before is None and not record.founding:
            self.trusted = record.step
        if record.forks and before is not None:
            self._fork = (record, before.members)
        self.provisional = record.lineage or None
        if record.repeats:
            self._committed = {microbatch: step for microbatch, step in self._committed.items() if step <= record.step}
        self._committed |= {one.microbatch: record.step for one in record.committed}
        self.before, self.before_hash, self.records = record, record.hash(), self.records + 1

    def _problems(self, line: HistoryLine) -> Iterator[str]:
        record, before = line.record, self.before
        yield from (_beginning(record) if before is None else _link(record, before, self.before_hash))
        yield from _sums(record)
        yield from self._repeated(record)
        if before is not None:
            yield from () if record.repeats else _cursors(record, before)
            yield from self._lineage(record, before)
            yield from _faults(record, before, self.verify)
        electorate = before.members if before is not None else record.members if record.founding else None
        if electorate is not None:
            yield from _signatures(line, electorate, self.verify)

    def _lineage(self, record: CloseRecord, before: CloseRecord) -> Iterator[str]:
        proof = record.confirmation
        if proof is None:
            if not record.forks and record.lineage != before.lineage:
                yield f"it is of lineage {record.lineage}, the one before of {before.lineage}"
        elif self._fork is not None:
            first, electorate = self._fork
            try:
                check_confirmed(first, electorate, proof.signatures(), self.verify, proof.term)
            except Refused as refused:
                yield f"it does not prove that step {first.step} was confirmed: {refused.reason}"

    def _repeated(self, record: CloseRecord) -> Iterator[str]:
        here = set()
        for microbatch in (one.microbatch for one in record.committed):
            if microbatch in here:
                yield f"microbatch {microbatch} is committed twice in it"
            if microbatch in self._committed:
                yield f"microbatch {microbatch} is committed again, after step {self._committed[microbatch]}"
            here.add(microbatch)


def _beginning(record: CloseRecord) -> Iterator[str]:
    if record.step == 0 and not record.founding:
        yield "step 0 commits microbatches: no run begins like that"
    if record.founding and (record.step == 0) != (record.previous == NO_RECORD):
        yield f"a run that begins with step {record.step} does not follow the record {record.previous[:12]}"


def _link(record: CloseRecord, before: CloseRecord, before_hash: str) -> Iterator[str]:
    if record.run != before.run:
        yield f"it is of run {record.run[:12]}, the one before of {before.run[:12]}"
    if record.decides != before.step + 1:
        yield f"step {record.decides} does not follow step {before.step}"
    if record.returns != before.returns + bool(record.repeats):
        yield f"it counts {record.returns} returns to a checkpoint, the one before it {before.returns}"
    if record.previous != before_hash:
        yield f"it follows the record {record.previous[:12]}, the one before it here is {before_hash[:12]}"
    if before.ended:
        yield f"step {before.step} ended the run: nothing follows it"
    if record.founding:
        yield "it commits no microbatch: a run does not begin in its middle"
    kept = {part: record.digests.get(part) for part in before.members.paused}  # whose owner may come with another state
    if record.void and not record.repeats and (record.committed or record.digests != before.digests | kept):
        yield "it gives its step up, and yet weights change with it"


def _sums(record: CloseRecord) -> Iterator[str]:
    tokens = sum(one.tokens for one in record.committed)
    if tokens != record.tokens:
        yield f"it says {record.tokens} tokens, its microbatches have {tokens}"
    loss = math.fsum(one.loss_sum for one in record.committed)
    if loss != record.loss_sum:
        yield f"it says a loss sum of {record.loss_sum!r}, its microbatches have {loss!r}"


def _cursors(record: CloseRecord, before: CloseRecord) -> Iterator[str]:
    """A trainer that is not named any more was forgotten, for lack of room: it may begin anew later."""
    for trainer, cursor in record.cursors.items():
        last = before.cursors.get(trainer)
        if last is not None and cursor < last:
            yield f"the cursor of {trainer} goes back from {last} to {cursor}"


def _faults(record: CloseRecord, before: CloseRecord, verify: Verify) -> Iterator[str]:
    """Whom it bars it proves wrong."""
    try:
        found = check_faults(record.run, before.members, record.step, record.previous, record.faults, verify)
    except (Refused, Violation) as refused:
        yield f"it accuses a member without proof: {refused.reason}"
        return
    expected = before.barred if record.void else barring(before.barred, record.step, found)
    if record.barred != expected:
        yield "whom it bars is not what the proofs in it give"


def _signatures(line: HistoryLine, electorate: Roster, verify: Verify) -> Iterator[str]:
    if line.acceptances is None:
        yield "nothing lies with it that shows who accepted it"
        return
    if line.term < line.record.term:
        yield f"decided in term {line.term}, it was proposed first in term {line.record.term}"
    try:
        check_acceptances(line.record, electorate, line.acceptances, verify, line.term)
    except Refused as refused:
        yield f"it was not decided: {refused.reason}"
