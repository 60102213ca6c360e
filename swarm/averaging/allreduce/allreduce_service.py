"""The all-reduce service of one peer: all-or-nothing weighted means of vectors, bit-identical at every member."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swarm.averaging.allreduce.check import PATIENCE_S, block_of
from swarm.averaging.allreduce.exchange import Exchange
from swarm.averaging.allreduce.inbox import Inbox
from swarm.averaging.allreduce.messages import (
    ABORT,
    AGREE,
    CHECKED,
    CHUNK,
    ENTER,
    STAY,
    SUM,
    Abort,
    Agreement,
    Checked,
    ReduceRequest,
    RoundMessage,
    SumRequest,
)
from swarm.averaging.allreduce.output import Floats, Reducer, weighted_mean
from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, RoundResult
from swarm.averaging.allreduce.questions import Means, Run
from swarm.clock import Clock
from swarm.errors import BugError, Busy, PeerError, Refused, RoundFailed, Violation
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming
from swarm.schema import Empty
from swarm.security.signing import Signing
from swarm.waiting import first_done

MAX_EXPECTED = 16
"""Rounds that may be expected or open at once: two open steps, a few attempts, stage and ends."""

MAX_REMEMBERED = 256
"""Ended rounds that are remembered, to refuse what comes late for them and to repeat an agreement."""

ABORT_S = 1.0
"""How long telling the others may delay the report of a failure. Who does not hear of it finds out by itself: from a
refusal, or at the deadline."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """The memory of a finished round; ``digest`` is empty for a failed one. It holds no plan, whose derived data grows
    with the square of the members."""

    members: frozenset[PeerId]
    digest: str
    reason: str


class AllReduce:
    """Mount it on the endpoint, then :meth:`reduce`. Protocol: one call per chunk and pair that the schedule joins,
    whose answer is the result; then, in a signed round, everybody tells everybody the digest of what it holds, and
    nobody returns before all agree.

    Messages of a round are let in from :meth:`expect` (or :meth:`reduce`) on; before it the sender is told Busy and
    comes again until its deadline, after the round's end it is Refused. One event loop; numbers are worked on in
    ``run``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        *,
        run: Run = asyncio.to_thread,
        reducer: Reducer = weighted_mean,
        signing: Signing | None = None,
    ) -> None:
        self._means = Means(endpoint=endpoint, clock=clock, run=run, reducer=reducer, signing=signing)
        self._suspicious: deque[tuple[int, PartName, str]] = deque(maxlen=MAX_EXPECTED)
        self._expected: OrderedDict[RoundKey, tuple[Inbox, float]] = OrderedDict()
        self._running: dict[RoundKey, Inbox] = {}
        self._ended: OrderedDict[RoundKey, _Ended] = OrderedDict()

    @property
    def peer(self) -> PeerId:
        """Our own identity."""
        return self._means.endpoint.peer

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return (
            ENTER.handled_with_payload(self._let_in),
            STAY.handled(self._stay),
            CHUNK.handled_with_payload(self._chunk, admit=self._admit_chunk, over=self._over),
            AGREE.handled(self._agree),
            SUM.handled_with_payload(self._sum),
            CHECKED.handled(self._note_checked),
            ABORT.handled(self._abort),
        )

    def expect(self, plan: RoundPlan) -> None:
        """Let the others' messages of a round in, which starts here within its time-out.

        Idempotent. Raises BugError for a round that ended, or was announced under another plan.
        Costs memory only for what arrives: at most a window of chunks from each contributor.
        """
        inbox = self._find(plan.key)
        if plan.key in self._ended or (inbox is not None and inbox.plan.digest != plan.digest):
            raise BugError(f"round {plan.key} is known already: repeat it as a new attempt")
        if inbox is None:
            expires = self._means.clock.monotonic() + plan.timeout_s
            self._expected[plan.key] = Inbox(plan, self._member(plan)), expires
            while len(self._expected) > MAX_EXPECTED:
                self._drop_expected(next(iter(self._expected)))

    def forget(self, plan: RoundPlan, outcome: RoundFailed) -> None:
        """A round that is expected will not be entered here: who waits for us in it is refused. Idempotent."""
        inbox, _ = self._expected.pop(plan.key, (None, 0.0))
        if inbox is not None:
            inbox.fail(outcome)
            self._remember(plan, "", f"void: {outcome}")

    async def give_up(self, plan: RoundPlan, outcome: RoundFailed) -> None:
        """As :meth:`forget`, and the others are told, as far as they hear it within ABORT_S."""
        self.forget(plan, outcome)
        await self._tell(plan, outcome)

    async def reduce(self, plan: RoundPlan, vector: torch.Tensor | None) -> RoundResult:
        """The members' sums added up and divided by Σ weights.

        ``vector`` is (elements,) of the plan's dtype, on any device, and is only read; None for a member of weight 0.
        Raises RoundFailed naming the member it broke on: unreachable, silent until the deadline, or in violation; then
        nobody that could still be told holds a result, and the inputs are as they were. Repeat it as a new attempt.
        Cancelling leaves no task behind and makes the others' next message here be refused.
        Memory: the float32 result, and 0.2 of the vector for what is in flight, or four chunks for each member if that
        is more.
        """
        began = self._means.clock.monotonic()
        inbox = self._enter(plan)
        outcome = RoundFailed(f"round {plan.key} was given up at {self.peer}")
        digest = ""
        try:
            exchange = Exchange(self._means, inbox, await self._host_array(plan, vector))
            digest = await _completed(exchange)
        except BaseExceptionGroup as group:
            outcome = _verdict(group)
            own = inbox.failure is None or not inbox.failure.aborted_by
            self._leave(inbox, "", outcome)
            if own:
                await self._tell(plan, outcome)
            raise outcome from group
        finally:
            self._leave(inbox, digest, outcome)
        return RoundResult(
            tensor=torch.from_numpy(exchange.output.vector),
            squared_norm=exchange.output.squared_norm(),
            digest=digest,
            contributors=plan.contributors,
            bytes_sent=exchange.bytes_sent,
            formed_s=exchange.formed_s,
            heard=inbox.meter.heard(),
            waited=inbox.waited,
            seconds=self._means.clock.monotonic() - began,
            left_out=exchange.left_out,
            left=None if exchange.left is None else torch.from_numpy(exchange.left.vector),
        )

    # --- entering and leaving a round ---------------------------------------------------------------------------

    def _enter(self, plan: RoundPlan) -> Inbox:
        if plan.key in self._running:
            raise BugError(f"round {plan.key} runs already")
        self.expect(plan)
        inbox, _ = self._expected.pop(plan.key)
        inbox.plan = inbox.plan.lasting(plan.timeout_s)
        inbox.suspicious = _step_of(plan.key) in self._suspicious
        self._running[plan.key] = inbox
        inbox.entered_at = self._means.clock.monotonic()
        return inbox

    def _leave(self, inbox: Inbox, digest: str, outcome: RoundFailed) -> None:
        """End the round for those who wait in it; ``digest`` is empty for a failure. Idempotent."""
        if self._running.pop(inbox.plan.key, None) is not None:
            inbox.fail(outcome)
            if inbox.judged is not None:
                self._suspicious.append(_step_of(inbox.plan.key))
            self._remember(inbox.plan, digest, "over" if digest else f"void: {inbox.failure}")

    def _remember(self, plan: RoundPlan, digest: str, reason: str) -> None:
        self._ended[plan.key] = _Ended(frozenset(plan.members), digest, reason)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _drop_expected(self, key: RoundKey) -> None:
        inbox, _ = self._expected.pop(key)
        inbox.fail(RoundFailed(f"{self.peer} did not enter round {key}"))

    def _find(self, key: RoundKey) -> Inbox | None:
        now = self._means.clock.monotonic()
        for late in [other for other, (_, expires) in self._expected.items() if expires < now]:
            self._drop_expected(late)
        return self._running.get(key) or self._expected.get(key, (None, 0.0))[0]

    def _member(self, plan: RoundPlan) -> PeerId:
        if self.peer not in plan.weights:
            raise BugError(f"{self.peer} is no member of round {plan.key}")
        return self.peer

    async def _host_array(self, plan: RoundPlan, vector: torch.Tensor | None) -> Floats | None:
        if vector is None and not plan.weights[self.peer]:
            return None
        if vector is None or vector.shape != (plan.elements,) or str(vector.dtype) != f"torch.{plan.dtype}":
            given = None if vector is None else (tuple(vector.shape), vector.dtype)
            raise BugError(f"round {plan.key} is about {plan.elements} elements of {plan.dtype}, not {given}")
        array: Floats = await self._means.run(_to_host, vector)
        return array

    async def _tell(self, plan: RoundPlan, outcome: RoundFailed) -> None:
        """Tell all but the culprit, as far as they hear it; who only calls hears it from the next that it calls."""
        message = Abort.of(plan, reason=str(outcome)[:500], culprit=outcome.peer or None)
        async with asyncio.TaskGroup() as tasks:
            for peer in plan.called_by(self.peer):
                if peer != outcome.peer:
                    tasks.create_task(self._tell_one(peer, message))

    async def _tell_one(self, peer: PeerId, message: Abort) -> None:
        try:
            await self._means.endpoint.call(peer, ABORT, message, timeout_s=ABORT_S)
        except PeerError:
            return  # it finds out by itself: the round is refused here from now on

    # --- what others ask ---------------------------------------------------------------------------------------------

    def _admit_chunk(self, caller: PeerId, request: ReduceRequest, payload_bytes: int) -> None:
        inbox = self._inbox_of(request)
        self._checked(inbox, caller, request, payload_bytes)
        inbox.take_place(caller, request)
        inbox.meter.begins(caller, payload_bytes, self._means.clock.monotonic())

    def _over(self, caller: PeerId, request: ReduceRequest) -> None:
        inbox = self._find(request.key)
        if inbox is not None:
            inbox.call_over(caller, request)

    def _checked(self, inbox: Inbox, caller: PeerId, request: ReduceRequest, payload_bytes: int) -> None:
        """See :meth:`Inbox.admit`. A member that violates it breaks the round here at once: it will tell everybody, and
        not us, that it broke on us."""
        try:
            inbox.admit(caller, request, payload_bytes)
        except Violation as error:
            if caller in inbox.plan.weights:
                inbox.fail(RoundFailed(error.reason, peer=caller))
            raise

    async def _let_in(self, caller: PeerId, message: RoundMessage, incoming: Incoming) -> Answer[Empty]:
        if self._is_done(caller, message):  # it needs nothing from us, and asks us last
            return Answer(Empty())
        inbox = self._inbox_of(message)
        inbox.admit_member(caller, message.plan)
        inbox.said_in(caller, self._means.clock.monotonic())
        if inbox.plan.checked and inbox.commitment is None:
            raise Busy(f"what is summed up here in round {message.key} is not known yet")
        return Answer(Empty(), inbox.commitment or b"")

    async def _sum(self, caller: PeerId, message: SumRequest, incoming: Incoming) -> Answer[Empty]:
        inbox = self._inbox_of(message)
        inbox.admit_member(caller, message.plan)
        own, chunk = inbox.admit_check(caller, message.index, message.block)
        encoded = own(chunk) if inbox.plan.sums.exact else await self._means.run(own, chunk)
        return Answer(
            Empty(), encoded if message.block is None else block_of(inbox.plan, chunk, encoded, message.block)
        )

    async def _note_checked(self, caller: PeerId, message: Checked) -> Empty:
        inbox = self._inbox_of(message)
        inbox.admit_member(caller, message.plan)
        if message.turn == 2:
            await inbox.wait_looked()
        else:
            inbox.note_checked(caller, message)
        return Empty()

    async def _stay(self, caller: PeerId, message: RoundMessage) -> Empty:
        if not self._is_done(caller, message):
            inbox = self._inbox_of(message)
            inbox.admit_member(caller, message.plan)
            await inbox.wait_traded()
        return Empty()

    def _is_done(self, caller: PeerId, message: RoundMessage) -> bool:
        """Return whether a round has ended here with a result, and the caller was in it."""
        ended = self._ended.get(message.key)
        return ended is not None and bool(ended.digest) and caller in ended.members

    async def _chunk(self, caller: PeerId, request: ReduceRequest, incoming: Incoming) -> Answer[Empty]:
        # Admitted again: the transport may not ask about an empty payload, and the round may have ended meanwhile.
        inbox, payload = self._inbox_of(request), incoming.payload
        inbox.meter.arrived(caller, len(payload), self._means.clock.monotonic())
        self._checked(inbox, caller, request, len(payload))
        return Answer(Empty(), await inbox.answer(caller, request, payload))

    async def _agree(self, caller: PeerId, message: Agreement) -> Empty:
        if message.key in self._ended:
            ended = self._ended[message.key]
            if caller in ended.members and message.result == ended.digest:
                return Empty()
        inbox = self._inbox_of(message)
        inbox.admit_member(caller, message.plan)
        if not inbox.plan.signed:
            raise Violation(f"round {message.key} is not signed off", peer=caller)
        inbox.agree(caller, message)
        await inbox.wait_signed(caller, message.result)
        return Empty()

    async def _abort(self, caller: PeerId, message: Abort) -> Empty:
        inbox = self._find(message.key)
        if inbox is not None and inbox.failure is None:
            inbox.admit_member(caller, message.plan)
            if inbox.plan.checked and self.peer in inbox.agreements:
                # Who is called wrong may give up so that others do not hear of it.
                await first_done(self._means.clock.sleep(PATIENCE_S), inbox.wait_accused(caller))
                if inbox.is_accused(caller) or inbox.failure is not None:
                    return Empty()
            reason, culprit = f"{caller} gave up: {message.reason}", message.culprit
            now = self._means.clock.monotonic()
            inbox.fail(inbox.given_up_by(caller, reason, now, PeerId(culprit) if culprit else None))
        return Empty()

    def _inbox_of(self, message: RoundMessage) -> Inbox:
        if message.key in self._ended:
            raise Refused(f"round {message.key} is {self._ended[message.key].reason}")
        inbox = self._find(message.key)
        if inbox is None:
            raise Busy(f"round {message.key} is not expected yet")
        return inbox


