"""The leader's desk of a step: leases quota to trainers, counts what comes home, and takes requests to join and leave.

The leader's successor keeps the same completions as a witness: what only one peer knows dies with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.consensus.changes import Admission, Departure, OpenStepFacts
from swarm.consensus.ledger import Ledger
from swarm.consensus.records import NO_RECORD, Contribution, Quarantined
from swarm.consensus.roster import Roster, owner
from swarm.errors import Busy, Refused, Superseded, Violation, WrongStep
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.network.protocols import AnyMethod
from swarm.schema import AFTER_CHARS, Empty
from swarm.security.signing import receipt_bytes
from swarm.step.leader.requests import ChangeRequests
from swarm.step.messages import (
    ASIDE,
    COMPLETE,
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


@dataclass(slots=True)
class LedTerm:
    """A term of the open step that this peer leads. ``awaited`` are the trainers that have yet to say what they have
    begun."""

    number: int
    ledger: Ledger
    awaited: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class Witness:
    """What a leader's successors were told in the open step: microbatches ``completed``, and the trainers that are
    ``starved``, to which the leader gives nothing."""

    completed: dict[MicrobatchId, Contribution] = field(default_factory=dict)
    starved: set[PeerId] = field(default_factory=set)


class LeadService:
    """The ``lead/1`` service of every peer; it has a ledger only while this peer leads.

    ``term_of`` is the highest term of the open step that this peer knows. ``hosted`` says that the ends are part of the
    stages: then what a lost trainer completed is held by others and counts. ``requests`` are those to join and to leave
    with the open step; ``witness`` is what it was told as the leader's successor.
    """

    def __init__(
        self,
        rules: StepRules,
        me: PeerId,
        wait_open: Callable[[int], Awaitable[None]],
        verify: Callable[[PeerId, bytes, bytes], bool],
        *,
        term_of: Callable[[], int] = lambda: 0,
        hosted: bool = False,
    ) -> None:
        self._rules, self._me, self._wait_open, self._verify = rules, me, wait_open, verify
        self._term_of, self._hosted = term_of, hosted
        self.requests = ChangeRequests(rules, verify, OpenStepFacts(0, Roster(()), NO_RECORD))
        self._cursors: dict[str, tuple[int, int]] = {}
        self._led: LedTerm | None = None
        self.witness = Witness()
        self._changed, self._given_back = asyncio.Event(), asyncio.Event()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            LEASE.handled(self._on_lease),
            COMPLETE.handled(self._on_complete),
            ASIDE.handled(self._on_aside),
            RESUME.handled(self._on_resume),
            JOIN.handled(self._on_join),
            LEAVE.handled(self._on_leave),
        ]

    def open_step(
        self,
        step: int,
        roster: Roster,
        previous: str = NO_RECORD,
        cursors: Mapping[str, tuple[int, int]] | None = None,
        *,
        may_end: bool = True,
    ) -> None:
        """Start a step: as the leader of its first term with a new ledger, else idle. ``previous`` is the hash of the
        record before it, ``cursors`` are that record's; ``may_end``: see :class:`ChangeRequests`."""
        now = OpenStepFacts(step, roster, previous)
        self.requests = ChangeRequests(self._rules, self._verify, now, may_end=may_end)
        self._cursors, self.witness = dict(cursors or {}), Witness()
        leads = owner(roster, step, 0) == self._me
        self._led = LedTerm(0, self._new_ledger(roster.trainers)) if leads else None
        self._changed.set()

    @property
    def _step(self) -> int:
        return self.requests.now.step

    @property
    def _roster(self) -> Roster:
        return self.requests.now.roster

    def _new_ledger(self, trainers: Sequence[PeerId]) -> Ledger:
        return Ledger(self._step, self._rules.target, self._rules.quota(self._step, trainers))

    # --- for who leads -------------------------------------------------------------------------------------------

    def begin_term(self, term: int, gone: Container[PeerId]) -> None:
        """Lead the open step from here on: nothing is known yet, every trainer that is there must say what it has
        begun before anything is leased. With hosted ends, what we bore witness of for a lost trainer counts."""
        there = [trainer for trainer in self._roster.trainers if trainer not in gone]
        self._led = LedTerm(term, self._new_ledger(there), set(there))
        for trainer in self._roster.trainers if self._hosted else ():
            if trainer in gone:
                self._led.ledger.inherit(trainer, self.witness.completed.values(), self._cursors.get(trainer, (0, 0)))
        self.requests.begin_term()
        self._changed.set()

    def end_term(self) -> None:
        """Another leads, or we do in another term: who asked us to join or to leave asks again."""
        self._led = None
        self.requests.forget()

    def count_on(self, gone: Container[PeerId]) -> bool:
        """Go on without the trainers that are gone, and with those that have come back; whether there is quota again
        that others must be told of."""
        led = self._led
        there = [trainer for trainer in self._roster.trainers if trainer not in gone]
        if led is None or set(there) == set(led.ledger.trainers):
            return False
        led.awaited = (led.awaited & set(there)) | (set(there) - set(led.ledger.trainers))
        keep = self._places(self._roster.trainers if self._hosted else ())
        led.ledger.share(self._rules.quota(self._step, there), keep)
        self._changed.set()
        return True

    def exclude(self, microbatches: Collection[MicrobatchId]) -> tuple[MicrobatchId, ...]:
        """Lost for good: see :meth:`Ledger.exclude`. Their trainers, should they be back already, must say anew what
        they have begun."""
        led = self._led
        if led is None:
            return ()
        excluded = led.ledger.exclude(microbatches, self._places(self._roster.trainers))
        led.awaited |= {PeerId(one.trainer) for one in excluded} & set(led.ledger.trainers)
        self._changed.set()
        return excluded

    def _places(self, trainers: Iterable[PeerId]) -> dict[PeerId, tuple[int, int]]:
        """Return where their shards go on in this step."""
        return {trainer: self._cursors.get(trainer, (0, 0)) for trainer in trainers}

    async def wait_full(self) -> tuple[Contribution, ...]:
        """Return the committed microbatches of the step we lead, once its batch is complete."""
        while (led := self._led) is None or not led.ledger.full or led.awaited:
            self._changed.clear()
            await self._changed.wait()
        return led.ledger.committed()

    async def wait_given_back(self) -> None:
        """Return when a microbatch was put aside since this returned last: there is quota again, for whoever asks."""
        await self._given_back.wait()
        self._given_back.clear()

    @property
    def full(self) -> bool:
        """Return whether the batch of the step we lead is complete, as far as is known now."""
        return self._led is not None and self._led.ledger.full and not self._led.awaited

    @property
    def done(self) -> int:
        """Return the number of microbatches of the step we lead that are completed."""
        return 0 if self._led is None else self._led.ledger.done

    def waits_for(self) -> tuple[PeerId, ...]:
        """As :meth:`Ledger.waits_for`; first for those that have yet to say what they have begun, unless none has said
        it: nothing is leased before, and no batch is complete."""
        led = self._led
        if led is not None and led.awaited:
            return tuple(sorted(led.awaited)) if len(led.awaited) < len(led.ledger.trainers) else ()
        return () if led is None or led.ledger.full else led.ledger.waits_for()

    def aside(self) -> tuple[Quarantined, ...]:
        """Return the microbatches that were put aside in the step we lead."""
        return () if self._led is None else self._led.ledger.aside()

    # --- for trainers --------------------------------------------------------------------------------------------

    async def _on_lease(self, caller: PeerId, body: Lease) -> Leased:
        await self._wait_for_trainer(caller, body.step)
        if self._led is None and owner(self._roster, self._step, body.term) != self._me:
            self.witness.starved.add(caller)  # it asks us because its leader gives it nothing
        led = await self._leading(caller, body.step, body.term)
        self._check_resumed(led, caller)
        if led.awaited:
            raise Busy(f"{len(led.awaited)} trainers have yet to say what they have begun")
        total, reason = led.ledger.lease(body.step, caller, body.total)
        return Leased(total=total, reason=reason)

    async def _on_complete(self, caller: PeerId, body: Complete) -> Empty:
        await self._wait_for_trainer(caller, body.step)
        self._check(caller, body)
        led = self._led
        if led is not None and body.term == led.number:
            self._check_resumed(led, caller)
            led.ledger.complete(body.step, caller, body.contribution)
            self._changed.set()
        elif owner(self._roster, self._step, body.term + 1) == self._me:
            self.witness.completed[body.contribution.microbatch] = body.contribution
            self.witness.starved.discard(caller)
        else:
            raise self._not_leading()
        return Empty()

    async def _on_aside(self, caller: PeerId, body: Quarantine) -> Empty:
        led = await self._leading(caller, body.step, body.term)
        self._check_resumed(led, caller)
        if led.ledger.put_aside(body.step, caller, body.aside):
            self._given_back.set()
        return Empty()

    async def _on_resume(self, caller: PeerId, body: ResumeTrainer) -> TrainerResumed:
        led = await self._leading(caller, body.step, body.term)
        if caller not in led.ledger.trainers:
            raise Busy("this trainer was taken for gone; its leader has yet to count on it again")
        if len(body.started) > 2 * self._rules.target + len(body.aside):
            raise Violation(f"{len(body.started)} microbatches begun in a step of {self._rules.target}")
        if any(microbatch.trainer != caller for microbatch in body.started):
            raise Refused("a trainer reports its own microbatches only")
        if len(set(body.started)) != len(body.started):
            raise Violation("a microbatch that was begun twice")
        kept = led.ledger.resume(body.step, caller, body.started, body.aside)
        led.awaited.discard(caller)
        self._changed.set()
        return TrainerResumed(kept=kept)

    async def _leading(self, caller: PeerId, step: int, term: int) -> LedTerm:
        """Return the term that we lead, for a trainer of the roster. Raises Superseded when another leads, or the
        trainer knows another term than ours."""
        await self._wait_for_trainer(caller, step)
        if self._led is None or term != self._led.number:
            raise self._not_leading()
        return self._led

    def _check_resumed(self, led: LedTerm, trainer: PeerId) -> None:
        """Raises Superseded for a trainer on which we do not count, or not yet: it must resume."""
        if trainer in led.awaited or trainer not in led.ledger.trainers:
            raise Superseded("what this trainer has begun is not known here: resume")

    def _not_leading(self) -> Superseded:
        leader = owner(self._roster, self._step, self._term_of())
        return Superseded(f"{leader} leads step {self._step} in term {self._term_of()}")

    def _check(self, caller: PeerId, body: Complete) -> None:
        """Within what bounds a trainer can lie: declared shape, real replicas, their signatures, finite loss."""
        contribution = body.contribution
        if contribution.microbatch.trainer != caller:
            raise Refused("a trainer reports its own microbatches only")
        self._rules.check_contribution(self._roster, contribution)
        if len(body.receipts) != self._rules.stages:
            raise Violation("receipts that do not name every stage", peer=caller)
        key = JourneyKey(body.step, contribution.microbatch, 0, self.requests.now.previous[:AFTER_CHARS])
        for stage, (replica, receipt) in enumerate(zip(contribution.route, body.receipts, strict=True)):
            counts = self._hosted and stage == self._rules.stages - 1
            signed = receipt_bytes(self._rules.run, key, stage, contribution.tokens if counts else 0)
            if not self._verify(PeerId(replica), signed, receipt):
                raise Violation(f"the receipt of stage {stage} is forged", peer=caller)

    # --- for those that join or leave ----------------------------------------------------------------------------

    async def _on_join(self, caller: PeerId, body: Admission) -> Empty:
        if body.member.peer != caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self.requests.join(caller, body)
        return Empty()

    async def _on_leave(self, caller: PeerId, body: Departure) -> Empty:
        if body.peer != caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self.requests.leave(caller, body)
        return Empty()

    async def _wait_to_change(self, step: int) -> None:
        """Until ``step`` is open here, and only as long as its leader has not settled who joins and leaves."""
        await self._wait_for(step)
        if self._led is None:
            raise self._not_leading()
        self.requests.check_time()

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
