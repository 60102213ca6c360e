"""A member's side of closing a step: the ``step/1`` answers.

prepare → reconcile → apply → propose → decide. Each may be repeated, in the same term or a later one; nothing here
changes the weights that microbatches are computed with before ``decide``, and after it nothing changes them back.

What cannot be begun twice, the averaging round and the swap, is not the handler's but the step's: it goes on when the
leader no longer listens, and whoever asks again gets its outcome, a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.consensus.acceptor import Vote
from swarm.consensus.ballot import Ballot
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes
from swarm.consensus.roster import Roster, owner
from swarm.errors import Busy, Ending, Refused, RunEnded, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import AnyMethod
from swarm.schema import Empty
from swarm.step import messages
from swarm.step.context import MemberContext
from swarm.step.member.acceptance import AcceptanceRules
from swarm.step.member.branch import Forking
from swarm.step.member.open_step import HeldPart, Mean, OpenStep
from swarm.step.messages import Accepted, Apply, Decide, Over, Prepare, Prepared, Promise, Propose, Reconcile
from swarm.waiting import News


class MemberService:
    """Answers the step's leader. ``part`` is None for a peer that holds nothing (a bootstrap, hosted-ends trainers)."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self.part: HeldPart | None = None
        self._open = OpenStep(context.life.ballot(context.history.head) if context.history.next_step else Ballot())
        self._departed = False
        self._cut_off = ""
        self._step = context.history.next_step
        self._roster = context.history.head.members if self._step else Roster(())
        self._named = bool(self._step) and context.life.is_named(context.history.head)
        self._accepts = AcceptanceRules(context.me, context.rules, context.history, context.verify)
        self.forking = Forking(context)
        self._news = News()

    # --- where it stands -----------------------------------------------------------------------------------------

    @property
    def open_step(self) -> int:
        """The step being worked on; 0 until the genesis is decided."""
        return self._step

    @property
    def term(self) -> int:
        """The highest term of the open step that this member knows."""
        return self._open.ballot.term

    @property
    def leader(self) -> PeerId:
        """Whose term it is."""
        return owner(self._roster, self._step, self.term) if len(self._roster) else self._context.founder

    @property
    def roster(self) -> Roster:
        """Who takes part in the open step; empty before the genesis."""
        return self._roster

    @property
    def head(self) -> CloseRecord | None:
        """The newest record that is decided here."""
        return self._context.history.head if self._context.history.next_step else None

    @property
    def is_member(self) -> bool:
        """Whether this peer takes part in the open step, in this very life of it."""
        return self._named and not self._cut_off

    @property
    def cut_off(self) -> str:
        """Why this peer cannot go on from what it holds, and must get the newest state from others; empty while it can.
        :meth:`observe` ends it."""
        return self._cut_off

    @property
    def over(self) -> bool:
        """Whether the run's last step is closed, or one with which it was ended."""
        head = self.head
        return head is not None and self._context.rules.over(head)

    @property
    def departed(self) -> bool:
        """Whether the newest record is the one with which this peer left, as it had asked."""
        return self._departed

    async def wait_open(self, step: int) -> None:
        """Return when ``step`` is open here, or over, or this peer is cut off. Raises RunEnded when a decided step
        could not be finished."""
        await self._news.wait(lambda: self.open_step >= step or bool(self._cut_off))

    async def wait_member(self) -> None:
        """Return when a step is open in which this peer takes part. Raises as :meth:`wait_open`."""
        await self._news.wait(lambda: self.open_step > 0 and self.is_member)

    async def wait_begun(self) -> None:
        """As :meth:`wait_member`; returns also when this peer did take part and was cut off."""
        await self._news.wait(lambda: self.open_step > 0 and (self.is_member or bool(self._cut_off)))

    async def wait_term(self, step: int, term: int) -> None:
        """Return when a term above ``term`` of ``step`` is known here, or the step is closed, or this peer cut off."""
        await self._news.wait(lambda: self.open_step != step or self.term > term or bool(self._cut_off))

    # --- what others decided -------------------------------------------------------------------------------------

    async def observe(self, decision: Decision) -> None:
        """Go on with what others decided, as a peer that is not in the roster (yet): it must be verified, and our part
        brought to it. The first one begins our history, and one that leaves steps out begins it anew. Raises OutOfSync
        for one that contradicts it."""
        record = decision.record
        async with self._settled() as state:
            await self._context.history.go_on(record, decision.acceptances, decision.term)
            await state.close()
            self._cut_off = ""
            self.forking.observed(record)
            await self._context.decided(decision)
            await self._open_next(record)
        await self._news.tell()

    async def stand_in(self, decision: Decision) -> None:
        """Vote on in the open step, and do nothing else, where ``decision`` names an earlier life of this peer whose
        vote lies on our disk; else nothing. Raises as :meth:`observe`, of which it is the first part."""
        head, record = self.head, decision.record
        if (head is None or record.step > head.step) and self._context.life.inherits(record):
            await self.observe(decision)

    def names(self, record: CloseRecord) -> bool:
        """Whether the record lets this very life of the peer take part in the step after it."""
        return self._context.life.is_named(record)

    async def learn(self, decision: Decision) -> None:
        """The open step was decided, and we were not told. Finish it if we hold its result, else we are cut off. Raises
        Refused for what is not decided, or does not follow what we know."""
        record = decision.record
        state = self._open
        async with state.busy:
            if state is not self._open or record.step != self._step or self._cut_off:
                return
            proven = self._proven(decision)
            if state.closing is None:
                state.closing = asyncio.create_task(self._close_step(proven))
        await asyncio.shield(state.closing)

    async def cut(self, reason: str) -> None:
        """What was decided meanwhile cannot be learned any more: see :attr:`cut_off`. For a member only."""
        async with self._open.busy:
            if self.is_member and self._open.closing is None:
                await self._open.stop_averaging()
                self._cut_off = reason
        await self._news.tell()

    async def rewind(self, reason: str, elsewhere: CloseRecord | None) -> None:
        """Our provisional lineage does not count: be cut off where it began. What was accepted there is kept. Raises
        OSError, with all as it was."""
        async with self._settled() as state:
            if self.forking.fork is None:
                return
            await state.close()
            async with state.ballot.retiring(f"step {self._step} does not count"):
                fork = self.forking.rewind(elsewhere)  # from here on nothing is waited for: who told us may hang up
                ballot = self._context.life.resume(fork.point, fork.acceptor)
                self._open, self._step, self._roster = OpenStep(ballot), fork.step, fork.point.members
                self._cut_off = f"its steps from {fork.step} on do not count: {reason}"
        await self._news.tell()

    async def close(self) -> None:
        """Give up what runs for the open step. Idempotent; returns when it has ended."""
        await self._open.close()
        if (closing := self._open.closing) is not None:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    # --- the answers ---------------------------------------------------------------------------------------------

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            messages.PREPARE.handled(self._on_prepare),
            messages.RECONCILE.handled(self._on_reconcile),
            messages.APPLY.handled(self._on_apply),
            messages.PROPOSE.handled(self._on_propose),
            messages.DECIDE.handled(self._on_decide),
            messages.OVER.handled(self._on_over),
        ]

    async def _on_prepare(self, caller: PeerId, body: Prepare) -> Promise:
        if (promise := self.forking.promise(caller, body.step, body.term)) is not None:
            return promise
        ballot = (await self.from_leader(caller, body.step, body.term)).ballot
        return Promise(vote=ballot.vote, free=ballot.free, votes_only=not self._named)

    async def _on_reconcile(self, caller: PeerId, body: Reconcile) -> messages.Averaged:
        state = await self.from_leader(caller, body.step, body.term, votes_only=False)
        context, name = self._context, self._part_name()
        async with self._still(state):
            if body != state.reconciled:
                if context.me not in body.live:
                    raise Refused("this attempt is made without this member")
                self._accepts.check_reconcile(self._roster, body)
                if not body.provisional:
                    state.ballot.begun_free(body.term)
                await state.begin(body, name, lambda: self._attempt(state, body, name))
        return (await state.wait_mean()).answer

    async def _attempt(self, state: OpenStep, body: Reconcile, name: PartName | None) -> Mean:
        held = None if self.part is None or name is None else (name, self.part)
        return await self._context.attempt.run(body, self._roster, held, state.enter_round)

    async def _on_apply(self, caller: PeerId, body: Apply) -> Prepared:
        state = await self.from_leader(caller, body.step, body.term, votes_only=False)
        self._context.rules.check_scalars(body.step, body.lr, body.clip)
        async with self._still(state):
            mean = state.mean
            if mean is None:
                raise Refused("nothing was averaged for this step yet")
            before = state.applied
            if before is None or (before.lr, before.clip) != (body.lr, body.clip):
                state.applied = None
                state.digest = await self._context.attempt.prepare(self.part, mean, body)
            state.applied = body
        return Prepared(digest=state.digest or "")

    async def _on_propose(self, caller: PeerId, body: Propose) -> Accepted:
        record, context = body.record, self._context
        if self.forking.accept(caller, body):
            return Accepted(signature=context.sign(acceptance_bytes(record, body.term)))
        founding, state = self._accepts.may_found(caller, record, context.founder), self._open
        if not founding:
            state = await self.from_leader(caller, record.step, body.term)
        async with self._still(state):
            vote, changes = state.ballot.vote, body.changes
            if vote is not None and vote.record.hash() == record.hash():
                changes = vote.changes  # which were found to explain its roster
            elif founding:
                self._accepts.check_founding(record)
                await context.install(record, caller)
            elif record.void:
                self._accepts.check_given_up(self._roster, body, context.gone())
            else:
                self.forking.check(body, self._roster)
                self._accepts.check_proposal(self._roster, self._part_name(), state, body)
            await state.accept(Vote(term=body.term, record=record, changes=changes), context.me)
        return Accepted(signature=context.sign(acceptance_bytes(record, body.term)))

    async def _on_over(self, caller: PeerId, body: Over) -> Empty:
        async with self._still(await self.from_leader(caller, body.step, body.term)):
            self._news.failure = self._accepts.over(self._roster, PartName(body.part), self._context.gone())
        await self._news.tell()
        return Empty()

    async def _on_decide(self, caller: PeerId, body: Decide) -> Empty:
        if body.step < self.open_step:
            if (other := self.forking.decided(body)) is not None:
                await self.rewind("another record was accepted by a majority", other)
            return Empty()
        if body.step != self.open_step and self.open_step > 0:
            await self._wait_step(body.step)
        state = self._open
        async with state.busy:
            if state.closing is None:
                if self._cut_off:
                    raise Busy(f"catching up: {self._cut_off}")
                decision = Decision(state.accepted(body.record).record, body.acceptances, None, body.term)
                state.closing = asyncio.create_task(self._close_step(self._proven(decision)))
        await asyncio.shield(state.closing)
        return Empty()

    def _proven(self, decision: Decision) -> Decision:
        self._accepts.check_decided(self._roster, decision)
        return decision.proven(self._roster, self._context.verify)

    # --- closing it ----------------------------------------------------------------------------------------------

    async def _close_step(self, decision: Decision) -> None:
        """Swap, remember, open the next step. A decided step can not be refused any more: what fails here ends the
        peer, through everyone who waits for the next step."""
        record = decision.record
        try:
            await self._finish(decision)
        except Exception as error:  # nobody else would tell those who wait
            reason = f"step {record.step} is decided and could not be closed here: {type(error).__name__}: {error}"
            self._news.failure = RunEnded(reason, Ending.FAILED)
            self._news.failure.__cause__ = error
            raise
        finally:
            await self._news.tell()

    async def _finish(self, decision: Decision) -> None:
        record, state, context = decision.record, self._open, self._context
        took_part = self._named
        if record.founding:
            context.life.founded()
        inside = context.life.is_named(record)
        if not state.holds(record, None if self.part is None else self._part_name()):
            await state.stop_averaging()
            self.forking.elsewhere = record
            self._cut_off = f"step {record.step} was decided without what this peer holds"
            return
        mean = state.mean
        if record.void:
            await state.stop_averaging()
        if self.part is not None and not record.founding:
            await context.attempt.device.run(self.part.give_up if record.void else self.part.swap)
        point = None if record.founding else context.history.head
        await context.history.add(record, decision.acceptances, decision.term)
        await self.forking.closed(decision, point, state)
        out, lost = took_part and not inside, context.me in record.absent
        self._departed = out and not lost  # nobody else is left out but who has asked for it
        if out and lost:
            self.forking.elsewhere, self._cut_off = record, f"step {record.step} was closed without this peer"
        gradient = None if mean is None or record.void else mean.gradient
        digest = "" if record.void or record.founding else state.digest or ""
        await context.decided(Decision(record, decision.acceptances, gradient, decision.term, digest))
        await self._open_next(record)

    async def _open_next(self, record: CloseRecord) -> None:
        life, ballot = self._context.life, self._open.ballot
        # Whoever gets the state that it has once more must not forget what it promised and accepted on top of it.
        if record.step + 1 != self._step:
            await ballot.retire(f"step {self._step} is closed")  # one file holds the vote: no older one comes after it
            ballot = life.ballot(record)
        self._open, self._step, self._roster = OpenStep(ballot), record.step + 1, record.members
        self._named = life.is_named(record)

    # --- who may ask ---------------------------------------------------------------------------------------------

    async def from_leader(self, caller: PeerId, step: int, term: int, *, votes_only: bool = True) -> OpenStep:
        """Wait until ``step`` is open here, then insist that the owner of ``term`` asks, and follow it; returns
        what is done for that step here, which may be closed by then. Raises WrongStep, Refused or Superseded, and Busy
        while we catch up: we may answer yet. Who votes for an earlier life is asked for nothing else."""
        await self._wait_step(step)
        state = self._open
        if caller != owner(self.roster, step, term):
            raise Refused(f"{owner(self.roster, step, term)} leads step {step} in term {term}")
        if not self._named and not votes_only:
            raise Busy("this peer was started anew: it has its vote in this step, and nothing else")
        await state.ballot.follow(term)
        await self._news.tell()  # each time: who asked first may have hung up before others heard of the term
        return state

    @asynccontextmanager
    async def _still(self, state: OpenStep) -> AsyncIterator[None]:
        """Hold the step while a question is checked. Raises WrongStep when it is closed by now, or is being closed."""
        async with state.busy:
            if state is not self._open or state.closing is not None:
                raise WrongStep("the step was closed meanwhile")
            yield

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[OpenStep]:
        """Hold the step while it is neither closed nor begins to be: half a swap, or half a line on the disk, cannot be
        taken back, and nothing comes between them."""
        while True:
            state = self._open
            async with state.busy:
                closing = state.closing
                if state is self._open and (closing is None or closing.done()):
                    yield state
                    return
            if closing is not None:
                await asyncio.wait([closing])

    async def _wait_step(self, step: int) -> None:
        if self._cut_off:
            raise Busy(f"catching up: {self._cut_off}")
        founded = self.open_step == 0 and self._open.ballot.vote is not None
        if step > self.open_step + 1 and not founded:
            raise Busy(f"step {step} is far from open, step {self.open_step} is")
        await self.wait_open(step)
        if self._cut_off:
            raise Busy(f"catching up: {self._cut_off}")
        if step != self.open_step:
            raise WrongStep(f"step {step} is closed, step {self.open_step} is open")
        if self._context.me not in self.roster:
            raise Refused("not a member of this step")

    def _part_name(self) -> PartName | None:
        if not self._named:
            return None
        part = self.roster[self._context.me].part
        return None if part is None else PartName(part)
