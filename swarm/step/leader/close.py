"""Closing one step, as the leader of one of its terms: read :meth:`Leading.run` first.

A member that is lost costs another attempt, not the step: what it held is computed again by those that are there, and
the next record's roster is without it. Nobody swaps before a majority has accepted the record, and everybody swaps to
the same bits.
"""

# Over 400 lines: a leader's way through a step is one story, with what it does when each of its questions fails.
from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from swarm.consensus.acceptor import Promised, Vote, majority, must_propose
from swarm.consensus.branches import best
from swarm.consensus.changes import Changes, with_work
from swarm.consensus.ledger import reassigned
from swarm.consensus.records import CloseRecord, Contribution, voters
from swarm.consensus.roster import Roster
from swarm.errors import OutOfSync, PeerError, Refused, Superseded, Violation, WrongStep
from swarm.events import AttemptFailed, Committed, DigestMismatch, TermBegan, WorkExcluded
from swarm.ids import PartName, PeerId
from swarm.network.protocols import ReplyT, RequestT, Rpc
from swarm.step.blocked import awaited_agreement, awaited_majority, awaited_round
from swarm.step.calls import LiveCalls
from swarm.step.context import CloseContext
from swarm.step.decisions import Attempts, Disagreement, StepOutcome, agreed, cursors, measured, part_norms, totals
from swarm.step.leader.answers import AnswerRules, VoidRounds
from swarm.step.leader.batch import RETURNED_S, BatchCollection, PartsLost
from swarm.step.leader.exclusion import ExclusionPolicy
from swarm.step.leader.rescue import Rescuing, absent
from swarm.step.messages import (
    APPLY,
    DECIDE,
    PREPARE,
    PROPOSE,
    RECONCILE,
    Apply,
    Averaged,
    Decide,
    Prepare,
    Prepared,
    Propose,
    Reconcile,
)
from swarm.step.ties import Asked
from swarm.waiting import ExponentialBackoff, first_done

logger = logging.getLogger(__name__)


