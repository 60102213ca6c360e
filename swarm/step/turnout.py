"""Who was there when a step's parts were averaged, who took part, whose work is in the result, and why not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from swarm.columns import held
from swarm.consensus.ledger import weights
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId

NO_WORK = "no microbatch this step"
LATE = "late: what it learnt is averaged with its next contribution"
FAR = "its sum is far from the others'"
GIVEN_UP = "the step was given up"
LEFT_OUT = "left out by the step's leader"
MAX_TOLD, REASON_CHARS = 64, 200
"""Of how many replicas reasons are passed on, and how much of each: they are for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnout:
    """One part in one step. ``averaged`` is within ``participating``, that within ``live``, all in rank order.

    ``live`` are the roster's replicas without those that were lost, and the ``late`` ones, who joined with the
    step's record; ``participating`` were in the part's round, ``averaged`` had something in it. ``why`` says why
    not, of other live replicas and of those that were lost, and who calls whose sum far: of MAX_TOLD at most, those
    without work last.
    """

    part: PartName
    step: int
    live: tuple[PeerId, ...]
    participating: tuple[PeerId, ...]
    averaged: tuple[PeerId, ...]
    late: tuple[PeerId, ...]
    why: Mapping[PeerId, str]

    @property
    def alone(self) -> bool:
        """Return whether a single replica took part, while its part was averaged."""
        return len(self.participating) == 1

    @property
    def whole(self) -> bool:
        """Return whether every live replica took part that could, and was not alone."""
        return len(self.participating) + len(self.late) == len(self.live) and not self.alone


def turnouts(
    record: CloseRecord, before: Roster, gone: Mapping[PeerId, str], left_out: Mapping[PeerId, str]
) -> tuple[Turnout, ...]:
    """Of every part of the roster ``before``, which took part in the record's step; none for a founding record.

    ``gone`` are those believed to be lost now, ``left_out`` whom the step's leader left out, each with the reason.
    O(members + microbatches × stages).
    """
    if record.founding:
        return ()
    far = {peer for _, peer, _, _ in far_sums(record, before)}
    return tuple(_turnout(part, record, before, far, gone, left_out) for part in before.parts)


def far_sums(record: CloseRecord, before: Roster) -> Iterator[tuple[PartName, PeerId, int, tuple[PeerId, ...]]]:
    """Yield whose sums are far from the others' by the word of most: by part the peer, how many of its tokens the mean
    lacks, more than half, and who says so, more than half of the part's replicas. One chunk may be far by chance, and
    one replica may lie."""
    for part in before.parts if record.guarded else ():
        replicas = before.replicas(part)
        did = weights(record.committed, replicas, part)
        for peer, (tokens, by) in record.called_far.items():
            if peer in did and 2 * tokens > did[peer] and 2 * len(by) > len(replicas):
                yield part, peer, tokens, by


def joined_late(step: int) -> str:
    """Return what is said of a replica that the record of ``step`` names first."""
    return f"joined with step {step}: averages from step {step + 1} on"


def _turnout(
    part: PartName,
    record: CloseRecord,
    before: Roster,
    far: Collection[PeerId],
    gone: Mapping[PeerId, str],
    left_out: Mapping[PeerId, str],
) -> Turnout:
    replicas, absent = before.replicas(part), set(record.absent)
    lost = tuple(peer for peer in replicas if peer in gone and peer in absent)
    late = tuple(peer for peer in record.members.replicas(part) if peer not in before)
    there = () if record.void else tuple(peer for peer in replicas if peer not in absent and peer not in record.late)
    holders = {holder for one, holder in held(record.committed, part) if one.tokens}
    averaged = tuple(peer for peer in there if peer in holders)
    why = {peer: f"lost: {gone[peer]}"[:REASON_CHARS] for peer in lost}
    for peer in replicas:
        if peer not in there and peer not in lost:
            known = f"left out: {left_out[peer]}" if peer in left_out else LEFT_OUT
            if peer in record.late:
                known = LATE
            why[peer] = GIVEN_UP if record.void else known
    why |= dict.fromkeys(late, joined_late(record.step))
    why |= dict.fromkeys((peer for peer in there if peer not in averaged), NO_WORK)
    called = {peer: said for peer, said in record.called_far.items() if peer in averaged}
    did = weights(record.committed, replicas, part) if called else {}
    for peer, (tokens, by) in called.items():
        names = ", ".join(before.names[one] if one in before else one for one in by)
        why[peer] = f"left out of the mean: {tokens} of {did[peer]} tokens, {FAR}, as {names} said"[:REASON_CHARS]
    averaged = tuple(peer for peer in averaged if peer not in far or called[peer][0] < did[peer])
    return Turnout(
        part=part,
        step=record.step,
        live=tuple(sorted({*replicas, *late} - {*lost})),
        participating=there,
        averaged=averaged,
        late=late,
        why=dict(list(why.items())[:MAX_TOLD]),
    )
