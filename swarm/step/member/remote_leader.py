"""The leader of the open step as this peer's trainer talks to it, no matter who that is by now."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from swarm.clock import Clock
from swarm.consensus.faults import Fault, HopFault, check_fault
from swarm.consensus.ledger import is_reassigned
from swarm.consensus.records import Contribution, Quarantined, rows_bytes
from swarm.consensus.roster import owner
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Superseded, Unreachable, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import AnyMethod
from swarm.schema import Empty
from swarm.security.signing import Verify
from swarm.step.calls import LiveCalls
from swarm.step.member.position import Position
from swarm.step.messages import (
    AGAIN,
    ASIDE,
    COMPLETE,
    FAULT,
    LEASE,
    RESUME,
    Complete,
    Feed,
    Lease,
    Quarantine,
    ResumeTrainer,
    SignedReceipt,
)
from swarm.waiting import ExponentialBackoff, first_done

logger = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")

STARVED_S = 20.0
"""A trainer that gets nothing to do for so long tells it to the next in the succession."""

NOT_COUNTED = (Refused, Violation)
"""With these a leader says that it does not count a microbatch, and not that it cannot say."""


class Begun(Protocol):
    """What this peer's trainer has under way; implemented by ``swarm.pipeline.trainer.trainer.Trainer``."""

    def started(self, step: int) -> Sequence[MicrobatchId]:
        """Return what it took of its shard in a step, in order, what was set aside as well."""

    def keep(self, step: int, count: int) -> None:
        """Leave all but the first ``count`` of it, and report nothing more of that: those are leased."""

    def drop_early(self, step: int) -> bool:
        """Give up what was fed early of it; whether there was something."""

    def avoid(self, replica: PeerId) -> None:
        """Give a replica nothing more in the open step where another is there."""


@dataclass(slots=True)
class TrainerBook:
    """What this peer's trainer has leased and told in one step; ``term`` is that of the leader that knows it, -1 where
    none does. Of the first lease so many are ``ready`` to be started. It waits for ``again`` when it has no quota
    left."""

    step: int = 0
    term: int = 0
    leased: int = 0
    ready: int = 0
    reports: dict[MicrobatchId, tuple[Contribution, tuple[SignedReceipt, ...]]] = field(default_factory=dict)
    aside: dict[MicrobatchId, Quarantined] = field(default_factory=dict)
    faults: list[HopFault] = field(default_factory=list)
    again: asyncio.Event = field(default_factory=asyncio.Event)


