"""Check where microbatches went: once everywhere, none lost, none read twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from peers.chaos.invariants.evidence import DROPPED, Evidence, Fact
from peers.chaos.invariants.findings import Findings, Limits
from swarm.consensus.ledger import assigned
from swarm.consensus.records import CloseRecord
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, StepWork

HOLDING = ("Accumulated", "ContributionReplayed", "ContributionReversed")
"""Events that change what a replica's open step holds."""

Place = tuple[str, str]
"""Whose data, and which: (trainer, shard)."""


def committed_once(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I1: each microbatch is committed in at most one step, once; what leaders said they committed is in the record."""
    first: dict[MicrobatchId, int] = {}
    for step, record in evidence.records.items():
        for contribution in record.committed:
            microbatch = contribution.microbatch
            before = first.setdefault(microbatch, step)
            again = f"{microbatch} is committed again, first in step {before}"
            found.expect(before == step, again, step=step)
        ids = [contribution.microbatch for contribution in record.committed]
        found.expect(len(ids) == len(set(ids)), f"{len(ids) - len(set(ids))} microbatches twice in one step", step=step)
    for fact in evidence.of("Committed"):
        record_of_step = evidence.records.get(fact.step)
        if record_of_step is not None:
            told = {MicrobatchId(*item) for item in fact.fields["microbatches"]}
            written = {contribution.microbatch for contribution in record_of_step.committed}
            found.expect(
                told == written,
                f"the leader's list and the record differ in {len(told ^ written)} microbatches",
                step=fact.step,
                peer=fact.peer,
            )


def none_lost(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I2: what was issued is committed, set aside with a reason, or ahead of its shard's cursor and redone. What its
    trainer says is not enough: the record must name it."""
    committed, aside = _committed(evidence.records.values()), _set_aside(evidence.records.values())
    cursors = _last_cursors(evidence)
    for microbatch in sorted({fact.microbatch for fact in evidence.of("JourneyStarted")}):
        cursor = cursors.get((microbatch.trainer, microbatch.shard))
        if cursor is None:  # nothing of this shard was committed: nothing of it is behind us
            continue
        ahead = (microbatch.epoch, microbatch.position) >= cursor
        ended = ahead or microbatch in committed or microbatch in aside
        found.expect(ended, f"{microbatch} was issued and nobody knows its end", peer=microbatch.trainer)


def same_set_everywhere(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I3: when its sum was averaged each replica held what the record assigns to it, no more and no less. What came in
    afterwards, from a trainer that did not know yet, is dropped with the step: it counts nowhere.

    Where a replica's events are missing nothing is said about it. One that did not swap may have died with a surplus.
    """
    held, twice = _held(evidence)
    swapped = {(fact.step, fact.peer) for fact in evidence.of("StepClosed")} - _half_told(evidence)
    for step, part, peer, work in sorted(twice):
        found.expect(False, f"{work.microbatch} was added twice to {part}", step=step, peer=peer)
    with_ends = any(fact.fields.get("part") == ENDS for fact in evidence.of(*HOLDING))
    for step, record in evidence.records.items():
        for part, peer, wanted in _assignments(evidence, record, with_ends):
            if (step, peer) not in swapped:
                continue
            has = held.get((step, part, peer), set())
            missing, surplus = wanted - has, has - wanted
            text = f"{part} lacks {len(missing)} of its {len(wanted)} microbatches and holds {len(surplus)} too many"
            found.expect(not missing and not surplus, text, step=step, peer=peer)


def cursors_are_prefixes(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I10: after each step, what is committed or set aside of a shard is all that lies before its cursor, and nothing
    behind it: a resume neither skips nor repeats."""
    aside = _set_aside(evidence.records.values())
    done: dict[Place, set[tuple[int, int]]] = defaultdict(set)
    newest: dict[str, Place] = {}
    complete = 0 in evidence.records
    for step, record in evidence.records.items():
        for contribution in record.committed:
            trainer, shard, *position = contribution.microbatch
            newest[trainer] = (trainer, shard)
            done[trainer, shard].add((position[0], position[1]))
        for who, cursor in record.cursors.items():
            place = newest.get(who)
            if place is None or not complete:
                continue
            at = (cursor[0], cursor[1])
            left_out = {(m.epoch, m.position) for m in aside if (m.trainer, m.shard) == place}
            problem = prefix_problem(done[place] | {one for one in left_out if one < at}, at)
            found.expect(not problem, problem, step=step, peer=who)


def prefix_problem(done: set[tuple[int, int]], cursor: tuple[int, int]) -> str:
    """Return why (epoch, position)s are not exactly those before a cursor, "" when they are.

    An epoch's length is taken from the epochs that are done; they must agree.
    """
    beyond = sorted(at for at in done if at >= cursor)
    if beyond:
        return f"{len(beyond)} committed at or after the cursor {cursor}, the first at {beyond[0]}: read again"
    lengths = set()
    for epoch in range(cursor[0] + (cursor[1] > 0)):
        positions = {position for at, position in done if at == epoch}
        length = cursor[1] if epoch == cursor[0] else max(positions, default=-1) + 1
        if epoch < cursor[0]:
            lengths.add(length)
        holes = sorted(set(range(length)) - positions)
        if holes or not length:
            first = holes[0] if holes else 0
            return f"{max(1, len(holes))} holes before the cursor {cursor}, the first at {(epoch, first)}"
    if len(lengths) > 1:
        return f"epochs of {sorted(lengths)} microbatches in one shard"
    return ""


def _committed(records: Iterable[CloseRecord]) -> set[MicrobatchId]:
    return {contribution.microbatch for record in records for contribution in record.committed}


def _set_aside(records: Iterable[CloseRecord]) -> set[MicrobatchId]:
    return {aside.microbatch for record in records for aside in record.aside}


def _last_cursors(evidence: Evidence) -> dict[Place, tuple[int, int]]:
    """Return each shard's position at its trainer's last commit; the run's end for the newest shard."""
    cursors: dict[Place, tuple[int, int]] = {}
    newest: dict[str, Place] = {}
    for record in evidence.records.values():
        for contribution in record.committed:
            newest[contribution.microbatch.trainer] = (contribution.microbatch.trainer, contribution.microbatch.shard)
        for who, cursor in record.cursors.items():
            if who in newest:
                cursors[newest[who]] = (cursor[0], cursor[1])
    return cursors


def _held(
    evidence: Evidence,
) -> tuple[dict[tuple[int, str, PeerId], set[StepWork]], set[tuple[int, str, PeerId, StepWork]]]:
    """(what each replica's newest sum held when it was taken to be averaged, else what its step held last, by (step,
    part, peer), and what it was given twice). A new incarnation holds nothing of what the one before it had. What
    counts is the order of writing: a sum is told before anything is waited for. What was fed early and did not count so
    may be added once more, with the parameters of the record before its step."""
    held: dict[tuple[int, str, PeerId], set[StepWork]] = defaultdict(set)
    sums: dict[tuple[int, str, PeerId], set[StepWork]] = {}
    owner: dict[tuple[int, str, PeerId], int] = {}
    twice = set()
    for fact in _in_order(evidence.of(*HOLDING, "SumTaken")):
        key = (fact.step, str(fact.fields["part"]), fact.peer)
        if owner.setdefault(key, fact.incarnation) != fact.incarnation:
            held[key], owner[key] = set(), fact.incarnation
            sums.pop(key, None)
        if fact.kind == "SumTaken":
            sums[key] = set(held[key])
            continue
        work = StepWork(fact.step, fact.microbatch, fact.fields.get("early", False), fact.fields.get("hop", 0))
        if fact.kind == "ContributionReversed":
            held[key].discard(work)
        else:
            if fact.kind == "Accumulated" and work in held[key]:
                twice.add((*key, work))
            held[key].add(work)
    return held | sums, twice


def _half_told(evidence: Evidence) -> set[tuple[int, PeerId]]:
    """(step, peer) of the steps, two may be open at a time, that a peer told closed after it had to drop events."""
    found: set[tuple[int, PeerId]] = set()
    unsure: dict[int, int] = {}
    for fact in evidence.of("StepClosed", DROPPED):
        if fact.kind == DROPPED:
            unsure[fact.incarnation] = 2
        elif unsure.get(fact.incarnation, 0):
            unsure[fact.incarnation] -= 1
            found.add((fact.step, fact.peer))
    return found


def _in_order(facts: Iterator[Fact]) -> list[Fact]:
    return sorted(facts, key=lambda fact: fact.incarnation)  # stable: the order of writing within one


def _assignments(
    evidence: Evidence, record: CloseRecord, with_ends: bool
) -> Iterator[tuple[PartName, PeerId, set[StepWork]]]:
    """(part, replica, what the record assigns to it) for the step's members, those with nothing included."""
    before = evidence.opened_with(record.step)
    if before is None or not record.committed:
        return
    for member in before.roster:
        if member.part is None or (member.part == ENDS and not with_ends):
            continue
        part, peer = PartName(member.part), PeerId(member.peer)
        yield part, peer, set(assigned(record.step, record.committed, peer, part))
