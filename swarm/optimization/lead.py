"""The leader's desk of a step: leases quota to trainers and counts what comes home.

The leader's successor keeps the same completions as a witness: what only one peer knows dies with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm.errors import Refused, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.optimization.ledger import Ledger
from swarm.optimization.messages import Complete, Lease, Leased
from swarm.optimization.records import Contribution
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
        self._step = 0
        self._roster = Roster(())
        self._ledger: Ledger | None = None
        self._witnessed: dict[MicrobatchId, Contribution] = {}
        self._full = asyncio.Event()

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="lead/1/lease", request=Lease, handle=self._on_lease),
            Method(name="lead/1/complete", request=Complete, handle=self._on_complete),
        ]

    def open_step(self, step: int, roster: Roster) -> None:
        """Start a step: as its leader with a new ledger, as its successor with an empty memory, else idle."""
        self._step, self._roster = step, roster
        self._witnessed = {}
        self._full.clear()
        leads = roster.leader(step) == self._me
        self._ledger = Ledger(step, self._rules.target, self._rules.quota(step, roster)) if leads else None

    async def wait_full(self) -> tuple[Contribution, ...]:
        """The committed microbatches of the step we lead, once its batch is complete."""
        await self._full.wait()
        assert self._ledger is not None  # noqa: S101 - only a ledger fills
        return self._ledger.committed()

    async def _on_lease(self, request: Request) -> Answer:
        body: Lease = request.body
        await self._wait_for(request.caller, body.step)
        if self._ledger is None:
            raise Refused(f"{self._roster.leader(body.step)} leads step {body.step}")
        total, reason = self._ledger.lease(body.step, request.caller, body.total)
        return Answer(Leased(total=total, reason=reason))

    async def _on_complete(self, request: Request) -> Answer:
        body: Complete = request.body
        await self._wait_for(request.caller, body.step)
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

    async def _wait_for(self, caller: PeerId, step: int) -> None:
        """Until ``step`` is open here. Only the next one is waited for, and only for trainers of the roster."""
        if self._step and caller not in self._roster.trainers:
            raise Refused(f"{caller} is not a trainer of the roster")
        if step > self._step + 1:
            raise WrongStep(f"step {step} is far from open, step {self._step} is")
        await self._wait_open(step)
        if step != self._step:
            raise WrongStep(f"step {step} is closed, step {self._step} is open")