class RemoteLeader:
    """Leases, completions and what is put aside, told to the leader; when another takes over, it is told all again.

    Every call goes on until a leader has answered or the step is closed (WrongStep). It is also the ``feed/1`` service,
    through which a leader says that there is quota again, and shows who was proven wrong.
    """

    def __init__(
        self, calls: LiveCalls, position: Position, clock: Clock, timeout_s: Callable[[], float], verify: Verify
    ) -> None:
        self._calls, self._at, self._clock, self._timeout_s, self._verify = calls, position, clock, timeout_s, verify
        self.begun: Begun | None = None
        self._book = TrainerBook()
        self._resuming = asyncio.Lock()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [AGAIN.handled(self._on_again)]

    def rewound(self) -> None:
        """A lineage was given up: its steps come again, and nothing is leased or told in them yet."""
        self._book = TrainerBook()

    async def lease(self, step: int, wanted: int) -> int:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`. Repeating it after a lost answer leases nothing
        twice.

        The first lease is had without asking, from the leader of the first term. Who wants nothing gives the rest of it
        back: others may have it. Raises WrongStep for a closed step. A leader that says no, or takes a lease back,
        hears anew what was begun.
        """
        book = self._opened(step)
        if book.ready and wanted and self._at.term == book.term and self._at.is_member:
            started = min(book.ready, wanted)
            book.ready -= started
            return started
        book.again.clear()
        if book.ready and book.term == self._at.term:
            book.term = -1

        async def ask(leader: PeerId, term: int) -> int:
            held = book.leased
            body = Lease(step=step, term=term, total=held + wanted)
            answer = await self._calls.ask(leader, LEASE, body, timeout_s=self._timeout_s())
            if self._book is not book or book.term != term or book.leased != held:
                raise Superseded("another leader was told meanwhile what was begun", peer=leader)
            if not held <= answer.total <= held + wanted:
                reason = f"{answer.total} microbatches leased where {held} were and {wanted} more were asked for"
                raise Violation(reason, peer=leader)
            if not answer.total:
                logger.info("step %d, nothing is leased to this trainer: %s", step, answer.reason)
            book.leased = answer.total
            return answer.total - held

        complaining = asyncio.create_task(self._complain(book))
        try:
            return await self._until_told(book, ask)
        finally:
            complaining.cancel()

    async def wait_quota(self, step: int) -> None:
        """Return when asking for quota again makes sense: somebody's was given back, or another leads."""
        book = self._opened(step)
        await first_done(book.again.wait(), self._at.wait_term(step, book.term), self._complain(book))
        if self._at.open_step != step:
            raise WrongStep(f"step {step} is closed")

    async def _complain(self, book: TrainerBook) -> None:
        """Tell those who may succeed the leader, one after the other every STARVED_S until cancelled, that there is
        nothing to do here: they find out whether the batch goes on elsewhere
        (:class:`~swarm.step.member.leader_watch.LeaderWatch`)."""
        for turn in itertools.count(1):
            await self._clock.sleep(STARVED_S)
            term, successor = self._at.term, owner(self._at.roster, book.step, self._at.term + turn)
            begun = 0 if self.begun is None else len(self.begun.started(book.step))
            if begun > len(book.reports) + len(book.aside) or successor == self._at.leader:
                continue
            body = Lease(step=book.step, term=term, total=book.leased + 1)
            with contextlib.suppress(PeerError):  # it leads nothing, and says so
                await self._calls.ask(successor, LEASE, body, timeout_s=self._timeout_s())

    def attest(
        self, step: int, rows: Sequence[Contribution], absent: Collection[str], sign: Callable[[bytes], bytes]
    ) -> bytes:
        """Return our signature under our rows of the open step; b"" where they are not what we reported. Only the work
        of those that are ``absent``, or hold that stage no more, may count for others: else a leader could have all of
        its stage's count for itself, and its sum would be the mean."""
        told = self._book.reports if step == self._book.step else {}
        for row in rows:
            known, there = told.get(row.microbatch), self._at.roster.columns(absent, choice=row.choice)
            if known is None or not is_reassigned(known[0], row, there):
                return b""
        return sign(rows_bytes(self._at.rules.run, step, self._at.history.head_hash, rows, absent))

    async def complete(self, step: int, contribution: Contribution, receipts: tuple[SignedReceipt, ...]) -> None:
        """Report a finished journey to the leader and the next in its succession; returns when the leader knows, and
        the other too or is not there. Raises WrongStep for a closed step, Refused for what is not counted."""
        book = self._opened(step)
        book.reports[contribution.microbatch] = (contribution, receipts)

        async def tell(leader: PeerId, term: int) -> None:
            if contribution.microbatch not in book.reports:
                raise Refused("the leader has no room for it any more", peer=leader)
            body = Complete(step=step, term=term, contribution=contribution, receipts=receipts)
            witness = asyncio.create_task(self._bear_witness(body))
            try:
                await self._calls.ask(leader, COMPLETE, body, timeout_s=self._timeout_s())
                await witness
            finally:
                witness.cancel()

        await self._until_told(book, tell, NOT_COUNTED)

    async def _bear_witness(self, body: Complete) -> None:
        witness = owner(self._at.roster, body.step, body.term + 1)
        if witness == owner(self._at.roster, body.step, body.term):
            return
        try:
            await self._calls.ask(witness, COMPLETE, body, timeout_s=self._timeout_s())
        except PeerError as error:  # one that is gone bears no witness
            logger.debug("step %d, %s does not know of %s: %s", body.step, witness, body.contribution.microbatch, error)

    async def put_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        """No replica can compute it. Raises as :meth:`complete`."""
        book = self._opened(step)
        aside = book.aside[microbatch] = Quarantined(microbatch=microbatch, reason=reason[:200])

        async def tell(leader: PeerId, term: int) -> None:
            if microbatch not in book.aside:
                raise Refused("the leader has no room for it any more", peer=leader)
            body = Quarantine(step=step, term=term, aside=aside)
            await self._calls.ask(leader, ASIDE, body, timeout_s=self._timeout_s())

        await self._until_told(book, tell, NOT_COUNTED)
        book.again.set()  # the leader has room for another of ours, and the batch waits for it

    async def accuse(self, fault: HopFault) -> None:
        """Hand the leader the proof that a replica did not compute what it should. Returns when it knows: before the
        step is closed, where the microbatch was not reported yet. Raises as :meth:`complete`."""
        book = self._opened(fault.step)

        async def tell(leader: PeerId, term: int) -> None:
            await self._calls.ask(leader, FAULT, fault, timeout_s=self._timeout_s())

        await self._until_told(book, tell, NOT_COUNTED)
        book.faults.append(fault)

    # --- the leader -------------------------------------------------------------------------------------------

    def _opened(self, step: int) -> TrainerBook:
        """Return the book of the open step. Raises WrongStep for another."""
        if self._at.open_step != step:
            raise WrongStep(f"step {step} is closed, step {self._at.open_step} is open")
        if step > self._book.step:
            feeding = self._at.roster.fed(self._at.roster.feeding())
            first = self._at.rules.first_lease(feeding) if self._calls.me in feeding else 0
            self._book = TrainerBook(step, leased=first, ready=first)
        return self._book

    async def _until_told(
        self,
        book: TrainerBook,
        tell: Callable[[PeerId, int], Awaitable[AnswerT]],
        final: tuple[type[PeerError], ...] = (),
    ) -> AnswerT:
        """Return what the leader answers, no matter who it is; a new one hears first what was begun, and so does one
        that says no, as it may not know. Raises what is ``final`` of that, and WrongStep for a closed step."""
        patience = ExponentialBackoff()
        while True:
            if self._at.open_step != book.step or not self._at.is_member:
                raise WrongStep(f"step {book.step} is closed")
            known = False
            try:
                if self._at.term != book.term:
                    await self._resume(book)
                known, term = True, book.term
                return await tell(self._at.leader, term)
            except (Busy, Unreachable, DeadlineMissed, WrongStep) as error:
                # A leader at another step than ours was started anew, or we have yet to hear that the step is closed.
                logger.debug("step %d, its leader does not answer: %s", book.step, error)
                await self._clock.sleep(patience.pause_s())
            except PeerError as error:
                if known and isinstance(error, final):
                    raise
                logger.info("step %d, its leader says no: %s", book.step, error)
                await self._clock.sleep(patience.pause_s())
                if known and book.term == term:
                    book.term = -1  # whatever we know, the leader does not

    async def _resume(self, book: TrainerBook) -> None:
        """Tell the leader of a term that does not know us what we have begun, and what is complete."""
        async with self._resuming:
            term, step = self._at.term, book.step
            if term == book.term or self.begun is None:
                book.term = term
                return
            leader, started = self._at.leader, tuple(self.begun.started(step))
            aside = tuple(book.aside[m] for m in started if m in book.aside)
            body = ResumeTrainer(step=step, term=term, started=started, aside=aside)
            answer = await self._calls.ask(leader, RESUME, body, timeout_s=self._timeout_s())
            if not answer.early and self.begun.drop_early(step):
                book.leased, book.ready = 0, 0
                book.reports = {m: report for m, report in book.reports.items() if not report[0].early}
                raise Busy("what was fed early counts no more: asked again without it", peer=leader)
            kept = frozenset(started[: answer.kept])
            self.begun.keep(step, len(kept))
            # The one asked before this has nothing to say any more.
            book.leased, book.ready, book.term = len(kept), 0, -1
            book.reports = {m: report for m, report in book.reports.items() if m in kept}
            book.aside = {m: aside for m, aside in book.aside.items() if m in kept}
            for contribution, receipts in list(book.reports.values()):
                report = Complete(step=step, term=term, contribution=contribution, receipts=receipts)
                await self._calls.ask(leader, COMPLETE, report, timeout_s=self._timeout_s())
            for fault in book.faults:
                with contextlib.suppress(Refused):  # as it was by the leader before
                    await self._calls.ask(leader, FAULT, fault, timeout_s=self._timeout_s())
            book.term = term
            book.again.set()

    async def _on_again(self, caller: PeerId, body: Feed) -> Empty:
        """Raises Superseded for an older term than we know, Refused for one who leads none, and Refused or Violation
        where what comes with it proves nothing: to see that costs a signature for each word."""
        at = self._at
        if not body.step == self._book.step == at.open_step:
            return Empty()
        if body.term < at.term:
            raise Superseded(f"term {at.term} has begun")
        if (caller, body.term) != (at.leader, at.term):
            raise Refused(f"{at.leader} leads step {at.open_step} in term {at.term}")
        self._book.again.set()
        for fault in body.faults:
            self._avoid(fault)
        return Empty()

    def _avoid(self, fault: Fault) -> None:
        """What a replica that is proven wrong does in the step is for nothing: have our trainer give it no more."""
        about = (self._at.rules.run, self._at.roster, fault.step, self._at.history.head_hash)
        if self.begun is not None and fault.accused in check_fault(*about, fault, self._verify):
            self.begun.avoid(PeerId(fault.accused))
