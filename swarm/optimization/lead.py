"""The leader's desk of a step: leases quota to trainers, counts what comes home, and takes requests to join and leave.

The leader's successor keeps the same completions as a witness: what only one peer knows dies with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.optimization.changes import MAX_CHANGES, Admission, ChangeRules, Changes, Departure, Moment
from swarm.optimization.ledger import Ledger
from swarm.optimization.messages import Complete, Lease, Leased
from swarm.optimization.records import NO_RECORD, Contribution
from swarm.optimization.roster import Roster
from swarm.optimization.rules import StepRules
from swarm.schema import Empty
from swarm.security.receipts import receipt_bytes


class LeadDesk:
    """The ``lead/1`` service of every peer; it has a ledger only while this peer leads."""

    def __init__(
        self,
        rules: StepRules,
        me: PeerId,
        wait_open: Callable[[int], Awaitable[None]],
        verify: Callable[[PeerId, bytes, bytes], bool],
    ) -> None:
        self._rules, self._me, self._wait_open, self._verify = rules, me, wait_open, verify
        self._step, self._previous = 0, NO_RECORD
        self._roster = Roster(())
        self._ledger: Ledger | None = None
        self._witnessed: dict[MicrobatchId, Contribution] = {}
        self._full = asyncio.Event()
        self._change_rules = ChangeRules(rules.run, rules.parts, rules.max_members, verify)
        self._joins: dict[PeerId, Admission] = {}
        self._leaves: dict[PeerId, Departure] = {}
        self._settled = False

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="lead/1/lease", request=Lease, handle=self._on_lease),
            Method(name="lead/1/complete", request=Complete, handle=self._on_complete),
            Method(name="lead/1/join", request=Admission, handle=self._on_join),
            Method(name="lead/1/leave", request=Departure, handle=self._on_leave),
        ]

    def open_step(self, step: int, roster: Roster, previous: str = NO_RECORD) -> None:
        """Start a step: as its leader with a new ledger, as its successor with an empty memory, else idle. ``previous``
        is the hash of the record before it."""
        self._step, self._roster, self._previous = step, roster, previous
        self._witnessed = {}
        self._full.clear()
        self._joins, self._leaves, self._settled = {}, {}, False
        leads = roster.leader(step) == self._me
        self._ledger = Ledger(step, self._rules.target, self._rules.quota(step, roster)) if leads else None

    async def wait_full(self) -> tuple[Contribution, ...]:
        """The committed microbatches of the step we lead, once its batch is complete."""
        await self._full.wait()
        assert self._ledger is not None  # noqa: S101 - only a ledger fills
        return self._ledger.committed()

    def asking(self) -> tuple[PeerId, ...]:
        """Who has asked to join with this step so far."""
        return tuple(self._joins)

    def settle(self, absent: Collection[PeerId]) -> tuple[Changes, Roster]:
        """Who joins and leaves with this step, and the next step's roster; ``absent`` have asked to join and do not
        answer. Later requests must wait for the next step."""
        self._settled = True
        joins = tuple(join for peer, join in self._joins.items() if peer not in absent)
        changes = self._change_rules.gather(self._roster, joins, tuple(self._leaves.values()))
        return changes, self._change_rules.apply(self._now, changes)

    @property
    def _now(self) -> Moment:
        return Moment(self._step, self._roster, self._previous)

    async def _on_lease(self, request: Request) -> Answer:
        body: Lease = request.body
        await self._wait_for_trainer(request.caller, body.step)
        if self._ledger is None:
            raise Refused(f"{self._roster.leader(body.step)} leads step {body.step}")
        total, reason = self._ledger.lease(body.step, request.caller, body.total)
        return Answer(Leased(total=total, reason=reason))

    async def _on_complete(self, request: Request) -> Answer:
        body: Complete = request.body
        await self._wait_for_trainer(request.caller, body.step)
        self._check(request.caller, body)
        if self._ledger is not None:
            self._ledger.complete(body.step, request.caller, body.contribution)
            if self._ledger.full:
                self._full.set()
        elif self._roster.succession(self._step)[1:2] == (self._me,):
            self._witnessed[body.contribution.microbatch] = body.contribution
        else:
            raise Refused("neither leader nor successor of this step")
        return Answer(Empty())

    def _check(self, caller: PeerId, body: Complete) -> None:
        """Within what bounds a trainer can lie: declared shape, real replicas, their signatures, finite loss."""
        contribution = body.contribution
        if contribution.microbatch.trainer != caller:
            raise Refused("a trainer reports its own microbatches only")
        self._rules.check_contribution(self._roster, contribution)
        if len(body.receipts) != self._rules.stages:
            raise Violation("receipts that do not name every stage", peer=caller)
        for stage, (replica, receipt) in enumerate(zip(contribution.route, body.receipts, strict=True)):
            signed = receipt_bytes(self._rules.run, body.step, contribution.microbatch, stage)
            if not self._verify(PeerId(replica), signed, receipt):
                raise Violation(f"the receipt of stage {stage} is forged", peer=caller)

    async def _on_join(self, request: Request) -> Answer:
        body: Admission = request.body
        if body.member.peer != request.caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self._change_rules.check_admission(self._now, body)
        others = len(self._joins.keys() - {request.caller})
        if len(self._roster) + others >= self._rules.max_members:
            raise Refused(f"the run is full: a step's record has room for {self._rules.max_members} members")
        if others >= MAX_CHANGES:
            raise Busy(f"{MAX_CHANGES} peers join in this step already")
        self._joins[request.caller] = body
        return Answer(Empty())

    async def _on_leave(self, request: Request) -> Answer:
        body: Departure = request.body
        if body.peer != request.caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self._change_rules.check_departure(self._now, body)
        others = [peer for peer in self._leaves if peer != request.caller]
        if (reason := self._change_rules.spared(self._roster, others, request.caller)) is not None:
            raise Refused(reason)
        self._leaves[request.caller] = body
        return Answer(Empty())

    async def _wait_to_change(self, step: int) -> None:
        """Until ``step`` is open here, and only as long as its leader has not settled who joins and leaves."""
        await self._wait_for(step)
        if self._ledger is None:
            raise Refused(f"{self._roster.leader(step)} leads step {step}")
        if self._settled or step >= self._rules.steps:
            raise WrongStep("it is too late for this step" if self._settled else "this is the run's last step")

    async def _wait_for_trainer(self, caller: PeerId, step: int) -> None:
        await self._wait_for(step)
        if caller not in self._roster.trainers:
            raise Refused(f"{caller} is not a trainer of the roster")

    async def _wait_for(self, step: int) -> None:
        """Until ``step`` is open here; only the next one is waited for. Who may ask is known then: the record before it
        says who takes part."""
        if step > self._step + 1:
            raise WrongStep(f"step {step} is far from open, step {self._step} is")
        await self._wait_open(step)
        if step != self._step:
            raise WrongStep(f"step {step} is closed, step {self._step} is open")
