"""A member's side of closing a step: the ``step/1`` answers, in their only order.

reconcile → apply → propose → decide. Each is answered once per step and may be repeated; nothing here changes the
weights that microbatches are computed with before ``decide``.

What cannot be begun twice, the averaging round and the swap, is not the handler's but the step's: it goes on when the
leader no longer listens, and whoever asks again gets its outcome, a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm.averaging.plan import RoundResult
from swarm.device import DeviceThread
from swarm.errors import EXIT_ERROR, OutOfSync, PeerError, Refused, RoundFailed, RunEnded, WrongStep
from swarm.ids import MicrobatchId, PartName, PeerId, stage_of
from swarm.network.protocols import Answer, Method, Request
from swarm.optimization.changes import ChangeRules, Moment
from swarm.optimization.closing import totals
from swarm.optimization.history import History
from swarm.optimization.ledger import assigned, weights
from swarm.optimization.messages import Accepted, Apply, Averaged, Decide, Prepared, Propose, Reconcile
from swarm.optimization.records import CloseRecord, Contribution, Decision, acceptance_bytes, check_acceptances
from swarm.optimization.roster import Roster
from swarm.optimization.rules import StepRules
from swarm.schema import Empty


class HeldPart(Protocol):
    """The part of the model this peer trains, as closing a step sees it; called on the device thread."""

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """What is in the open step's accumulator."""

    def gradient_sum(self) -> torch.Tensor:
        """The accumulator, flat."""

    def prepare(self, mean: torch.Tensor, *, lr: float, clip: float, step: int) -> str:
        """Compute the update into the shadow; its digest."""

    def swap(self) -> None:
        """The shadow becomes current."""


class Average(Protocol):
    """Runs a part's averaging round with its other replicas."""

    async def __call__(
        self, step: int, part: PartName, weights: Mapping[PeerId, int], sums: torch.Tensor
    ) -> RoundResult:
        """``weights`` are the ledger's, by replica in rank order; ``sums`` is our accumulator. Raises RoundFailed."""


@dataclass(slots=True, kw_only=True)
class MemberContext:
    """What a member needs from its surroundings.

    ``install`` downloads this peer's part for a genesis, from the peer that proposes it; ``decided`` is awaited after
    the swap and before anyone who waits for the next step goes on. ``founder`` may propose the genesis.
    """

    me: PeerId
    rules: StepRules
    device: DeviceThread
    average: Average
    history: History
    sign: Callable[[bytes], bytes]
    verify: Callable[[PeerId, bytes, bytes], bool]
    cursor: Callable[[], tuple[int, int] | None]
    install: Callable[[CloseRecord, PeerId], Awaitable[None]]
    decided: Callable[[Decision], Awaitable[None]]
    founder: PeerId


@dataclass(frozen=True, slots=True)
class _Mean:
    """What averaging gave: our part's mean gradient (None without a part), and the answer that says so."""

    gradient: torch.Tensor | None
    answer: Averaged


@dataclass(slots=True)
class _OpenStep:
    """What this member has done for the open step so far. ``busy`` is held while a question is checked and answered."""

    committed: tuple[Contribution, ...] | None = None
    averaging: asyncio.Task[_Mean] | None = None
    applied: Apply | None = None
    digest: str | None = None
    proposal: Propose | None = None
    closing: asyncio.Task[None] | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def mean(self) -> _Mean | None:
        """The result of averaging, once there is one."""
        task = self.averaging
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


