"""Closing one step, as its leader: read :func:`close_step` first.

Every question goes to all members and must be answered by all of them; in this version a member that does not answer
ends the run. Nobody swaps before everybody has accepted the record, and everybody swaps to the same bits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from swarm.errors import DeadlineMissed, OutOfSync, PeerError, Unreachable, Violation, WrongStep
from swarm.events import Committed, DigestMismatch, EventSink
from swarm.ids import PartName, PeerId
from swarm.optimization.calls import StepCalls, first_leaf
from swarm.optimization.changes import NO_CHANGES, Changes
from swarm.optimization.closing import Disagreement, agreed, clip_factor, cursors, global_norm, totals
from swarm.optimization.history import History
from swarm.optimization.messages import (
    Accepted,
    Apply,
    Averaged,
    Complete,
    Decide,
    Lease,
    Leased,
    Prepared,
    Propose,
    Reconcile,
)
from swarm.optimization.presence import absent
from swarm.optimization.records import CloseRecord, Contribution
from swarm.optimization.roster import Roster
from swarm.optimization.rules import StepRules
from swarm.schema import Empty

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What closing a step needs besides the step itself. ``asking`` are those who want to join with it, so far;
    ``settle(absent)`` gives who joins and leaves with it, once, without those who are not there any more."""

    rules: StepRules
    calls: StepCalls
    history: History
    events: EventSink
    timeout_s: Callable[[], float]
    asking: Callable[[], tuple[PeerId, ...]]
    settle: Callable[[Collection[PeerId]], tuple[Changes, Roster]]


async def close_step(closing: Closing, step: int, committed: tuple[Contribution, ...]) -> CloseRecord:
    """Average, agree on the scalars, prepare, accept, decide. Returns the decided record.

    Raises the PeerError of the first member that fails, naming it, or OutOfSync when replicas disagree; nobody has
    swapped then. OutOfSync too when a member refuses what it accepted; all others have swapped then. Costs four rounds
    of calls to every member and one all-reduce per part.
    """
    roster, timeout_s = closing.history.head.members, closing.timeout_s()
    ask_all = closing.calls.ask_all
    reconcile = Reconcile(step=step, committed=committed)
    with absent(closing.calls, closing.asking()) as missing:
        averaged = await ask_all(roster.peers, "step/1/reconcile", reconcile, Averaged, timeout_s=timeout_s)
        norm, apply, digests = await _applied(closing, step, averaged)
        changes, following = closing.settle(missing)
    tokens, loss_sum = totals(committed)
    record = CloseRecord(
        run=closing.rules.run,
        step=step,
        committed=committed,
        tokens=tokens,
        loss_sum=loss_sum,
        grad_norm=norm,
        clip=apply.clip,
        lr=apply.lr,
        digests={str(part): value for part, value in digests.items()},
        cursors=cursors(closing.history.head, averaged, following, closing.rules.max_members),
        roster=following.members,
        previous=closing.history.head_hash,
    )
    decision = await accepted(closing.calls, record, roster, timeout_s, changes)
    closing.events.emit(Committed(step=step, microbatches=tuple(c.microbatch for c in committed)))
    await announce(closing.calls, decision, roster, timeout_s)
    return record


async def _applied(
    closing: Closing, step: int, averaged: Mapping[PeerId, Averaged]
) -> tuple[float, Apply, dict[PartName, str]]:
    """The global norm, the scalars that everybody applied, and the digest of each part that they gave."""
    roster = closing.history.head.members
    try:
        norm = global_norm(roster, averaged)
        apply = Apply(step=step, lr=closing.rules.lr(step), clip=clip_factor(norm, closing.rules.optimizer.clip_norm))
        prepared = await closing.calls.ask_all(
            roster.peers, "step/1/apply", apply, Prepared, timeout_s=closing.timeout_s()
        )
        digests = agreed("the updated weights", roster, {peer: answer.digest for peer, answer in prepared.items()})
    except Disagreement as disagreement:
        closing.events.emit(DigestMismatch(step=step, part=disagreement.part, digests=disagreement.digests))
        raise
    return norm, apply, digests


