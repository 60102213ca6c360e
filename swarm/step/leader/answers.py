"""Judge members by what they answer: which answers a leader believes, and whom it blames for void rounds. Pure.

No member's word is enough against another's: a part of three replicas and more loses one only when two others blame it,
or when it alone blames others again and again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from swarm.consensus.acceptor import Promised, Vote, check_promise, may_be_decided, promise_bytes
from swarm.consensus.faults import MAX_STATEMENTS, AveragingFault, Proven, check_fault
from swarm.consensus.records import (
    MAX_VOTERS,
    acceptance_bytes,
    by_trainer,
    check_acceptances,
    rows_bytes,
)
from swarm.consensus.roster import Roster, owner
from swarm.errors import OutOfSync, Refused, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.schema import AFTER_CHARS, Message
from swarm.security.signing import averaging_bytes
from swarm.security.statements import AuditStatement
from swarm.step.context import CloseContext
from swarm.step.decisions import Disagreement
from swarm.step.member.acceptance import AcceptanceRules
from swarm.step.messages import Accepted, Averaged, Prepared, Promise, Propose, Reconcile
from swarm.step.results import Asked, ResultSigning

MAX_VOID = 3
"""Void rounds of a part that are put up with: then who is blamed for as many is left out. Where that is nobody, its
rounds go plainly: straight to who reduces, with other duties in each attempt, so that faults show to several."""

REMEMBERED = 32
"""The last void rounds of a part that count."""

Blamed = tuple[PeerId, PeerId]
"""Who blames whom."""


class Verdict(NamedTuple):
    """A member that is to be left out of the step, and why: it ``differs``, or rounds break with it."""

    peer: PeerId
    why: str
    differs: bool = False


class VoidRounds:
    """Void rounds of one term of a step, part by part. Parts in ``plainly`` take the plainest way by now."""

    def __init__(self) -> None:
        self.plainly: set[PartName] = set()
        self._differing: defaultdict[PartName, dict[PeerId, list[set[PeerId]]]] = defaultdict(dict)
        self._void: defaultdict[PartName, deque[frozenset[Blamed]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def void(self, part: PartName, answers: Mapping[PeerId, Averaged]) -> None:
        """A round of a part gave nothing; these are the answers of all that were in it."""
        pairs = _named(answers, differs=False)
        at_a_loss = not any(answer.culprit in answers for answer in answers.values() if answer.failure)
        if at_a_loss and part in self.plainly:
            pairs = _aborted(answers) | _unexplained(answers)
        self._void[part].append(frozenset(pairs))
        if part in self.plainly:
            before, named = self._differing[part], _named(answers, differs=True)
            self._differing[part] = {
                peer: [*before.get(peer, []), {one for one, other in named if other == peer}]
                for peer in {other for _, other in named}
            }

    def unsigned(self, found: Disagreement) -> bool:
        """Return whether the one who reduced may have given one of those that disagree other numbers than the rest:
        then nobody is to blame yet, and the part goes plainly from now on, where all sign what they hold."""
        unsigned = found.of_sums and found.part not in self.plainly
        if unsigned:
            self.plainly.add(found.part)
        return unsigned

    def unfit(self, part: PartName, group: Sequence[PeerId]) -> Verdict | None:
        """Which of a part's members is to be left out by now, and why. Where it is nobody after several void rounds,
        the part goes plainly from now on, and is judged by that alone."""
        for peer, by_round in self._differing[part].items():
            # In a turn of each in which that one reduced nothing: else a reducer could have it differ.
            if peer in group and len(by_round) >= max(MAX_VOID, len(group)) and len(set().union(*by_round)) >= 2:
                return Verdict(peer, "it held another result than the others, whoever had reduced it", differs=True)
        voids = [frozenset(pair for pair in void if set(pair) <= set(group)) for void in self._void[part]]
        found = self._judged(voids, group, alone=part in self.plainly or len(group) == 2)
        if found is not None or (len(voids) >= MAX_VOID and part not in self.plainly):
            self._void[part].clear()
        if found is None and len(voids) >= MAX_VOID:
            self.plainly.add(part)
        return found

    def at_a_loss(self, part: PartName) -> bool:
        """Return whether even plain rounds broke again and again without anybody to leave out."""
        return part in self.plainly and len(self._void[part]) >= MAX_VOID

    def _judged(self, voids: Sequence[frozenset[Blamed]], group: Sequence[PeerId], *, alone: bool) -> Verdict | None:
        by = {peer: {one for void in voids for one, other in void if other == peer} for peer in group}
        times = {peer: sum(any(other == peer for _, other in void) for void in voids) for peer in group}
        needed = 1 if len(group) == 2 else 2
        worst = max(group, key=lambda peer: (len(by[peer]) >= needed, times[peer]), default=None)
        if worst is not None and times[worst] >= MAX_VOID and len(by[worst]) >= needed:
            return Verdict(worst, "rounds with it failed again and again")
        made = {peer: sum(any(one == peer for one, _ in void) for void in voids) for peer in group}
        loudest = max(group, key=lambda peer: made[peer] and made[peer] + times[peer], default=None)
        if alone and loudest is not None and made[loudest] >= MAX_VOID:
            return Verdict(loudest, "rounds with it failed again and again, and nobody else found others to blame")
        return None


def _named(answers: Mapping[PeerId, Averaged], *, differs: bool) -> set[Blamed]:
    """Return who names another as the one on whom it broke. That somebody ``differs`` is another matter: the one who
    reduced may have given it other numbers."""
    return {
        (peer, PeerId(answer.culprit))
        for peer, answer in answers.items()
        if answer.failure and answer.differs is differs and answer.culprit is not None
        if answer.culprit in answers and answer.culprit != peer
    }


def _aborted(answers: Mapping[PeerId, Averaged]) -> set[Blamed]:
    """Return who of a plain round says that another gave it up, where nobody says on whom it broke: one that gives up
    has to know. Not held against who was told so itself, unless by one that says the same of it."""
    told = {
        peer: PeerId(answer.aborted_by)
        for peer, answer in answers.items()
        if answer.aborted_by is not None and answer.aborted_by in answers and answer.aborted_by != peer
    }
    return {(peer, by) for peer, by in told.items() if by not in told or told[by] == peer or told.get(told[by]) == by}


def _unexplained(answers: Mapping[PeerId, Averaged]) -> set[Blamed]:
    """A member that holds the result of a plain round has everybody's signature: held against those that say it is void
    and not who told them."""
    void = {peer for peer, answer in answers.items() if answer.failure and answer.aborted_by not in answers}
    return {(peer, other) for peer, answer in answers.items() if not answer.failure for other in void}


# --- which answers are believed --------------------------------------------------------------------------------------
# A lie that the leader passed on would be its own: others would refuse what it proposes, or a decision that lacks
# signatures.


class AnswerRules:
    """Those of the leader of one term of a step."""

    def __init__(self, closing: CloseContext, step: int, term: int, roster: Roster) -> None:
        self._history, self._verify, self._refused = closing.history, closing.verify, closing.refused
        self._me, self._run = closing.calls.me, closing.rules.run
        self._step, self._term, self._roster = step, term, roster
        self._accepts = AcceptanceRules(closing.calls.me, closing.rules, closing.history, closing.verify)
        self._possible: list[Vote] = []

    def check(self, peer: PeerId, asked: Message, answer: Message, *, counts: bool = True) -> None:
        """Raises Violation for an answer that cannot be honest, WrongStep when the step was closed meanwhile. What one
        accepted that does not vote, and so does not ``count``, changes nothing: it is not looked at."""
        if isinstance(answer, Promise):
            self._check_promise(peer, answer, counts=counts)
        elif isinstance(answer, Accepted) and isinstance(asked, Propose):
            signed = acceptance_bytes(asked.record, asked.term)
            if not self._verify(peer, signed, answer.signature):
                raise Violation("its signature under the record is forged", peer=peer)

    def may_ignore(
        self, vote: Vote, given: Mapping[PeerId, Promise], electors: Collection[PeerId], refused: Collection[str]
    ) -> bool:
        """Return whether a record that somebody accepted need not be proposed again: it cannot have been decided, for
        too few of the voters can have accepted it, and it keeps no work, we vetoed it, it is one of those that others
        ``refused``, by their hashes, it calls us lost, or only its own leader accepted it."""
        digest, said = vote.record.hash(), {peer: given[peer].vote for peer in electors if peer in given}
        hashes = {peer: None if voted is None else voted.record.hash() for peer, voted in said.items()}
        if may_be_decided(digest, hashes, electors, set(electors) - hashes.keys()):
            return False
        alone = {peer for peer in hashes if hashes[peer] == digest} <= {owner(self._roster, self._step, vote.term)}
        unwanted = digest in refused or self._refused(digest) or self._me in vote.record.absent
        return vote.record.void or alone or unwanted

    def suffice(self, live: Collection[str], answered: Collection[PeerId]) -> bool:
        """Return whether what these answered is all that a record needs of those with whom its step is closed: of each
        part what more than half of the replicas say, and what each trainer and this member do."""
        if not {self._me, *self._roster.trainers}.intersection(live) <= set(answered):
            return False
        parts = ([peer for peer in self._roster.replicas(part) if peer in live] for part in self._roster.parts)
        return all(2 * len(set(replicas).intersection(answered)) > len(replicas) for replicas in parts)

    def unsigned(self, asked: Reconcile, averaged: Mapping[PeerId, Averaged]) -> list[PeerId]:
        """Return the trainers that answered without their signature under their rows of the step."""
        absent, step = asked.absent(self._roster.peers), (self._run, self._step, self._history.head_hash)
        return [
            trainer
            for trainer, rows in by_trainer(asked.committed).items()
            if trainer in averaged
            and not self._verify(trainer, rows_bytes(*step, rows, absent), averaged[trainer].rows)
        ]

    def wrong(self, part: PartName, answers: Mapping[PeerId, Averaged]) -> list[tuple[AveragingFault, Proven]]:
        """Return what proves members wrong by what they did in a void round of a part, and whom it does: as so many of
        the others have signed, each of whom saw it for itself."""
        said: defaultdict[str, list[AuditStatement]] = defaultdict(list)
        step, previous = self._step, self._history.head_hash
        for peer, answer in answers.items():
            if answer.culprit is not None and answer.culprit != peer:
                signed = averaging_bytes(self._run, step, previous[:AFTER_CHARS], part, answer.culprit, wrong=True)
                if self._verify(peer, signed, answer.proven):
                    said[answer.culprit].append(AuditStatement(auditor=peer, wrong=True, signature=answer.proven))
        found: list[tuple[AveragingFault, Proven]] = []
        for accused, statements in sorted(said.items()):
            fault = AveragingFault(
                step=step,
                after=previous[:AFTER_CHARS],
                part=part,
                accused=accused,
                statements=tuple(statements[:MAX_STATEMENTS]),
            )
            with contextlib.suppress(Refused):  # too few of them say so
                found.append((fault, check_fault(self._run, self._roster, step, previous, fault, self._verify)))
        return found

    def unproven(self, asked: Asked, prepared: Mapping[PeerId, Prepared]) -> list[PeerId]:
        """Return the replicas that answered without their signature under the digest of the state after the step."""
        signing = ResultSigning(self._run, self._step, self._history.head_hash)
        silent: list[PeerId] = []
        for part in self._roster.parts:
            replicas = [peer for peer in self._roster.replicas(part) if peer in prepared]
            said = {peer: (prepared[peer].digest, prepared[peer].signed) for peer in replicas}
            silent += asked.unsigned(signing, "weights", part, said, self._verify)
        return silent

    def _check_promise(self, peer: PeerId, answer: Promise, *, counts: bool) -> None:
        """A record that a voter says it accepted has to be proposed again: it must be one that others can accept."""
        if self._history.next_step != self._step:
            raise WrongStep(f"step {self._step} is closed, step {self._history.next_step} is open")
        step, vote, candidate = (self._run, self._step, self._history.head_hash), answer.vote, answer.candidate
        said = promise_bytes(step, self._term, answer.accepted, answer.free)
        if counts and not self._verify(peer, said, answer.signed):
            raise Violation("its signature under its promise is forged", peer=peer)
        offered = None if candidate is None else candidate.vote
        told = Promised(vote, answer.free, offered) if counts else Promised(None, 0, offered)
        check_promise(told, self._term, self._history.check)
        try:
            for one in filter(None, (told.vote, offered)):
                self._check_possible(one)
            if candidate is not None:
                record = candidate.vote.record
                check_acceptances(record, self._roster, candidate.acceptances, self._verify, candidate.term)
        except (Refused, OutOfSync) as error:
            raise Violation(f"a vote on what no leader can have proposed: {error}", peer=peer) from error

    def _check_possible(self, vote: Vote) -> None:
        """What many accepted is looked at once, with all its signatures: no matter who tells of it, in which term."""
        shown = vote.model_copy(update={"term": vote.record.term})
        if shown not in self._possible:
            self._accepts.check_possible(self._roster, vote)
            self._possible = [*self._possible, shown][-MAX_VOTERS:]
