"""The tables of one term's closing: what was asked, who has answered what, and what follows from that. Pure.

Answers may come in any order: a table is made of sets and mappings, and looked at as a whole. What follows is returned
with the reason, or raised as a :class:`~swarm.step.decisions.Disagreement`, which names whom it is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple

from swarm.columns import digests_said, passed_by
from swarm.consensus.changes import Changes, with_work
from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord, Contribution
from swarm.consensus.roster import Roster
from swarm.consensus.trials import Trial, checked_words, following
from swarm.errors import PeerError, Refused, Superseded, Violation
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.network.protocols import ReplyT
from swarm.optim.clipping import Clipping
from swarm.step.decisions import (
    ATTEMPTS_PER_TERM,
    agreed,
    cursors,
    guarded,
    kept_digests,
    measured,
    paces,
    part_norms,
    round_inputs,
    totals,
    usual_by_part,
)
from swarm.step.messages import Apply, Averaged, Prepared, Reconcile
from swarm.step.rules import StepRules

# --- one attempt: who reconciled, who applied with which digest ------------------------------------------------------


class VoidAttempt(NamedTuple):
    """What follows where members have no result: the rounds of ``parts`` are void. Some lack work of trainers that are
    out, which is ``lost``; others are ``lacking`` something for another reason."""

    parts: tuple[PartName, ...]
    lost: Mapping[PeerId, tuple[MicrobatchId, ...]]
    lacking: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class ReconciledTable:
    """Who has averaged what was ``asked`` for, with which result: not who is far behind. ``roster`` is the step's."""

    roster: Roster
    asked: Reconcile
    answers: Mapping[PeerId, Averaged]

    def there(self, answered: Collection[PeerId]) -> Roster:
        """Return those with whom the attempt is made that have ``answered``."""
        return Roster(self.roster[peer] for peer in self.asked.live if peer in answered)

    def void(self, out: Collection[str]) -> tuple[VoidAttempt | None, str]:
        """Return what follows where a member has no result, and why it has none; None where all have one. Then its
        part's round is void for all who were in it. ``out`` are those that do not close the step."""
        failed = {peer: self.answers[peer] for peer in sorted(self.answers) if self.answers[peer].failure}
        if not failed:
            return None, ""
        parts = {PartName(self.roster[peer].part or "") for peer in failed} & set(self.roster.parts)
        cannot_hold = {peer: one for peer, one in failed.items() if one.culprit == peer and not one.differs}
        orphaned = {
            peer: tuple(microbatch for microbatch in one.missing if microbatch.trainer in out)
            for peer, one in cannot_hold.items()
        }
        lost = {peer: microbatches for peer, microbatches in orphaned.items() if microbatches}
        lacking = {peer: one.failure for peer, one in cannot_hold.items() if peer not in lost}
        said = {peer: f" of {one.culprit}" if one.culprit not in (None, peer) else "" for peer, one in failed.items()}
        reason = "; ".join(f"{peer}{said[peer]}: {one.failure}" for peer, one in failed.items())
        return VoidAttempt(tuple(sorted(parts)), lost, lacking), reason

    def scalars(self, rules: StepRules) -> tuple[Apply, Clipping]:
        """Return what all are to apply, and what it does to their means. Raises Disagreement."""
        asked, sq_norms = self.asked, part_norms(self.there(self.answers), self.answers)
        clipped = rules.clipped(sq_norms)
        said = {str(peer): answer.guarded for peer, answer in self.answers.items()} if rules.guards else {}
        told = {str(peer): answer.lengths for peer, answer in self.answers.items()} if rules.influence else {}
        words = {str(peer): answer.words for peer, answer in self.answers.items()} if rules.tries_trainers else {}
        apply = Apply(
            step=asked.step,
            term=asked.term,
            lr=rules.lr(asked.step),
            clip=clipped.clip,
            sq_norms=sq_norms,
            guarded=guarded(self.roster, asked.committed, said),
            lengths={peer: lengths for peer, lengths in sorted(told.items()) if any(lengths)},
            words=checked_words(self.roster, asked.committed, words),
        )
        return apply, clipped


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """Who has computed the update of a mean as was ``asked``, with which digest."""

    reconciled: ReconciledTable
    asked: Apply
    clipped: Clipping
    answers: Mapping[PeerId, Prepared]

    def digests(self) -> Mapping[PartName, str]:
        """Return what replicas say of each part's state after the step. Raises Disagreement."""
        said = {peer: answer.digest for peer, answer in self.answers.items()}
        return agreed("the updated weights", self.reconciled.there(said), said)

    def _trials(self, before: CloseRecord) -> dict[str, Trial]:
        asked, words = self.reconciled.asked, self.asked.words
        known = bool(words or before.trials)
        return following(before.trials, asked.step, self.reconciled.roster, asked.committed, words) if known else {}

    def record(
        self, before: CloseRecord, previous: str, changes: Changes, following: Roster, most: int, **more: Any
    ) -> CloseRecord:
        """Return the step's record, after ``before`` with the hash ``previous``. It grants ``changes``, which make the
        roster ``following``, and has room for ``most`` cursors; ``more`` are other fields. Raises Disagreement."""
        attempt, averaged = self.reconciled.asked, self.reconciled.answers
        tokens, loss_sum = totals(attempt.committed)
        following = with_work(following, attempt.step, {one.microbatch.trainer for one in attempt.committed})
        return CloseRecord(
            run=before.run,
            step=attempt.step,
            term=attempt.term,
            committed=attempt.committed,
            tokens=tokens,
            loss_sum=loss_sum,
            grad_norm=self.clipped.norm,
            clip=self.asked.clip,
            lr=self.asked.lr,
            norms=self.asked.sq_norms,
            caps={str(part): cap for part, cap in self.clipped.caps.items()},
            guarded=self.asked.guarded,
            lengths=self.asked.lengths,
            usual=usual_by_part(self.reconciled.roster, before.usual, self.asked.lengths),
            words=self.asked.words,
            trials=self._trials(before),
            passed=passed_by(before.passed, self.reconciled.roster.parts, attempt.committed),
            digests=dict(one for each in self.digests().items() for one in digests_said(*each).items())
            | kept_digests(before, changes),
            cursors=cursors(before, attempt.committed, averaged, following, most),
            roster=following.members,
            absent=changes.absent,
            ended=changes.end(self.reconciled.roster),
            links=measured(before, averaged, following),
            paces=paces(before, averaged, following),
            returns=before.returns,
            previous=previous,
            **more,
        )


