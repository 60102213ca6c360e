"""A member's side of closing a step: the ``step/1`` answers.

prepare → reconcile → apply → propose → decide. Each may be repeated, in the same term or a later one; nothing here
changes the weights that microbatches are computed with before ``decide``, and after it nothing changes them back.

What cannot be begun twice, the averaging round and the swap, is not the handler's but the step's: it goes on when the
leader no longer listens, and anyone who asks again gets its outcome, a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import TypeVar

from swarm.consensus.acceptor import Vote, promise_bytes
from swarm.consensus.faults import barred_words
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes
from swarm.consensus.roster import owner
from swarm.errors import Busy, Ending, OutOfSync, Refused, RunEnded, Violation, WrongStep
from swarm.events import ChoicesDropped, RecordRefused
from swarm.ids import PartName, PeerId
from swarm.network.protocols import AnyMethod, ReplyT
from swarm.optim.clipping import factor
from swarm.schema import AFTER_CHARS, Empty
from swarm.security.signing import averaging_bytes
from swarm.step import messages
from swarm.step.context import MemberContext
from swarm.step.member.acceptance import AcceptanceRules
from swarm.step.member.conduct import LeaderConduct, Vetoes
from swarm.step.member.open_step import HeldPart, Mean, OpenStep
from swarm.step.member.position import Position
from swarm.step.messages import Accepted, Apply, Decide, Over, Prepare, Prepared, Promise, Propose, Reconcile
from swarm.step.results import Asked, ResultSigning, What
from swarm.step.ties import TIED, Tied, check_tied

QuestionT = TypeVar("QuestionT", Reconcile, Apply, Propose)


class MemberService:
    """Answers the step's leader, and moves the member's position on."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._at = at = context.position
        self._accepts = AcceptanceRules(context.me, at.rules, at.history, context.verify)

    @property
    def position(self) -> Position:
        """Return where this member stands."""
        return self._at

    @property
    def _part(self) -> HeldPart | None:
        return self._context.holder.part

    # --- what others decided -------------------------------------------------------------------------------------

    async def observe(self, decision: Decision) -> None:
        """Go on with what others decided, as a peer that is not in the roster (yet): it must be verified, and our part
        brought to it. The first one begins our history, and one that leaves steps out begins it anew. Raises OutOfSync
        for one that contradicts it."""
        record = decision.record
        async with self._settled() as state:
            await self._at.history.go_on(record, decision.acceptances, decision.term)
            await state.close()
            self._at.cut_off = ""
            self._at.forking.observed(record)
            lacks = await self._context.holder.decided(decision)
            await self._open_next(record)
            self._at.cut_off = lacks
        await self._at.news.tell()
        if lacks:
            raise OutOfSync(lacks)

    async def stand_in(self, decision: Decision) -> None:
        """Vote on in the open step, and do nothing else, where ``decision`` names an earlier life of this peer whose
        vote lies on our disk; else nothing. Raises as :meth:`observe`, of which it is the first part."""
        head, record = self._at.head, decision.record
        if (head is None or record.step > head.step) and self._at.life.inherits(record):
            await self.observe(decision)

    async def learn(self, decision: Decision) -> None:
        """The open step was decided, and we were not told. Finish it if we hold its result, else we are cut off. Raises
        Refused for what is not decided, or does not follow what we know."""
        record = decision.record
        state = self._at.open
        async with state.busy:
            if state is not self._at.open or record.decides != self._at.open_step or self._at.cut_off:
                return
            proven = self._proven(decision)
            if state.closing is None:
                state.closing = asyncio.create_task(self._close_step(proven))
        await asyncio.shield(state.closing)

    async def cut(self, reason: str) -> None:
        """What was decided meanwhile cannot be learned any more: see :attr:`Position.cut_off`. For a member only."""
        async with self._at.open.busy:
            if self._at.is_member and self._at.open.closing is None:
                await self._at.open.stop_averaging()
                self._at.cut_off = reason
        await self._at.news.tell()

    async def rewind(self, reason: str, elsewhere: CloseRecord | None) -> None:
        """Our provisional lineage does not count: be cut off where it began. What was accepted there is kept. Raises
        OSError, with all as it was."""
        async with self._settled() as state:
            if self._at.forking.fork is None:
                return
            await state.close()
            async with state.ballot.retiring(f"step {self._at.open_step} does not count"):
                fork = self._at.forking.rewind(elsewhere)  # from here on nothing is waited for: who told us may hang up
                ballot = self._at.life.resume(fork.point, fork.acceptor)
                self._at.open, self._at.open_step, self._at.roster = OpenStep(ballot), fork.step, fork.point.members
                self._at.cut_off = f"its steps from {fork.step} on do not count: {reason}"
        await self._at.news.tell()

    async def close(self) -> None:
        """Give up what runs for the open step. Idempotent; returns when it has ended."""
        await self._at.open.close()
        if (closing := self._at.open.closing) is not None:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    # --- the answers ---------------------------------------------------------------------------------------------

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            messages.PREPARE.handled(self._on_prepare),
            messages.WORKING.handled(self._on_working),
            messages.RECONCILE.handled(self._counted(self._on_reconcile)),
            messages.APPLY.handled(self._counted(self._on_apply)),
            messages.PROPOSE.handled(self._counted(self._on_propose)),
            messages.DECIDE.handled(self._on_decide),
            messages.OVER.handled(self._on_over),
            TIED.handled(self._on_tied),
        ]

    def _counted(
        self, answer: Callable[[PeerId, QuestionT], Awaitable[ReplyT]]
    ) -> Callable[[PeerId, QuestionT], Awaitable[ReplyT]]:
        """Return what answers a question, and counts it meanwhile for who asks."""

        async def counted(caller: PeerId, body: QuestionT) -> ReplyT:
            step = body.record.decides if isinstance(body, Propose) else body.step
            asked, key = self._at.asked, (caller, step, body.term)
            asked[key] += 1
            try:
                return await answer(caller, body)
            finally:
                asked[key] -= 1
                if not asked[key]:
                    del asked[key]

        return counted

    async def _on_working(self, caller: PeerId, body: messages.Working) -> messages.StillWorking:
        """Say of another step, or term, that we are at work: nothing follows from it then."""
        at = self._at
        other = (body.step, body.term) != (at.open_step, at.term)
        return messages.StillWorking(working=other or at.answering)

    async def _on_prepare(self, caller: PeerId, body: Prepare) -> Promise:
        at = self._at
        if (fork := at.forking.asked(caller, body.step, body.term)) is not None:
            previous, acceptor = fork.point.hash(), fork.acceptor
            promise = Promise(vote=acceptor.vote, free=acceptor.free, candidate=fork.offer())
        else:
            ballot = (await self.from_leader(caller, body.step, body.term)).ballot
            previous = at.history.head_hash
            promise = Promise(vote=ballot.vote, free=ballot.free, votes_only=not at.named)
        said = promise_bytes((at.rules.run, body.step, previous), body.term, promise.accepted, promise.free)
        return promise.model_copy(update={"signed": self._context.sign(said)})

    async def _on_reconcile(self, caller: PeerId, body: Reconcile) -> messages.Averaged:
        state = await self.from_leader(caller, body.step, body.term, votes_only=False)
        context, name = self._context, self._part_name()
        async with self._still(state):
            if body != state.reconciled:
                if context.me not in body.live:
                    raise Refused("this attempt is made without this member")
                self._accepts.check_reconcile(self._at.roster, body, name, state.reconciled)
                if body.provisional:
                    self._at.forking.check_alone(self._at.roster)
                else:
                    state.ballot.begun_free(body.term)
                if state.reconciled is None or not body.asks_as(state.reconciled):
                    state.conduct.asked(body.term, self._now())
                state.conduct.attempt(caller, body.term, body.live, body.late)
                self._suspect(state, body)
                await state.begin(body, name, lambda: self._attempt(state, body, name))
        mean = await state.wait_mean()
        answer, signed = mean.answer, self._signed(name, "gradient", Asked(body), mean.answer.result)
        said = {"signed": signed, "proven": self._accusation(body.step, name, mean)}
        return answer.model_copy(update={**said, "rows": context.attempt.rows(body, self._at.roster)})

    def _signed(self, name: PartName | None, what: What, asked: Asked, digest: str) -> bytes:
        """Return our signature under our result of an attempt; b"" where there is none."""
        if not digest or name is None:
            return b""
        attempt, inputs = asked.attempts.get(name, 0), asked.inputs(what)
        return self._context.sign(self._signing.data(name, attempt, what, inputs, digest))

    def _accusation(self, step: int, name: PartName | None, mean: Mean) -> bytes:
        """Return our signature that whom we name was proven wrong here; b"" where nobody was, and of a closed step."""
        if not mean.proven or name is None or mean.answer.culprit is None or step != self._at.open_step:
            return b""
        after = self._at.history.head_hash[:AFTER_CHARS]
        return self._context.sign(
            averaging_bytes(self._at.rules.run, step, after, name, mean.answer.culprit, wrong=True)
        )

    @property
    def _signing(self) -> ResultSigning:
        at = self._at
        return ResultSigning(at.rules.run, at.open_step, at.history.head_hash)

    async def _attempt(self, state: OpenStep, body: Reconcile, name: PartName | None) -> Mean:
        held = None if self._part is None or name is None else (name, self._part)
        return await self._context.attempt.run(body, self._at.roster, held, state.enter_round)

    async def _on_apply(self, caller: PeerId, body: Apply) -> Prepared:
        state = await self.from_leader(caller, body.step, body.term, votes_only=False)
        self._at.rules.check_scalars(body.step, body.lr, body.clip)
        async with self._still(state):
            mean = state.mean
            if mean is None:
                raise Refused("nothing was averaged for this step yet")
            name = self._part_name()
            self._accepts.check_norms(self._at.roster, name, mean, body)
            before, caps = state.applied, self._at.rules.clipped(body.sq_norms).caps
            if before is None or body != before.model_copy(update={"term": body.term}):
                state.applied = None
                state.conduct.asked(body.term, self._now())
                clip = factor(body.clip, 1.0 if name is None else caps.get(name, 1.0))
                state.digest = await self._context.attempt.prepare(self._part, mean, body, clip)
            state.applied = body
        digest = state.digest or ""
        if (reconciled := state.reconciled) is None:
            return Prepared(digest=digest)
        return Prepared(digest=digest, signed=self._signed(name, "weights", Asked(reconciled, body), digest))

    async def _on_propose(self, caller: PeerId, body: Propose) -> Accepted:
        record, context, at = body.record, self._context, self._at
        vote = Vote(term=body.term, record=record, changes=body.changes, evidence=body.evidence)
        if (fork := at.forking.asked(caller, record.decides, body.term)) is not None:
            rules, roster = AcceptanceRules(context.me, at.rules, fork.history(), context.verify), fork.point.members
            rules.check_possible(roster, vote)
            gone = context.gone()
            decided = rules.may_be_decided(roster, body, gone)
            if record.void and not decided:
                rules.check_lost(roster, record, gone)
            if record.repeats:
                await self._check_back(rules, body, waived=decided)
            fork.accept(vote, may_be_decided=decided)
        else:
            await self._vote(caller, body, vote)
        return Accepted(signature=context.sign(acceptance_bytes(record, body.term)))

    async def _vote(self, caller: PeerId, body: Propose, vote: Vote) -> None:
        record, context, at = body.record, self._context, self._at
        founding, state = self._accepts.may_found(caller, record, at.founder), at.open
        there: Collection[str] = ()
        if not founding:
            state = await self.from_leader(caller, record.decides, body.term)
            there = await self._find_out(state, record)
        async with self._still(state):
            before = state.ballot.vote
            if before is not None and before.record.hash() == record.hash():
                vote = before.model_copy(update={"term": body.term})  # with what was found to explain it
            elif founding:
                self._accepts.check_founding(record, body.credentials)
                await context.holder.install(record, caller)
            else:
                try:
                    await self._check(state, body, there)
                except (Refused, Violation):
                    self._tell_refused(caller, state, vote)
                    raise
            if before is None or before.accepted != vote.accepted:
                state.conduct.asked(body.term, self._now())
            await state.accept(vote, context.me)

    async def _check(self, state: OpenStep, body: Propose, there: Collection[str]) -> None:
        """Raises Refused or Violation for a record that cannot be that of this step, no matter who looks at it; and,
        unless it may have been decided already, Busy and Refused for one that goes against what is known here alone."""
        record, at, accepts = body.record, self._at, self._accepts
        if record.void:
            accepts.check_void(at.roster, body)
        else:
            at.forking.check(body, at.roster, state.candidate)
            accepts.check_proposal(at.roster, self._part_name(), state, body)
        why, waived = accepts.unproven(at.roster, body), accepts.may_be_decided(at.roster, body, self._context.gone())
        if record.repeats:
            await self._check_back(accepts, body, waived=waived)
        if not why and not waived:
            gone = {*(self._context.gone() if at.named else set(record.absent) - set(there)), *state.conduct.tied}
            if record.void:
                accepts.check_lost(at.roster, record, gone)
            if at.named:
                vetoes, now = Vetoes(self._context.me, at.rules), self._now()
                why = vetoes.find(at.roster, record, state.conduct, self._unheard(), now)
        if why:
            state.conduct.veto(body.term, record, why)
            await at.news.tell()  # our loop may lead
            raise Busy(why)

    def _tell_refused(self, leader: PeerId, state: OpenStep, vote: Vote) -> None:
        """Tell who proposed what no member can accept: not what goes against our own result, or what is known here."""
        try:
            self._accepts.check_possible(self._at.roster, vote)
        except (Refused, Violation) as error:
            if state.conduct.made_up(leader):
                refused = RecordRefused(step=vote.record.decides, peer=leader, reason=error.reason)
                self._context.events.emit(refused)

    async def _check_back(self, accepts: AcceptanceRules, body: Propose, *, waived: bool) -> None:
        """Raises Refused or Violation unless the run may go back, as is known here; where that may have been decided
        already, so that what is known here is ``waived``, unless the step to which it does was decided."""
        proof = body.changes.back
        known = proof is not None and await self._context.knows(proof.record.step, proof.record.hash())
        if not waived:
            accepts.check_back(body, known, self._context.copied(body.record.repeats - 1))
        elif not known and (proof is None or not accepts.is_decided(proof)):
            raise Refused(f"that step {body.record.step} was decided is not known here, nor proven")

    def _suspect(self, state: OpenStep, body: Reconcile) -> None:
        """Ask those at once without whom this attempt is made: by the time the record is proposed we know."""
        left_out = set(self._at.roster.peers) - {*body.live, *body.late, self._context.me}
        others = len(self._at.roster) - 1
        for peer in state.conduct.unexplained(body.term, left_out, self._unheard(), others):
            self._context.suspect(peer, "its leader goes on without it")

    def _now(self) -> float:
        return self._context.clock.monotonic()

    def _unheard(self) -> set[PeerId]:
        """Return who is lost here, or may be, for it did not answer when it was asked last; and without whom the step
        may be closed, as the records before say."""
        return {*self._context.gone(), *self._context.doubted(), *self._at.roster.dismissed}

    async def _find_out(self, state: OpenStep, record: CloseRecord) -> Collection[str]:
        """Ask those at once whom the leader calls lost, and who are not lost here yet: it may have found out first.
        Return those of them that are there, where we were started anew, know nothing of the step and watch nobody."""
        absent = [peer for peer in self._at.roster.peers if peer in record.absent and peer != self._context.me]
        if not self._at.named:
            return await self._context.taking_part(absent) if record.void else ()
        others = len(self._at.roster) - 1
        if suspects := state.conduct.unexplained(record.term, absent, self._unheard(), others):
            await self._context.check(suspects, "its leader calls it lost")
        return ()

    async def _on_tied(self, caller: PeerId, body: Tied) -> Empty:
        """Count the replicas of a part that are tied as lost, once it is proven."""
        async with self._still(await self.from_leader(caller, body.step, body.term)) as state:
            check_tied(body, self._signing, self._at.roster, self._context.gone(), self._context.verify)
            state.conduct.tied |= {PeerId(one.peer): f"{body.part} is tied" for one in body.second}
        return Empty()

    async def _on_over(self, caller: PeerId, body: Over) -> Empty:
        async with self._still(await self.from_leader(caller, body.step, body.term)) as state:
            gone, silent = self._context.gone(), self._context.fell_silent
            waited_s = self._now() - state.conduct.began
            if not self._context.leaving() and waited_s < self._at.rules.wait_for_lost_s:
                raise Refused(f"this peer waits for {body.part} for as long as the manifest says")
            self._at.news.failure = self._accepts.over(self._at.roster, body.part, gone, silent)
        await self._at.news.tell()
        return Empty()

    async def _on_decide(self, caller: PeerId, body: Decide) -> Empty:
        if body.step < self._at.open_step:
            if (other := self._at.forking.decided(body)) is not None:
                await self.rewind("another record was accepted by a majority", other)
            return Empty()
        if body.step != self._at.open_step and self._at.open_step > 0:
            await self._wait_step(body.step)
        state = self._at.open
        async with state.busy:
            if state.closing is None:
                if self._at.cut_off:
                    raise Busy(f"catching up: {self._at.cut_off}")
                decision = Decision(state.accepted(body.record).record, body.acceptances, None, body.term)
                state.closing = asyncio.create_task(self._close_step(self._proven(decision)))
        await asyncio.shield(state.closing)
        return Empty()

    def _proven(self, decision: Decision) -> Decision:
        self._accepts.check_decided(self._at.roster, decision)
        return decision.proven(self._at.roster, self._context.verify)

    # --- closing it ----------------------------------------------------------------------------------------------

    async def _close_step(self, decision: Decision) -> None:
        """Swap, remember, open the next step. A decided step can not be refused any more: what fails here ends the
        peer, through everyone who waits for the next step."""
        record = decision.record
        try:
            await self._finish(decision)
        except Exception as error:  # nobody else would tell those who wait
            reason = f"step {record.step} is decided and could not be closed here: {type(error).__name__}: {error}"
            self._at.news.failure = RunEnded(reason, Ending.FAILED)
            self._at.news.failure.__cause__ = error
            raise
        finally:
            await self._at.news.tell()

    async def _finish(self, decision: Decision) -> None:
        record, context, at = decision.record, self._context, self._at
        state, took_part = at.open, at.named
        if record.repeats:
            await state.stop_averaging()
            await state.ballot.retire(f"the run goes back to step {record.step}")
            at.go_back(decision)
            return
        if record.founding:
            at.life.founded()
        inside = at.life.is_named(record)
        await context.catch_up(state, record)
        if not state.holds(record, None if self._part is None else self._part_name()):
            await state.stop_averaging()
            at.forking.elsewhere = record
            at.cut_off = f"step {record.step} was decided without what this peer holds"
            if (barred := record.barred.get(context.me)) is not None and barred.until > record.step + 1:
                at.cut_off += f": {barred_words(barred.until)}"
            return
        if record.void:
            await state.stop_averaging()
        if self._part is not None and not record.founding and (record.void or took_part):
            await context.attempt.device.run(self._part.give_up if record.void else self._part.swap)
        if took_part and not record.void:
            self._tell_dropped(state, record)
        point = None if record.founding else at.history.head
        await at.history.add(record, decision.acceptances, decision.term)
        await at.forking.closed(decision, point, state)
        out, lost = took_part and not inside, context.me in record.absent
        at.departed = out and not lost  # nobody else is left out but who has asked for it
        if out and lost:
            at.forking.elsewhere, at.cut_off = record, f"step {record.step} was closed without this peer"
        gradient = None if state.mean is None or record.void else state.mean.gradient
        digest = "" if record.void or record.founding else state.digest or ""
        lacks = await context.holder.decided(Decision(record, decision.acceptances, gradient, decision.term, digest))
        await self._open_next(record)
        at.cut_off = lacks or at.cut_off

    def _tell_dropped(self, state: OpenStep, record: CloseRecord) -> None:
        dropped, choices = (0, 0) if state.mean is None else state.mean.dropped
        if choices and (name := self._part_name()) is not None:
            told = ChoicesDropped(step=record.step, part=name, without_room=dropped, choices=choices)
            self._context.events.emit(told)

    async def _open_next(self, record: CloseRecord) -> None:
        at, life, ballot = self._at, self._at.life, self._at.open.ballot
        # One that gets the state that it has once more must not forget what it promised and accepted on top of it.
        if record.step + 1 != at.open_step:
            # One file holds the vote: no older one comes after it.
            await ballot.retire(f"step {at.open_step} is closed")
            ballot = life.ballot(record)
        conduct = LeaderConduct(self._now(), missed=set(self._context.gone()))
        at.open, at.open_step, at.roster = OpenStep(ballot, conduct=conduct), record.step + 1, record.members
        at.named = life.is_named(record)

    # --- who may ask ---------------------------------------------------------------------------------------------

    async def from_leader(self, caller: PeerId, step: int, term: int, *, votes_only: bool = True) -> OpenStep:
        """Wait until ``step`` is open here, then insist that the owner of ``term`` asks, and follow it; returns
        what is done for that step here, which may be closed by then. Raises WrongStep, Refused or Superseded, and Busy
        while we catch up: we may answer yet. Who votes for an earlier life is asked for nothing else."""
        await self._wait_step(step)
        state = self._at.open
        if caller != owner(self._at.roster, step, term):
            raise Refused(f"{owner(self._at.roster, step, term)} leads step {step} in term {term}")
        if not self._at.named and not votes_only:
            raise Busy("this peer was started anew: it has its vote in this step, and nothing else")
        if term > state.ballot.term and self._at.leader not in self._context.gone():
            state.conduct.check_begins(caller, self._now())
        if await state.ballot.follow(term):
            state.conduct.begins(caller, self._now())
        await self._at.news.tell()  # each time: who asked first may have hung up before others heard of the term
        return state

    @asynccontextmanager
    async def _still(self, state: OpenStep) -> AsyncIterator[OpenStep]:
        """Hold the step while a question is checked. Raises WrongStep when it is closed by now, or is being closed."""
        async with state.busy:
            if state is not self._at.open or state.closing is not None:
                raise WrongStep("the step was closed meanwhile")
            yield state

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[OpenStep]:
        """Hold the step while it is neither closed nor begins to be: half a swap, or half a line on the disk, cannot be
        taken back, and nothing comes between them."""
        while True:
            state = self._at.open
            async with state.busy:
                closing = state.closing
                if state is self._at.open and (closing is None or closing.done()):
                    yield state
                    return
            if closing is not None:
                await asyncio.wait([closing])

    async def _wait_step(self, step: int) -> None:
        at = self._at
        if at.cut_off:
            raise Busy(f"catching up: {at.cut_off}")
        founded = at.open_step == 0 and at.open.ballot.vote is not None
        if step > at.open_step + 1 and not founded:
            raise Busy(f"step {step} is far from open, step {at.open_step} is")
        await at.wait_open(step)
        if at.cut_off:
            raise Busy(f"catching up: {at.cut_off}")
        if step != at.open_step:
            raise WrongStep(f"step {step} is closed, step {at.open_step} is open")
        if self._context.me not in at.roster:
            raise Refused("not a member of this step")

    def _part_name(self) -> PartName | None:
        if not self._at.named or (part := self._at.roster[self._context.me].part) is None:
            return None
        return PartName(part)
