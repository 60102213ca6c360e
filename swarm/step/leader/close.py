"""Close one step as the leader of one of its terms: collect → reconcile → apply → decide → announce.

The page reads from top to bottom. Each of the five asks peers and puts what they say into tables (:mod:`.book`,
:mod:`.tables`, :mod:`.exclusion`, :mod:`.answers`), whose pure functions say what follows, and why.

A member that is lost costs another attempt, not the step: what it held is computed again by those that are there, and
the next record's roster is without it. Nobody swaps before a majority has accepted the record, and everybody swaps to
the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from swarm.consensus.acceptor import Promised, SignedPromise, Vote, must_propose
from swarm.consensus.branches import best
from swarm.consensus.changes import Changes, Reassign
from swarm.consensus.faults import newly_barred
from swarm.consensus.ledger import reassigned
from swarm.consensus.records import CloseRecord, Contribution, voters
from swarm.consensus.slowness import Slow, following
from swarm.errors import OutOfSync, Refused, Superseded, Violation
from swarm.events import (
    AttemptFailed,
    Committed,
    DigestMismatch,
    HostsMoved,
    LeftOutAsSlow,
    ProvenWrong,
    StepHeldUp,
    TermBegan,
    WorkExcluded,
)
from swarm.ids import PartName, PeerId
from swarm.network.protocols import ReplyT, RequestT, Rpc
from swarm.step.blocked import awaited_agreement, awaited_round
from swarm.step.context import CloseContext
from swarm.step.decisions import Disagreement
from swarm.step.leader.answers import VoidRounds
from swarm.step.leader.asking import TermCalls
from swarm.step.leader.batch import BatchCollection
from swarm.step.leader.book import StepBook
from swarm.step.leader.exclusion import ExclusionPolicy, left_out
from swarm.step.leader.punctuality import Lateness, late
from swarm.step.leader.rescue import Rescuing, absent, moving
from swarm.step.leader.tables import AppliedTable, AttemptNumbers, ReconciledTable, VoidAttempt
from swarm.step.messages import (
    APPLY,
    PREPARE,
    PROPOSE,
    RECONCILE,
    Averaged,
    Decide,
    Prepare,
    Prepared,
    Propose,
    Reconcile,
)
from swarm.step.results import Asked, evidence_of
from swarm.waiting import ExponentialBackoff, first_done

LOOK_AGAIN_S = 5.0
"""How often it is looked whether enough hosts have come."""


class _Retry(Exception):
    """An attempt failed; whom that is held against is noted, and another may be made, after so long or when who is
    there changes."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class StepClose:
    """One step, closed in one term: all that is known of it is here and in its ``book``, so that two may be open.

    ``overdue`` is why the leader before does not lead any more, though it is there. ``told`` are the members that know
    what was decided.
    """

    provisional: ClassVar[bool] = False

    def __init__(self, context: CloseContext, book: StepBook, term: int, overdue: str = "") -> None:
        self.book, self.term, self.told = book, term, set[PeerId]()
        self._context, self._overdue = context, overdue
        self._policy = ExclusionPolicy(book.roster, served=context.rules.served, wrong=book.wrong)
        self._numbers, self._voids = AttemptNumbers(term, book.roster), VoidRounds()
        self._asks = TermCalls(context, book, term)
        self._batch = BatchCollection(context, book, term, self._policy, self.electors)
        self._rescuing = Rescuing(context, book, term, self._policy, self._batch)
        self._promises: dict[str, SignedPromise] = {}
        self._held_up: dict[PeerId, Lateness] = {}
        self._answered_late: dict[PeerId, Lateness] = {}
        self._decision: tuple[CloseRecord, Decide] | None = None

    @property
    def decided(self) -> CloseRecord | None:
        """Return the record, once a majority has accepted it."""
        return None if self._decision is None else self._decision[0]

    def electors(self) -> tuple[PeerId, ...]:
        """Return who decides the step."""
        return voters(self.book.roster, self.book.now.previous)

    async def run(self) -> CloseRecord:
        """Close the step, and tell it to all who are there; returns the record. Raises as :meth:`close`."""
        record = await self.close()
        await self.announce()
        return record

    async def close(self) -> CloseRecord:
        """Lead until the step is decided; returns the record, of which nobody has been told yet.

        Raises Superseded when another leads, or only a later term can get further: because so many attempts failed that
        this one has no more numbers, or what was asked in it cannot be granted; WrongStep when the step was closed by
        another, OutOfSync when so many refuse the record that it cannot be decided, RunEnded when a part of the model
        is lost with its last replica. Waits, and says so, for as long as the voters that are there and follow are no
        majority, and as many replicas of a part have one result as another.
        """
        proposal = await self._take_over() if self.term > 0 else None
        pauses, failures = ExponentialBackoff(0.05), 0
        while proposal is None:
            try:
                proposal = await self._attempt()
            except _Retry as failed:
                failures += 1
                self._context.events.emit(AttemptFailed(step=self.book.step, term=self.term, reason=str(failed)[:400]))
                await self._context.clock.sleep(pauses.pause_s() if failures > 1 else 0.0)
                if failed.after_s:
                    await first_done(self._context.clock.sleep(failed.after_s), self._context.liveness.changed())
        before = self._context.history.head
        await self.decide(proposal)
        if not proposal.record.void:
            self._tell_moves(before, proposal.changes)
            committed = tuple(one.microbatch for one in proposal.record.committed)
            self._context.events.emit(Committed(step=self.book.step, microbatches=committed))
        if not proposal.record.void and proposal.record.term == self.term:
            self._tell_slow(proposal.record)
            self._tell_wrong(proposal.record)
            # Who was late to vote for this very record is still to be told of.
            lead, said = self._context.lead, self._answered_late
            lead.late_answers = {peer: one for peer, one in lead.late_answers.items() if said.get(peer) is not one}
        return proposal.record

    def _tell_moves(self, before: CloseRecord, changes: Changes) -> None:
        if moves := {PeerId(move.peer): move.part for move in changes.reassigns}:
            reasons = self._context.rules.moves.plan(before, changes).reasons
            self._context.events.emit(HostsMoved(step=self.book.step, moves=moves, reasons=reasons))

    async def _attempt(self) -> Propose | None:
        """Come to a record, once: one that gives the step up where a part stays lost; None when the batch is to be
        collected again. Raises _Retry."""
        committed = await self.collect()
        if committed is None:
            if (proposal := await self._rescuing.run()) is None:  # somebody came back, or may be asked again
                self._policy.forgive_needed(self._context.clock.monotonic(), self._context.liveness.gone)
            return proposal
        if awaited := self.book.requests.too_few(tuple(self._batch.out)):
            self._context.waiting(awaited)
            raise _Retry(f"it waits for {awaited}", LOOK_AGAIN_S)
        if not self.provisional:
            await self._asks.arrivals.wait(self._batch.out)
        # Who is to move is asked as late as can be: by now its copy has had the time since the record before.
        planned = {} if self.provisional else self.book.movers(self._context.history.head, self._batch.out)
        movers = {peer: part for peer, part in planned.items() if peer not in self._asks.arrivals.late}
        with (
            absent(self._context.calls, self.book.requests.asking()) as missing,
            moving(self._context, self.book, self.term, movers) as moves,
        ):
            applied = await self.apply(await self.reconcile(committed))
            proven = {peer for wrong in self.book.wrong().values() for peer in wrong}
            if wrong := proven.intersection(self._batch.out, applied.reconciled.asked.live):
                raise _Retry(f"{min(wrong)} was proven wrong meanwhile")
            return self._proposal(applied, missing, moves)

    # --- in a later term: who follows, and what must be proposed -------------------------------------------------

    async def _take_over(self) -> Propose | None:
        """Have everybody follow this term. Returns what must be proposed, if there is something; else the step is
        closed anew."""
        vote = await self.promises()
        self.book.begin_term(self.term, self._context.liveness.gone)
        self._batch.quota_again()
        return None if vote is None else self._again(vote)

    def _again(self, vote: Vote) -> Propose:
        """Return a record that was proposed before, with what bears it out, and what has us propose it."""
        again = Propose(record=vote.record, changes=vote.changes, term=self.term, evidence=vote.evidence)
        return again.model_copy(update={"promises": self._promises})

    async def promises(self) -> Vote | None:
        """Ask for promises to follow this term, and return the record that must be proposed."""
        gone = [f"{peer}: {why}" for peer, why in sorted(self._context.liveness.gone.items())]
        reason = "; ".join([*([f"its leader is overdue: {self._overdue}"] if self._overdue else []), *gone])
        me, electors = self._context.calls.me, self.electors()
        self._context.events.emit(TermBegan(step=self.book.step, term=self.term, leader=me, reason=reason))
        given = await self._asks.majority(electors, PREPARE, Prepare(step=self.book.step, term=self.term))
        told = {peer: Promised(given[peer].vote, given[peer].free) for peer in electors if peer in given}
        vote = must_propose(told, electors)
        if vote is not None and not self._asks.believes.may_ignore(vote, given, electors, self.book.refused):
            self._promises = {peer: given[peer].shown for peer in electors if peer in given}
            return vote
        return best(answer.candidate for answer in given.values() if answer.candidate is not None)

    # --- collect -------------------------------------------------------------------------------------------------

    async def collect(self) -> tuple[Contribution, ...] | None:
        """Have the batch completed by the trainers that are there; None when a part of the model stays lost."""
        return await self._batch.run()

    # --- reconcile -----------------------------------------------------------------------------------------------

    async def reconcile(self, committed: Sequence[Contribution]) -> ReconciledTable:
        """Have all that are there hold exactly what counts, and average it. Raises _Retry when one of them fails."""
        asked = self._question(committed)
        table = ReconciledTable(self.book.roster, asked, await self._everybody(asked.live, RECONCILE, asked))
        void, reason = table.void(self._batch.out)
        if void is not None:
            await self._void(table, void, reason)
        if silent := self._asks.believes.unsigned(asked, table.answers):
            self._policy.holds_up(dict.fromkeys(silent, "it does not sign what it reported"))
            raise _Retry(f"{silent[0]} does not sign what it reported")  # none would accept its rows from us
        waited = {peer: {PeerId(one): s for one, s in said.waited.items()} for peer, said in table.answers.items()}
        parts = {peer: str(self.book.roster[peer].part) for peer in table.answers if self.book.roster[peer].part}
        self._asks.kept_waiting |= late(self._asks.took, waited, parts)
        return table

    def _question(self, committed: Sequence[Contribution]) -> Reconcile:
        """Return what counts, who computes again what others held, and the number of each part's attempt."""
        out = self._batch.out
        late = {peer: why for peer, why in self._asks.arrivals.late.items() if peer not in out}
        live = tuple(peer for peer in self.book.roster.peers if peer not in out and peer not in late)
        forfeits = tuple(peer for peer in self._asks.arrivals.forfeits if peer in live)
        counted = reassigned(
            committed,
            self.book.roster.columns(out),
            computed_again=self._context.rules.inner_steps == 1,
            able=self.book.may_hold,
        )
        return Reconcile(
            step=self.book.step,
            term=self.term,
            committed=counted,
            live=live,
            provisional=self.provisional,
            within_s=max(self._context.timeout_s(), self._context.averaging_s(self._voids.plainly)),
            attempts=self._numbers.numbers(counted, live, forfeits),
            plainly=tuple(sorted(self._voids.plainly)),
            left_out=left_out(self.book.roster, {**out, **late}),
            late=tuple(sorted(late)),
            forfeits=forfeits,
        )

    # --- apply ---------------------------------------------------------------------------------------------------

    async def apply(self, table: ReconciledTable) -> AppliedTable:
        """Have all compute what the update makes of their part. Raises _Retry when one fails, or replicas differ."""
        try:
            asked, clipped = table.scalars(self._context.rules)
        except Disagreement as found:
            await self._differ(found, Asked(table.asked), table.answers)
        answers = await self._everybody(table.asked.live, APPLY, asked)
        applied = AppliedTable(table, asked, clipped, answers)
        try:
            applied.digests()
        except Disagreement as found:
            await self._differ(found, Asked(table.asked, asked), answers)
        if silent := self._asks.believes.unproven(Asked(table.asked, asked), answers):
            self._policy.holds_up(dict.fromkeys(silent, "it does not sign its result"))
            raise _Retry(f"{silent[0]} does not sign its result")  # none would accept its part from us
        self._asks.kept_waiting |= late(self._asks.took)
        return applied

    # --- decide --------------------------------------------------------------------------------------------------

    def _proposal(self, applied: AppliedTable, missing: Collection[PeerId], moves: Sequence[Reassign]) -> Propose:
        """Return the record, with who joins, leaves and moves. Raises Superseded when the run may not become that: what
        was asked is forgotten with the term, and anyone who still wants it asks again."""
        attempt, averaged = applied.reconciled.asked, applied.reconciled.answers
        lost = [peer for peer in self.book.roster.peers if peer not in {*attempt.live, *attempt.late}]
        try:
            changes, following = self.book.requests.settle(
                missing, lost, moves, self._context.history.head, attempt.late
            )
            lineage, orders = self._lineage(), self._context.orders()
            changes, said = self.book.requests.admitted(
                changes, following, orders, provisional=bool(lineage.get("lineage"))
            )
        except (Refused, Violation) as error:
            raise Superseded(f"what was asked in this term cannot be granted: {error}") from error
        before = self._context.history.head
        more = {"aside": self.book.aside(), **lineage, **self._late(attempt), "admissions": said}
        more["slow"] = self._slow(attempt, changes.absent)
        more |= self._faults(changes.absent)
        more["dealt"] = self._context.rules.moves.dealt(before, changes)
        most = self._context.rules.max_members
        record = applied.record(before, self.book.now.previous, changes, following, most, **more)
        record = record.model_copy(update={"codecs": self._context.rules.codecs.following(before, record)})
        rows = {peer: answer.rows for peer, answer in averaged.items()}
        results = {peer: answer.signed for peer, answer in applied.answers.items()}
        return Propose(record=record, changes=changes, term=self.term, evidence=evidence_of(attempt, rows, results))

    def _late(self, attempt: Reconcile) -> dict[str, Any]:
        """Return what the record says of those that were late, and of arrivals."""
        rules, roster, head = self._context.rules.lateness, self.book.roster, self._context.history.head
        owed = rules.owed(roster, head, attempt.committed, attempt.late)
        return {"late": owed, "spread_ms": self._asks.arrivals.spread_ms}

    def _slow(self, attempt: Reconcile, absent: Collection[str]) -> dict[str, Slow]:
        """Return what the record says of members that hold steps up: for whom we had to wait in this one, and for whose
        answers after the last record of ours."""
        lead, me = self._context.lead, self._context.calls.me
        self._answered_late = dict(lead.late_answers)
        late_for_us = {**lead.late_answers, **self._asks.kept_waiting}
        self._held_up = {peer: found for peer, found in late_for_us.items() if peer in attempt.live}
        return following(self.book.roster.slow, self.book.step, self.book.roster.peers, absent, (me, self._held_up))

    def _faults(self, absent: Collection[str]) -> dict[str, Any]:
        """Return what the record says of those that were proven wrong: not what proves one wrong without which its part
        would be lost, and which so closes the step."""
        accused = sorted(peer for peer, wrong in self.book.wrong().items() if wrong.issubset(absent))
        return {"faults": tuple(self.book.faults[peer][0] for peer in accused), "barred": self.book.barred(accused)}

    def _tell_slow(self, record: CloseRecord) -> None:
        for peer, (seconds, usual_s) in sorted(self._held_up.items()):
            if peer != self._context.calls.me:
                times = len(record.slow[peer].said_by)
                self._context.events.emit(
                    StepHeldUp(step=record.step, peer=peer, seconds=seconds, usual_s=usual_s, times=times)
                )
        for peer, why in sorted(self.book.roster.dismissed.items()):
            if peer in record.absent:
                until = record.slow[peer].until
                self._context.events.emit(LeftOutAsSlow(step=record.step, peer=peer, reason=why, until=until))

    def _tell_wrong(self, record: CloseRecord) -> None:
        out = newly_barred(record.barred, record.step)
        for fault in record.faults:  # not those of our book, where it is another's of a branch
            wrong, by = fault.sides
            for peer in wrong:
                self._context.events.emit(
                    ProvenWrong(
                        step=record.step,
                        peer=peer,
                        accused=PeerId(fault.accused),
                        part=fault.where(self.book.roster),
                        microbatch=fault.work,
                        by=by,
                        until=record.barred[peer].until if peer in out else 0,
                    )
                )

    def _lineage(self) -> dict[str, Any]:
        """Return the fields of the lineage of the record before, or of leaving it: the proof that it was confirmed."""
        head, proof = self._context.history.head, self._context.confirmed()
        if head.provisional and proof is not None:
            return {"confirmation": proof}
        return {"lineage": head.lineage}

    async def decide(self, proposal: Propose) -> None:
        """Have the record accepted by a majority of the voters: then it is decided. The others get to know it too."""
        record = proposal.record
        gives_up = record.void and record.term == self.term
        check = self._rescuing.check_lost if gives_up else lambda: None
        electors = self.electors()
        try:
            answers = await self._asks.majority(electors, PROPOSE, proposal, check)
        except OutOfSync as error:
            if record.term == self.term:
                raise
            # Who said that it was accepted may have lied, which ends nobody: it is left unless promises show otherwise.
            self.book.refused.add(record.hash())
            raise Superseded(f"what was said to be accepted before is refused: {error}") from error
        # Only theirs prove anything: all members get them, and keep them.
        signatures: dict[str, bytes] = {peer: answers[peer].signature for peer in electors if peer in answers}
        decide = Decide(step=record.decides, record=record.hash(), term=self.term, acceptances=signatures)
        self._decision = record, decide

    # --- announce ------------------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Tell everybody who is there what was decided, ourselves last. May be repeated."""
        assert self._decision is not None  # noqa: S101 - the step is decided
        await self._asks.tell(self._decision[1], self.told)

    # --- when an attempt fails -----------------------------------------------------------------------------------

    async def _everybody(
        self, live: Sequence[str], rpc: Rpc[RequestT, ReplyT], body: RequestT
    ) -> Mapping[PeerId, ReplyT]:
        """Return everybody's answer, but of those far behind the others without whom the step can be closed: they stay
        members, and go on with the rest if they hold the result. Raises _Retry when one fails or is found gone, having
        found out who is gone: each has answered a ping, is gone, or is doubted; who is not gone may be left out."""
        suffice = partial(self._asks.believes.suffice, frozenset(live))
        answers = await self._asks.all([PeerId(peer) for peer in live], rpc, body, suffice)
        if answers.failed:
            reasons = "; ".join(str(error) for error in answers.failed.values())
            await self._context.liveness.check(tuple(answers.failed), reasons)
            self._policy.failed(answers.failed, self._context.liveness.gone)
            raise _Retry(reasons)
        return answers.given

    async def _void(self, table: ReconciledTable, found: VoidAttempt, reason: str) -> NoReturn:
        """Work of a trainer that is out and that one cannot get is lost; who lacks other things may be left out, and
        so may who breaks round after round for others."""
        for peer, orphaned in found.lost.items():
            why = f"{peer}: {table.answers[peer].failure}"[:400]
            excluded = self.book.exclude(orphaned)
            self._context.events.emit(WorkExcluded(step=self.book.step, microbatches=excluded, reason=why))
            self._batch.quota_again()
        for peer, why in found.lacking.items():
            self._policy.lacks(peer, why)
        await self._context.liveness.check(self.book.roster.peers, reason)
        for part in found.parts:
            self._numbers.void(part)
            replicas = self.book.roster.replicas(part)
            answers = {peer: table.answers[peer] for peer in replicas if peer in table.answers}
            if not self._accuse(part, answers):
                self._blame(part, answers)
        raise _Retry(reason)

    def _accuse(self, part: PartName, answers: Mapping[PeerId, Averaged]) -> bool:
        """Take down what proves a member wrong; whether one is out by now for it."""
        found = self._asks.believes.wrong(part, answers)
        for fault, proven in found:
            with contextlib.suppress(Refused):  # no record has room for more
                self.book.accuse(fault, proven)
        return any(fault.accused in self._batch.out for fault, _ in found)

    def _blame(self, part: PartName, answers: Mapping[PeerId, Averaged]) -> None:
        self._voids.void(part, answers)
        out = self._batch.out
        found = self._voids.unfit(part, tuple(peer for peer in answers if peer not in out))
        if found is not None and found.differs:
            self._policy.differ((found.peer,), found.why)
        elif found is not None:
            self._policy.holds_up({found.peer: found.why})
        elif self._voids.at_a_loss(part):
            reasons = {answer.failure for answer in answers.values() if answer.failure}
            self._context.waiting(awaited_round(part, min(reasons, default="")))

    async def _differ(
        self, found: Disagreement, asked: Asked, answers: Mapping[PeerId, Averaged] | Mapping[PeerId, Prepared]
    ) -> NoReturn:
        """Of a mean that nobody signed all make another, plainly. Else who differs from what most replicas of a part
        have is left out: the step closes without it, so it is cut off and gets the state anew. When no answer is that
        of most, nobody knows which is right: all compute theirs anew, and after a second time a copy of the part takes
        over (:meth:`Rescuing.break_tie`)."""
        self._context.events.emit(DigestMismatch(step=self.book.step, part=found.part, digests=dict(found.shown)))
        if self._voids.unsigned(found):
            self._numbers.void(found.part)
            raise _Retry(str(found)) from found
        signed = {peer: answers[peer].signed for peer in found.digests}
        dissenters = found.dissenters or await self._rescuing.break_tie(found, asked, signed)
        if not dissenters:
            self._context.waiting(awaited_agreement(self.book.roster, found.part, found.digests))
            raise _Retry(str(found), self._numbers.tied(found.part)) from found
        self._policy.differ(dissenters, str(found))
        raise _Retry(str(found)) from found