class _Retry(Exception):
    """An attempt failed; who is unfit is noted, and another may be made, after so long or when who is there changes."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass(slots=True)
class Leading:
    """One term of one step. ``decided`` is its record, once a majority accepted it; the members ``told`` know it.
    ``overdue`` is why the leader before does not lead any more, though it is there."""

    provisional: ClassVar[bool] = False
    closing: CloseContext
    step: int
    term: int
    overdue: str = ""
    _roster: Roster = field(init=False)
    _fitness: ExclusionPolicy = field(default_factory=ExclusionPolicy)
    _blame: VoidRounds = field(default_factory=VoidRounds)
    _attempts: Attempts = field(init=False)
    _refusals: dict[PeerId, PeerError] = field(default_factory=dict)
    _tries: int = 0
    _calls: LiveCalls = field(init=False)
    _filling: BatchCollection = field(init=False)
    _rescuing: Rescuing = field(init=False)
    _believes: AnswerRules = field(init=False)
    told: set[PeerId] = field(default_factory=set)
    decided: CloseRecord | None = None
    _decide: Decide | None = None

    def __post_init__(self) -> None:
        self._roster = self.closing.history.head.members
        self._attempts = Attempts(self.term, self._roster)
        self._calls = LiveCalls(self.closing.calls, self.closing.liveness)
        self._filling = BatchCollection(self.closing, self.step, self.term, self._fitness, self._electors)
        self._rescuing = Rescuing(self.closing, self.step, self.term, self._filling)
        self._believes = AnswerRules(self.closing, self.step, self.term, self._roster)

    async def run(self) -> CloseRecord:
        """Lead until the step is decided and all know who are there; returns the record. Raises as :meth:`decide`."""
        record = await self.decide()
        await self.announce()
        return record

    async def decide(self) -> CloseRecord:
        """Lead until the step is decided; returns the record, of which nobody has been told yet.

        Raises Superseded when another leads, or only a later term can get further: because so many attempts failed that
        this one has no more numbers, or what was asked in it cannot be granted; WrongStep when the step was closed by
        another, OutOfSync when so many refuse the record that it cannot be decided, RunEnded when a part of the model
        is lost with its last replica. Waits, and says so, for as long as the voters that are there and follow are no
        majority, and as many replicas of a part have one result as another.
        """
        proposal = None
        if self.term > 0:
            vote = await self._promises()
            self.closing.desk.book.begin_term(self.term, self.closing.liveness.gone)
            self._filling.quota_again()
            if vote is not None:
                proposal = Propose(record=vote.record, changes=vote.changes, term=self.term)
        if proposal is None:
            proposal = await self._own_proposal()
        await self._have_accepted(proposal)
        if not proposal.record.void:
            committed = tuple(one.microbatch for one in proposal.record.committed)
            self.closing.events.emit(Committed(step=self.step, microbatches=committed))
        return proposal.record

    # --- who leads -----------------------------------------------------------------------------------------------

    async def _promises(self) -> Vote | None:
        """Have everybody follow this term. Returns the record that must be proposed, if there is one."""
        gone = [f"{peer}: {why}" for peer, why in sorted(self.closing.liveness.gone.items())]
        reason = "; ".join([*([f"its leader is overdue: {self.overdue}"] if self.overdue else []), *gone])
        self.closing.events.emit(TermBegan(step=self.step, term=self.term, leader=self.closing.calls.me, reason=reason))
        body, electors = Prepare(step=self.step, term=self.term), self._electors()
        given = await self._from_many(self._roster.peers, electors, PREPARE, body)
        vote = must_propose([Promised(given[peer].vote, given[peer].free) for peer in electors if peer in given])
        if vote is not None and not self._believes.may_ignore(vote, given, electors):
            return vote
        return best(answer.candidate for answer in given.values() if answer.candidate is not None)

    def _electors(self) -> tuple[PeerId, ...]:
        """Who decides the step."""
        return voters(self._roster, self.closing.history.head_hash)

    # --- the result ----------------------------------------------------------------------------------------------

    async def _own_proposal(self) -> Propose:
        patience = ExponentialBackoff(0.05)
        while True:
            try:
                committed = await self._filling.run()
            except PartsLost:
                proposal = await self._rescuing.run()
                if proposal is None:
                    self._filling.forgive_needed()
                    continue
                return proposal
            try:
                with absent(self.closing.calls, self.closing.desk.book.requests.asking()) as missing:
                    outcome = await self._attempt(committed)
                lost = [peer for peer in self._roster.peers if peer not in outcome.live]
                return self._proposal(outcome, *self._settle(missing, lost))
            except _Retry as failed:
                self._tries += 1
                self.closing.events.emit(AttemptFailed(step=self.step, term=self.term, reason=str(failed)[:400]))
                await self.closing.clock.sleep(patience.pause_s() if self._tries > 1 else 0.0)
                if failed.after_s:
                    await first_done(self.closing.clock.sleep(failed.after_s), self.closing.liveness.changed())

    def _settle(self, missing: Collection[PeerId], lost: Collection[PeerId]) -> tuple[Changes, Roster]:
        """Who joins and leaves with the step. Raises Superseded when the run may not become that: what was asked is
        forgotten with the term, and whoever still wants it asks again."""
        try:
            return self.closing.desk.book.requests.settle(missing, lost)
        except (Refused, Violation) as error:
            raise Superseded(f"what was asked in this term cannot be granted: {error}") from error

    async def _try(self, peer: PeerId, rpc: Rpc[RequestT, ReplyT], body: RequestT) -> ReplyT | None:
        """One member's answer, None when it gives none. Raises Superseded and WrongStep."""
        timeout_s = self.closing.timeout_s()
        try:
            if peer in self.closing.liveness.gone:
                short_s = min(timeout_s, RETURNED_S)
                answer = await self.closing.calls.ask(peer, rpc, body, timeout_s=short_s)
            else:
                answer = await self._calls.ask(peer, rpc, body, timeout_s=timeout_s)
            self._believes.check(peer, body, answer)
            return answer
        except (Superseded, WrongStep):
            raise
        except PeerError as error:
            logger.info("step %d, %s: %s", self.step, rpc.name, error)
            self._refusals[peer] = error
            return None

    def _live(self) -> tuple[PeerId, ...]:
        """Who closes the step."""
        out = self._filling.out
        return tuple(peer for peer in self._roster.peers if peer not in out)

    async def _attempt(self, committed: tuple[Contribution, ...]) -> StepOutcome:
        """Reconcile, average and apply, once, with those that are there. Raises _Retry when one of them fails."""
        live = self._live()
        stages = [[peer for peer in replicas if peer in live] for replicas in self._roster.stages()]
        counted = reassigned(committed, stages, computed_again=self.closing.rules.inner_steps == 1)
        reconcile = Reconcile(
            step=self.step,
            term=self.term,
            committed=counted,
            live=live,
            provisional=self.provisional,
            within_s=max(self.closing.timeout_s(), self.closing.averaging_s(self._blame.plainly)),
            attempts=self._attempts.numbers(counted, live),
            plainly=tuple(sorted(self._blame.plainly)),
            left_out=self._filling.left_out,
        )
        averaged = await self._all(live, RECONCILE, reconcile)
        await self._judge(averaged)
        if silent := self._believes.unsigned(counted, averaged):  # none would accept their rows from us
            self._fitness.holds_up(dict.fromkeys(silent, "it does not sign what it reported"))
            raise _Retry(f"{silent[0]} does not sign what it reported")
        rules, alive = self.closing.rules, Roster(self._roster[peer] for peer in live)
        prepared: dict[PeerId, Prepared] = {}
        try:
            sq_norms = part_norms(alive, averaged)
            clipped = rules.clipped(sq_norms)
            apply = Apply(step=self.step, term=self.term, lr=rules.lr(self.step), clip=clipped.clip, sq_norms=sq_norms)
            prepared = await self._all(live, APPLY, apply)
            digests = agreed("the updated weights", alive, {peer: answer.digest for peer, answer in prepared.items()})
        except Disagreement as found:
            answers: Mapping[PeerId, Averaged | Prepared] = prepared or averaged
            signed = {peer: answers[peer].signed for peer in found.digests}
            await self._leave_out(found, Asked(reconcile, apply if prepared else None), signed)
            raise _Retry(str(found)) from found
        return StepOutcome(counted, averaged, clipped, apply, digests, live)

    async def _leave_out(self, found: Disagreement, asked: Asked, signed: Mapping[PeerId, bytes]) -> None:
        """Who differs from what most replicas of a part have is unfit: the step closes without it, so it is cut off and
        gets the state anew. When no answer is that of most, nobody knows which is right: all compute theirs anew, and
        after a second time a copy of the part takes over (:meth:`Rescuing.break_tie`)."""
        self.closing.events.emit(DigestMismatch(step=self.step, part=found.part, digests=dict(found.shown)))
        dissenters = found.dissenters or await self._rescuing.break_tie(found, asked, signed)
        if not dissenters:
            self.closing.waiting(awaited_agreement(self._roster, found.part, found.digests))
            raise _Retry(str(found), self._attempts.tied(found.part)) from found
        self._fitness.differ(dissenters, str(found))

    async def _judge(self, averaged: Mapping[PeerId, Averaged]) -> None:
        """Raises _Retry when a member has no result: then its part's round is void for all who were in it."""
        failed = {peer: answer for peer, answer in averaged.items() if answer.failure}
        if not failed:
            return
        void = sorted({PartName(self._roster[peer].part or "") for peer in failed} & set(self._roster.parts))
        for peer, answer in failed.items():
            if answer.culprit == peer and not answer.differs:
                self._cannot_hold(peer, answer)
        reasons = "; ".join(f"{peer}: {answer.failure}" for peer, answer in sorted(failed.items()))
        await self.closing.liveness.check(self._roster.peers, reasons)
        for part in void:
            self._attempts.void(part)
            self._hold_against(part, {peer: averaged[peer] for peer in self._roster.replicas(part) if peer in averaged})
        raise _Retry(reasons)

    def _hold_against(self, part: PartName, answers: Mapping[PeerId, Averaged]) -> None:
        """Who answers us and yet breaks round after round for others is left out of this step."""
        self._blame.void(part, answers)
        out = self._filling.out
        found = self._blame.unfit(part, tuple(peer for peer in answers if peer not in out))
        if found is not None and found.differs:
            self._fitness.differ((found.peer,), found.why)
        elif found is not None:
            self._fitness.holds_up({found.peer: found.why})
        elif self._blame.at_a_loss(part):
            reasons = {answer.failure for answer in answers.values() if answer.failure}
            self.closing.waiting(awaited_round(part, min(reasons, default="")))

    def _cannot_hold(self, peer: PeerId, answer: Averaged) -> None:
        """It lacks microbatches of a trainer that is gone or left out, then these are lost; else it may be unfit."""
        out = self._filling.out
        orphaned = [microbatch for microbatch in answer.missing if microbatch.trainer in out]
        if orphaned:
            excluded = self.closing.desk.book.exclude(orphaned)
            reason = f"{peer}: {answer.failure}"[:400]
            self.closing.events.emit(WorkExcluded(step=self.step, microbatches=excluded, reason=reason))
            self._filling.quota_again()
            return
        self._fitness.lacks(peer, answer.failure)

    async def _all(self, peers: Sequence[PeerId], rpc: Rpc[RequestT, ReplyT], body: RequestT) -> dict[PeerId, ReplyT]:
        """Everybody's answer. Raises _Retry when one fails or is found gone, having found out who is gone; Superseded
        and WrongStep as they come."""
        timeout_s = getattr(body, "within_s", None) or self.closing.timeout_s()
        answers = await self._calls.gather(peers, rpc, body, timeout_s=timeout_s)
        for error in answers.failed.values():
            if isinstance(error, (Superseded, WrongStep)):
                raise error
        if answers.failed:
            await self._find_out(answers.failed)
        return answers.given

    async def _find_out(self, failed: Mapping[PeerId, PeerError]) -> None:
        """Raises _Retry, when each has answered a ping, is found gone, or is doubted; who is not gone may be unfit for
        this step."""
        reasons = "; ".join(str(error) for error in failed.values())
        await self.closing.liveness.check(tuple(failed), reasons)
        for peer, error in failed.items():
            there = peer not in self.closing.liveness.gone
            self._fitness.failed(peer, error, there=there, last=self._filling.is_last(peer))
        raise _Retry(reasons)

    # --- the record ----------------------------------------------------------------------------------------------

    def _proposal(self, outcome: StepOutcome, changes: Changes, following: Roster) -> Propose:
        history = self.closing.history
        (tokens, loss_sum), averaged = totals(outcome.committed), outcome.averaged
        following = with_work(following, self.step, {one.microbatch.trainer for one in outcome.committed})
        record = CloseRecord(
            run=self.closing.rules.run,
            step=self.step,
            term=self.term,
            committed=outcome.committed,
            aside=self.closing.desk.book.aside(),
            tokens=tokens,
            loss_sum=loss_sum,
            grad_norm=outcome.clipped.norm,
            clip=outcome.apply.clip,
            lr=outcome.apply.lr,
            caps={str(part): cap for part, cap in outcome.clipped.caps.items()},
            digests={str(part): value for part, value in outcome.digests.items()},
            cursors=cursors(history.head, outcome.committed, averaged, following, self.closing.rules.max_members),
            roster=following.members,
            absent=changes.absent,
            ended=changes.end(self._roster),
            links=measured(history.head, averaged, following),
            **self._lineage(),
            previous=history.head_hash,
        )
        rows: dict[str, bytes] = {peer: answer.rows for peer, answer in averaged.items() if answer.rows}
        return Propose(record=record, changes=changes, term=self.term, rows=rows)

    def _lineage(self) -> dict[str, Any]:
        """Of the lineage of the record before, or out of it with the proof that it was confirmed."""
        head, proof = self.closing.history.head, self.closing.confirmed()
        if head.provisional and proof is not None:
            return {"confirmation": proof}
        return {"lineage": head.lineage}

    async def _have_accepted(self, proposal: Propose) -> None:
        """Have the record accepted by a majority of the voters: then it is decided. The others get to know it too."""
        record = proposal.record
        electors = self._electors()
        answers = await self._from_many(self._roster.peers, electors, PROPOSE, proposal)
        signatures: dict[str, bytes] = {peer: answer.signature for peer, answer in answers.items()}
        self._decide = Decide(step=record.step, record=record.hash(), term=self.term, acceptances=signatures)
        self.decided = record

    async def _from_many(
        self, peers: Sequence[PeerId], electors: Sequence[PeerId], rpc: Rpc[RequestT, ReplyT], body: RequestT
    ) -> dict[PeerId, ReplyT]:
        """The answers of those who are there, among them a majority of the electors: until it is one, who has not
        answered is asked again. When too few are there, those that are gone are asked as well: started anew, they may
        have kept their vote, if nothing else. Raises OutOfSync when so many say no that it cannot be one; but where
        nobody has voted yet it asks on: those who answer for another step, or see another lead, may be back."""
        given: dict[PeerId, ReplyT] = {}
        patience, needed = ExponentialBackoff(0.1), majority(len(electors))
        while True:
            gone = self.closing.liveness.gone
            few = sum(peer in given or peer not in gone for peer in electors) < needed
            asked = [p for p in peers if p not in given and (p not in gone or (few and p in electors))]
            self._refusals.clear()
            answers = await asyncio.gather(*(self._try(peer, rpc, body) for peer in asked))
            given |= {peer: answer for peer, answer in zip(asked, answers, strict=True) if answer is not None}
            count = sum(peer in given for peer in electors)
            if count >= needed:
                self.closing.waiting("")
                return given
            refused = {peer: error for peer, error in self._refusals.items() if isinstance(error, (Refused, Violation))}
            said_no = [str(error) for peer, error in refused.items() if peer in electors]
            if len(said_no) > len(electors) - needed and not isinstance(body, Prepare):
                raise OutOfSync(f"step {self.step} cannot be decided: {'; '.join(said_no)}")
            if isinstance(body, Propose) and body.record.void and body.record.term == self.term:
                self._rescuing.check_lost()
            self.closing.waiting(awaited_majority(count, len(electors), needed, self.closing.alone_at()))
            await self.closing.clock.sleep(patience.pause_s())

    # --- the decision --------------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Tell everybody who is there what was decided; ourselves last, so that whoever sees it knows all were told.
        May be repeated.

        Who cannot be told, or has no result to swap to, finds out by itself. So do we, when our own close takes longer
        than an answer may: it goes on, and whoever waits for the next step hears of its end.
        """
        decide = self._decide
        assert decide is not None  # noqa: S101 - the step is decided
        me, timeout_s = self.closing.calls.me, self.closing.timeout_s()
        there = [peer for peer in self._roster.peers if peer != me and peer not in self.closing.liveness.gone]
        await asyncio.gather(*(self._tell(peer, decide) for peer in there))
        try:
            await self.closing.calls.ask(me, DECIDE, decide, timeout_s=timeout_s)
        except PeerError as error:
            logger.warning("step %d is decided, and not closed here yet: %s", self.step, error)

    async def _tell(self, peer: PeerId, decide: Decide) -> None:
        try:
            await self._calls.ask(peer, DECIDE, decide, timeout_s=self.closing.timeout_s())
        except PeerError as error:
            logger.warning("step %d is decided, but was not told: %s", self.step, error)
        else:
            self.told.add(peer)
