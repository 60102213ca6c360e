"""Serve ``lead/1``: lease quota to trainers, count what comes home, and take requests to join and to leave.

What is said goes into the book of the open step (:mod:`.book`); here its sender and its receipts are checked first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from swarm.consensus.changes import Admission, Departure, OpenStepFacts
from swarm.consensus.faults import HopFault, check_fault
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Roster, owner
from swarm.errors import Refused, Superseded, Violation, WrongStep
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import AnyMethod
from swarm.schema import AFTER_CHARS, Empty
from swarm.security.signing import Verify, receipt_bytes
from swarm.step.leader.book import LedTerm, StepBook
from swarm.step.leader.punctuality import Lateness
from swarm.step.messages import (
    ASIDE,
    COMPLETE,
    FAULT,
    JOIN,
    LEASE,
    LEAVE,
    RESUME,
    Complete,
    Lease,
    Leased,
    Quarantine,
    ResumeTrainer,
    TrainerResumed,
)
from swarm.step.rules import StepRules


class LeadService:
    """The ``lead/1`` service of every peer; only of one that leads has the ``book`` of the open step a ledger.

    ``term_of`` is the highest term of the open step that this peer knows; ``hosted``: see :class:`StepBook`.
    """

    def __init__(
        self,
        rules: StepRules,
        me: PeerId,
        wait_open: Callable[[int], Awaitable[None]],
        verify: Verify,
        *,
        term_of: Callable[[], int] = lambda: 0,
        hosted: bool = False,
    ) -> None:
        self._rules, self._me, self._wait_open, self._verify = rules, me, wait_open, verify
        self._term_of, self._hosted = term_of, hosted
        self.book = StepBook(rules, verify, OpenStepFacts(0, Roster(()), NO_RECORD))
        self.late_answers: dict[PeerId, Lateness] = {}
        """Those that were late to vote for the record of the last step that this peer led, or to hear that it is
        decided: its next one says so."""

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            LEASE.handled(self._on_lease),
            COMPLETE.handled(self._on_complete),
            ASIDE.handled(self._on_aside),
            RESUME.handled(self._on_resume),
            FAULT.handled(self._on_fault),
            JOIN.handled(self._on_join),
            LEAVE.handled(self._on_leave),
        ]

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open: open its book."""
        before, may_end = record.previous, not record.provisional
        self.open_step(record.step + 1, record.members, record.hash(), record.cursors, before=before, may_end=may_end)

    def open_step(
        self,
        step: int,
        roster: Roster,
        previous: str = NO_RECORD,
        cursors: Mapping[str, tuple[int, int]] | None = None,
        *,
        before: str = "",
        may_end: bool = True,
    ) -> None:
        """Open the book of a step, as the leader of its first term with a ledger. ``previous`` is the hash of the
        record before it, ``before`` that of the one before that; ``cursors`` are the former's; ``may_end``: see
        :class:`StepBook`."""
        now = OpenStepFacts(step, roster, previous, before=before)
        self.book = StepBook(self._rules, self._verify, now, cursors, hosted=self._hosted, may_end=may_end)
        if owner(roster, step, 0) == self._me:
            self.book.begin_first()

    # --- for trainers --------------------------------------------------------------------------------------------

    async def _on_lease(self, caller: PeerId, body: Lease) -> Leased:
        book = await self._of_trainer(caller, body.step)
        if book.led is None and owner(book.roster, book.step, body.term) != self._me:
            book.witness.starved.add(caller)  # it asks us because its leader gives it nothing
        return book.lease(self._led(book, body.term), caller, body.total)

    async def _on_complete(self, caller: PeerId, body: Complete) -> Empty:
        book = await self._of_trainer(caller, body.step)
        self._check(book, caller, body)
        if book.led is not None and body.term == book.led.number:
            book.complete(book.led, caller, body.contribution)
        elif owner(book.roster, book.step, body.term + 1) == self._me:
            book.bear_witness(body.contribution)
            book.witness.starved.discard(caller)
        else:
            raise self._not_leading(book)
        return Empty()

    async def _on_aside(self, caller: PeerId, body: Quarantine) -> Empty:
        book = await self._of_trainer(caller, body.step)
        book.put_aside(self._led(book, body.term), caller, body.aside)
        return Empty()

    async def _on_resume(self, caller: PeerId, body: ResumeTrainer) -> TrainerResumed:
        book = await self._of_trainer(caller, body.step)
        return book.resume(self._led(book, body.term), caller, body)

    async def _on_fault(self, caller: PeerId, body: HopFault) -> Empty:
        book = await self._of_trainer(caller, body.step)
        if book.led is None:
            raise self._not_leading(book)
        if body.microbatch.trainer != caller:
            raise Refused("a trainer reports its own microbatches only")
        book.accuse(body, check_fault(self._rules.run, book.roster, book.step, book.now.previous, body, self._verify))
        return Empty()

    def _led(self, book: StepBook, term: int) -> LedTerm:
        """Return the term that we lead. Raises Superseded when another leads, or the trainer knows another term."""
        if book.led is None or term != book.led.number:
            raise self._not_leading(book)
        return book.led

    def _not_leading(self, book: StepBook) -> Superseded:
        leader = owner(book.roster, book.step, self._term_of())
        return Superseded(f"{leader} leads step {book.step} in term {self._term_of()}")

    def _check(self, book: StepBook, caller: PeerId, body: Complete) -> None:
        """Within what bounds a trainer can lie: declared shape, real replicas, their signatures, finite loss."""
        contribution = body.contribution
        if contribution.microbatch.trainer != caller:
            raise Refused("a trainer reports its own microbatches only")
        self._rules.check_contribution(book.roster, contribution, settled=False)
        if contribution.early and book.early_void:
            raise Superseded("early work of this step counts no more: resume")
        if len(body.receipts) != len(contribution.route):
            raise Violation("receipts that do not name every stage", peer=caller)
        after = book.now.before if contribution.early else book.now.previous
        key = JourneyKey(body.step, contribution.microbatch, 0, after[:AFTER_CHARS])
        for stage, (replica, receipt) in enumerate(zip(contribution.route, body.receipts, strict=True)):
            counts = self._hosted and stage == len(body.receipts) - 1
            tokens = contribution.tokens if counts else 0
            signed = receipt_bytes(self._rules.run, key, stage, receipt.digest, tokens)
            if not self._verify(PeerId(replica), signed, receipt.signature):
                raise Violation(f"the receipt of stage {stage} is forged", peer=caller)

    # --- for those that join or leave ----------------------------------------------------------------------------

    async def _on_join(self, caller: PeerId, body: Admission) -> Empty:
        if body.member.peer != caller:
            raise Refused("a peer asks for itself only")
        (await self._to_change(body.step)).requests.join(caller, body)
        return Empty()

    async def _on_leave(self, caller: PeerId, body: Departure) -> Empty:
        if body.peer != caller:
            raise Refused("a peer asks for itself only")
        (await self._to_change(body.step)).requests.leave(caller, body)
        return Empty()

    # --- whose book it is ----------------------------------------------------------------------------------------

    async def _to_change(self, step: int) -> StepBook:
        """Wait until ``step`` is open here, and only as long as its leader has not settled who joins and leaves."""
        book = await self._opened(step)
        if book.led is None:
            raise self._not_leading(book)
        book.requests.check_time()
        return book

    async def _of_trainer(self, caller: PeerId, step: int) -> StepBook:
        book = await self._opened(step)
        if caller not in book.roster.trainers:
            raise Refused(f"{caller} is not a trainer of the roster")
        return book

    async def _opened(self, step: int) -> StepBook:
        """Wait until ``step`` is open here; only the next one is waited for. Who may ask is known then: the record
        before it says who takes part."""
        if step > self.book.step + 1:
            raise WrongStep(f"step {step} is far from open, step {self.book.step} is")
        await self._wait_open(step)
        if step != self.book.step:
            raise WrongStep(f"step {step} is closed, step {self.book.step} is open")
        return self.book