def _step_of(key: RoundKey) -> tuple[int, PartName, str]:
    return key.step, key.part, key.after


async def _completed(exchange: Exchange) -> str:
    """See :meth:`Exchange.complete`."""
    try:
        return await _in_own_task(exchange.complete())
    except BaseException:
        exchange.release()
        raise


async def _in_own_task(work: Coroutine[Any, Any, str]) -> str:
    """``work``'s result, in a task that has ended when this returns.

    A TaskGroup of Python 3.11 cancels its own task when a child fails and does not take it back, so that a failure and
    a cancellation from outside look alike; in a task of its own they do not.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    try:
        return task.result()
    finally:
        del task  # else a failure leads to this frame, this frame to the task, and the task to the failure


def _to_host(vector: torch.Tensor) -> Floats:
    array: Floats = np.ascontiguousarray(vector.detach().cpu().numpy())
    return array


def _verdict(group: BaseExceptionGroup[BaseException]) -> RoundFailed:
    """The one failure to report: what is proven first, then one that names a culprit. Raises what is our own bug."""
    leaves: list[BaseException] = []
    open_groups: list[BaseExceptionGroup[BaseException]] = [group]
    while open_groups:
        for error in open_groups.pop(0).exceptions:
            if isinstance(error, BaseExceptionGroup):
                open_groups.append(error)
            else:
                leaves.append(error)
    for error in leaves:
        if not isinstance(error, RoundFailed):
            raise error from group
    failures = [error for error in leaves if isinstance(error, RoundFailed)]
    return min(failures, key=lambda failure: (not failure.proven, not failure.peer))