# --- who promised, who accepted --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VoterTable(Generic[ReplyT]):
    """Whose answers to a question a majority of ``electors`` must be among: those ``given`` so far, and why others gave
    none when they were asked last."""

    electors: tuple[PeerId, ...]
    given: Mapping[PeerId, ReplyT] = field(default_factory=dict)
    refused: Mapping[PeerId, PeerError] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Return how many of the electors must answer."""
        return majority(len(self.electors))

    @property
    def count(self) -> int:
        """Return how many of them have."""
        return sum(peer in self.given for peer in self.electors)

    def asked_next(self, peers: Sequence[PeerId], gone: Collection[PeerId]) -> list[PeerId]:
        """Return whom of ``peers`` to ask: those that are there and have not answered. When too few electors are there,
        those that are gone as well: started anew, they may have kept their vote, if nothing else."""
        few = sum(peer in self.given or peer not in gone for peer in self.electors) < self.needed
        return [p for p in peers if p not in self.given and (p not in gone or (few and p in self.electors))]

    def told(self, said: Mapping[PeerId, ReplyT | PeerError]) -> VoterTable[ReplyT]:
        """Return the table with what those say who were asked."""
        errors = {peer: answer for peer, answer in said.items() if isinstance(answer, PeerError)}
        given = {peer: answer for peer, answer in said.items() if not isinstance(answer, PeerError)}
        return replace(self, given={**self.given, **given}, refused=errors)

    @property
    def decision(self) -> tuple[Literal["majority", "refused", "open"], str]:
        """Return whether a majority has answered, so many say no that it cannot be one, or neither; and why."""
        if self.count >= self.needed:
            return "majority", f"{self.count} of {len(self.electors)}"
        errors = {peer: self.refused[peer] for peer in sorted(self.refused) if peer in self.electors}
        said_no = [str(error) for error in errors.values() if isinstance(error, (Refused, Violation))]
        if len(said_no) > len(self.electors) - self.needed:
            return "refused", "; ".join(said_no)
        return "open", f"{self.count} of {len(self.electors)}, {self.needed} are needed"


# --- attempts at a part's averaging ----------------------------------------------------------------------------------


MAX_TIES, TIED_S = 3, 30.0
"""From so many ties in a term on the next attempt waits for so long: of two replicas one that lies, or whose memory
fails, may do so each time."""


class AttemptNumbers:
    """Numbers that no other attempt of the step has, each part's own."""

    def __init__(self, term: int, roster: Roster) -> None:
        self._term, self._roster = term, roster
        self._made: Counter[PartName] = Counter()
        self._under_way: dict[PartName, object] = {}
        self._ties = 0

    def numbers(
        self, committed: Sequence[Contribution], live: Sequence[PeerId], forfeits: Sequence[PeerId] = ()
    ) -> dict[str, int]:
        """Each part's attempt: a new number when its last round was void, or who takes part in it, what they must hold
        or what it weighs has changed. Raises Superseded when the term has no more: the next one is another's."""
        numbers = {}
        for part in self._roster.parts:
            wanted = round_inputs(self._roster, part, committed, live, forfeits)
            if self._under_way.get(part) != wanted:
                if self._made[part] == ATTEMPTS_PER_TERM - 1:
                    raise Superseded(f"{self._made[part]} attempts at averaging {part} came to nothing in one term")
                self._under_way[part] = wanted
                self._made[part] += 1
            numbers[str(part)] = self._term * ATTEMPTS_PER_TERM + self._made[part]
        return numbers

    def void(self, part: PartName) -> None:
        """The round under way gave nothing."""
        self._under_way.pop(part, None)

    def tied(self, part: PartName) -> float:
        """It gave one result to as many replicas as another: all must average anew, else each would answer again what
        it has answered. Returns how many seconds later: others may be back, or somebody looks at the machines."""
        self.void(part)
        self._ties += 1
        return TIED_S if self._ties >= MAX_TIES else 0.0