async def accepted(
    calls: StepCalls, record: CloseRecord, roster: Roster, timeout_s: float, changes: Changes = NO_CHANGES
) -> Decide:
    """Have a record accepted by everybody: then it is decided. Raises the PeerError of a member that does not.

    ``roster`` is who decides: for the genesis its own, for a step those who took part in it.
    """
    propose = Propose(record=record, changes=changes)
    answers = await calls.ask_all(roster.peers, "step/1/propose", propose, Accepted, timeout_s=timeout_s)
    signatures: dict[str, bytes] = {peer: answer.signature for peer, answer in answers.items()}
    return Decide(step=record.step, record=record.hash(), acceptances=signatures)


async def announce(calls: StepCalls, decision: Decide, roster: Roster, timeout_s: float) -> None:
    """Tell everybody what was decided.

    A member that accepted and then cannot be told is not waited for: the record is decided all the same, and the
    health watch deals with the member. Our own decision comes last, so that whoever sees it knows all were told.
    Raises OutOfSync, when all were told, for a member that answers no.
    """
    others = [peer for peer in roster.peers if peer != calls.me]
    answers = await asyncio.gather(*(_tell(calls, peer, decision, timeout_s) for peer in others))
    await calls.ask(calls.me, "step/1/decide", decision, Empty, timeout_s=timeout_s)
    refusals = [answer for answer in answers if answer is not None]
    if refusals:
        raise OutOfSync(f"step {decision.step} is decided, but {'; '.join(refusals)}")


async def _tell(calls: StepCalls, peer: PeerId, decision: Decide, timeout_s: float) -> str | None:
    """None when it was told, or could not be; what it said when it did not swap."""
    try:
        await calls.ask(peer, "step/1/decide", decision, Empty, timeout_s=timeout_s)
    except (Unreachable, DeadlineMissed) as error:
        logger.warning("step %d is decided, but %s could not be told: %s", decision.step, peer, error)
    except PeerError as error:
        return str(error)
    return None


class RemoteLeader:
    """The leader of one step as this peer's trainer talks to it; implements ``pipeline.trainer.StepLeader``."""

    def __init__(self, calls: StepCalls, roster: Roster, timeout_s: Callable[[], float]) -> None:
        self._calls, self._roster, self._timeout_s = calls, roster, timeout_s
        self._leased: dict[int, int] = {}

    async def lease(self, step: int, wanted: int) -> int:
        """See :class:`~swarm.pipeline.trainer.StepLeader`. Repeating it after a lost answer leases nothing twice.

        A step that the leader has closed meanwhile is fully leased. Raises Violation when it takes a lease back.
        """
        held = self._leased.get(step, 0)
        body = Lease(step=step, total=held + wanted)
        leader = self._roster.leader(step)
        try:
            answer = await self._calls.ask(leader, "lead/1/lease", body, Leased, timeout_s=self._timeout_s())
        except WrongStep:
            return 0
        if not held <= answer.total <= held + wanted:
            reason = f"{answer.total} microbatches leased where {held} were and {wanted} more were asked for"
            raise Violation(reason, peer=leader)
        self._leased = {step: answer.total}
        return answer.total - held

    async def complete(self, step: int, contribution: Contribution, receipts: tuple[bytes, ...]) -> None:
        """Report a finished journey to the leader and its successor; returns when both acknowledged it.

        The leader needs the report to close the step; a successor that sees the step closed needs it no more.
        """
        body = Complete(step=step, contribution=contribution, receipts=receipts)
        leader, *successor = self._roster.succession(step)[:2]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._report(leader, body))
                for witness in successor:
                    group.create_task(self._bear_witness(witness, body))
        except* PeerError as errors:
            raise first_leaf(errors) from errors

    async def _report(self, peer: PeerId, body: Complete) -> None:
        await self._calls.ask(peer, "lead/1/complete", body, Empty, timeout_s=self._timeout_s())

    async def _bear_witness(self, peer: PeerId, body: Complete) -> None:
        try:
            await self._report(peer, body)
        except (WrongStep, Unreachable, DeadlineMissed) as error:  # a successor that is gone bears no witness
            logger.debug(
                "step %d, its successor did not hear of %s: %s", body.step, body.contribution.microbatch, error
            )