class Member:
    """Answers the step's leader. ``part`` is None for a peer that holds nothing (a bootstrap, hosted-ends trainers)."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self.part: HeldPart | None = None
        self._open = _OpenStep()
        self._departed = False
        self._step = context.history.next_step
        self._roster = context.history.head.members if self._step else Roster(())
        rules = context.rules
        self._changes = ChangeRules(rules.run, rules.parts, rules.max_members, context.verify)
        self._failure: RunEnded | None = None
        self._moved = asyncio.Condition()

    @property
    def open_step(self) -> int:
        """The step being worked on; 0 until the genesis is decided."""
        return self._step

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
        """Whether the newest record has this peer in its roster."""
        return self._context.me in self.roster

    @property
    def over(self) -> bool:
        """Whether the run's last step is closed."""
        return self._step > self._context.rules.steps

    @property
    def departed(self) -> bool:
        """Whether the newest record is the one with which this peer left."""
        return self._departed

    async def wait_open(self, step: int) -> None:
        """Return when ``step`` is open here, or over. Raises RunEnded when a decided step could not be finished."""
        await self._wait(lambda: self.open_step >= step)

    async def wait_member(self) -> None:
        """Return when a step is open in which this peer takes part. Raises as :meth:`wait_open`."""
        await self._wait(lambda: self.open_step > 0 and self.is_member)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise self._failure

    async def observe(self, decision: Decision) -> None:
        """Go on with what others decided, as a peer that is not in the roster (yet): it must be verified, and our part
        brought to it. The first one begins our history, and one that leaves steps out begins it anew. Raises OutOfSync
        for one that contradicts it."""
        history, record = self._context.history, decision.record
        if 0 < history.next_step == record.step:
            history.append(record)
        else:
            history.begin(record)
        await self._context.decided(decision)
        self._open_next(record)
        async with self._moved:
            self._moved.notify_all()

    async def close(self) -> None:
        """Give up what runs for the open step. Idempotent; returns when it has ended."""
        tasks = [task for task in (self._open.averaging, self._open.closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="step/1/reconcile", request=Reconcile, handle=self._on_reconcile),
            Method(name="step/1/apply", request=Apply, handle=self._on_apply),
            Method(name="step/1/propose", request=Propose, handle=self._on_propose),
            Method(name="step/1/decide", request=Decide, handle=self._on_decide),
        ]

    # --- the four answers ----------------------------------------------------------------------------------------

    async def _on_reconcile(self, request: Request) -> Answer:
        body: Reconcile = request.body
        await self._from_leader(request.caller, body.step)
        state = self._open
        async with state.busy:
            if state.averaging is None:
                self._context.rules.check_committed(self.roster, body.committed)
                sums = await self._reconciled(body)
                state.committed = body.committed
                state.averaging = asyncio.create_task(self._average(body, sums))
            elif state.committed != body.committed:
                raise Refused("this step was reconciled with another set of microbatches")
        return Answer((await asyncio.shield(state.averaging)).answer)

    async def _reconciled(self, body: Reconcile) -> torch.Tensor | None:
        """Our accumulator, when it holds exactly what counts; None without a part. Raises Refused."""
        part, name = self.part, self._part_name()
        if part is None or name is None:
            return None
        expected = assigned(body.committed, self._context.me, stage_of(name))
        held, sums = await self._context.device.run(lambda: (part.microbatches, part.gradient_sum()))
        if held != expected:
            missing, surplus = expected - held, held - expected
            raise Refused(
                f"{name} lacks {len(missing)} committed microbatches and holds {len(surplus)} that do not count"
            )
        return sums

    async def _average(self, body: Reconcile, sums: torch.Tensor | None) -> _Mean:
        context, name = self._context, self._part_name()
        if sums is None or name is None:
            return _Mean(None, Averaged(digest="", sq_norm=0.0, cursor=context.cursor()))
        shares = weights(body.committed, self.roster.replicas(name), stage_of(name))
        try:
            result = await context.average(body.step, name, shares, sums)
        except RoundFailed as error:
            raise PeerError(str(error)) from error
        answer = Averaged(digest=result.digest, sq_norm=result.squared_norm, cursor=context.cursor())
        return _Mean(result.tensor, answer)

    async def _on_apply(self, request: Request) -> Answer:
        body: Apply = request.body
        await self._from_leader(request.caller, body.step)
        state = self._open
        self._context.rules.check_scalars(body.step, body.lr, body.clip)
        async with state.busy:
            if state.mean is None:
                raise Refused("nothing was averaged for this step yet")
            if state.applied is None:
                state.digest = await self._prepare(state.mean.gradient, body)
                state.applied = body
            elif state.applied != body:
                raise Refused("this step was applied with other scalars")
        return Answer(Prepared(digest=state.digest or ""))

    async def _prepare(self, mean: torch.Tensor | None, body: Apply) -> str:
        part = self.part
        if part is None or mean is None:
            return ""
        return await self._context.device.run(lambda: part.prepare(mean, lr=body.lr, clip=body.clip, step=body.step))

    async def _on_propose(self, request: Request) -> Answer:
        body: Propose = request.body
        record, context = body.record, self._context
        await self._from_leader(request.caller, record.step)
        state = self._open
        async with state.busy:
            if state.proposal is None:
                self._check(body)
                if record.step == 0:
                    await context.install(record, request.caller)
                state.proposal = body
            elif state.proposal.record.hash() != record.hash():
                raise Refused("another record was accepted for this step")
        return Answer(Accepted(signature=context.sign(acceptance_bytes(record))))

    def _check(self, body: Propose) -> None:
        """Accept only what this member itself computed. Raises Refused."""
        record = body.record
        try:
            self._context.history.check(record)
        except OutOfSync as error:
            raise Refused(str(error)) from error
        if record.step > 0:
            self._check_result(record)
            self._check_roster(body)
        elif self._context.me not in record.members:
            raise Refused("the genesis leaves this member out")

    def _check_result(self, record: CloseRecord) -> None:
        state = self._open
        if state.mean is None or state.applied is None or state.committed != record.committed:
            raise Refused("the record's microbatches are not those that were averaged")
        if (record.tokens, record.loss_sum) != totals(record.committed):
            raise Refused("the record's tokens and loss are not the sums of its microbatches")
        if (record.lr, record.clip) != (state.applied.lr, state.applied.clip):
            raise Refused("the record's scalars are not those that were applied")
        name = self._part_name()
        if name is not None and record.digests.get(name) != state.digest:
            raise Refused(f"the record's digest of {name} is not ours")
        said = state.mean.answer.cursor
        if said is not None and record.cursors.get(self._context.me) != said:
            raise Refused("the record's cursor of this trainer is not where it is")

    def _check_roster(self, body: Propose) -> None:
        step, last = body.record.step, self._context.rules.steps
        if step >= last and (body.changes.joins or body.changes.leaves):
            raise Refused("nobody joins or leaves with the run's last step")
        now = Moment(step, self.roster, self._context.history.head_hash)
        if body.record.roster != self._changes.apply(now, body.changes).members:
            raise Refused("the record's roster is not what the requests with it make of the one before")

    async def _on_decide(self, request: Request) -> Answer:
        body: Decide = request.body
        if body.step < self.open_step:
            return Answer(Empty())
        await self._from_leader(request.caller, body.step)
        state = self._open
        async with state.busy:
            if state.closing is None:
                decision = self._decision(state, body)
                state.closing = asyncio.create_task(self._close_step(decision))
        await asyncio.shield(state.closing)
        return Answer(Empty())

    def _open_next(self, record: CloseRecord) -> None:
        self._open, self._step, self._roster = _OpenStep(), record.step + 1, record.members

    def _decision(self, state: _OpenStep, body: Decide) -> Decision:
        if state.proposal is None or state.proposal.record.hash() != body.record:
            raise Refused("this record was not accepted here")
        record = state.proposal.record
        electorate = record.members if record.step == 0 else self.roster
        check_acceptances(record, electorate, body.acceptances, self._context.verify)
        return Decision(record, body.acceptances, None if state.mean is None else state.mean.gradient)

    async def _close_step(self, decision: Decision) -> None:
        """Swap, remember, open the next step. A decided step can not be refused any more: what fails here ends the
        peer, through everyone who waits for the next step."""
        record = decision.record
        try:
            if self.part is not None and record.step > 0:
                await self._context.device.run(self.part.swap)
            self._context.history.append(record)
            self._departed = self._context.me not in record.members
            await self._context.decided(decision)
        except Exception as error:  # nobody else would tell those who wait
            reason = f"step {record.step} is decided and could not be closed here: {type(error).__name__}: {error}"
            self._failure = RunEnded(reason, EXIT_ERROR)
            self._failure.__cause__ = error
            raise
        else:
            self._open_next(record)
        finally:
            async with self._moved:
                self._moved.notify_all()

    # --- who may ask ---------------------------------------------------------------------------------------------

    async def _from_leader(self, caller: PeerId, step: int) -> None:
        """Wait until ``step`` is open here, then insist that its leader asks. Raises WrongStep or Refused."""
        if step > self.open_step + 1:
            raise WrongStep(f"step {step} is far from open, step {self.open_step} is")
        await self.wait_open(step)
        if step != self.open_step:
            raise WrongStep(f"step {step} is closed, step {self.open_step} is open")
        leader = self._context.founder if step == 0 else self.roster.leader(step)
        if caller != leader:
            raise Refused(f"{leader} leads step {step}")

    def _part_name(self) -> PartName | None:
        if self._context.me not in self.roster:
            return None
        part = self.roster[self._context.me].part
        return None if part is None else PartName(part)
