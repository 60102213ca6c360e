"""The leader's desk of a step: leases quota to trainers, counts what comes home, and takes requests to join and leave.

The leader's successor keeps the same completions as a witness: what only one peer knows dies with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence

from swarm.consensus.changes import (
    ALL_ASKED,
    MAX_CHANGES,
    Admission,
    ChangeRules,
    Changes,
    Departure,
    OpenStepFacts,
    Reassign,
)
from swarm.consensus.ledger import Ledger
from swarm.consensus.records import NO_RECORD, Contribution, Quarantined
from swarm.consensus.roster import Roster, owner
from swarm.errors import Busy, Refused, Superseded, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import AnyMethod
from swarm.schema import Empty
from swarm.security.signing import receipt_bytes
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


class LeadService:
    """The ``lead/1`` service of every peer; it has a ledger only while this peer leads.

    ``term_of`` is the highest term of the open step that this peer knows. ``hosted`` says that the ends are part of the
    stages: then what a lost trainer completed is held by others and counts.
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
        self._step, self._previous, self._may_end = 0, NO_RECORD, True
        self._roster = Roster(())
        self._term = 0
        self._cursors: dict[str, tuple[int, int]] = {}
        self._ledger: Ledger | None = None
        self._awaited: set[PeerId] = set()
        self._witnessed: dict[MicrobatchId, Contribution] = {}
        self._changed, self._given_back = asyncio.Event(), asyncio.Event()
        self._change_rules = ChangeRules(
            rules.run, rules.parts, rules.max_members, verify, served=rules.served, how=rules.how_to_join
        )
        self._joins: dict[PeerId, Admission] = {}
        self._leaves: dict[PeerId, Departure] = {}
        self._unspared: dict[PeerId, Departure] = {}
        self._lost: frozenset[PeerId] = frozenset()
        self._settled = False

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
        record before it, ``cursors`` are that record's; ``may_end``: it is not provisional, so that who was cut off
        finds no run that has ended without him."""
        self._may_end = may_end
        self._step, self._roster, self._previous = step, roster, previous
        self._cursors = dict(cursors or {})
        self._witnessed = {}
        self._term, self._awaited, self._ledger = 0, set(), None
        self._forget_asked()
        self._settled = False
        if owner(roster, step, 0) == self._me:
            self._ledger = Ledger(step, self._rules.target, self._rules.quota(step, roster.trainers))
        self._changed.set()

    # --- for who leads -------------------------------------------------------------------------------------------

    def begin_term(self, term: int, gone: Container[PeerId]) -> None:
        """Lead the open step from here on: nothing is known yet, every trainer that is there must say what it has
        begun before anything is leased. With hosted ends, what we bore witness of for a lost trainer counts."""
        there = [trainer for trainer in self._roster.trainers if trainer not in gone]
        self._term, self._awaited = term, set(there)
        self._ledger = Ledger(self._step, self._rules.target, self._rules.quota(self._step, there))
        for trainer in self._roster.trainers if self._hosted else ():
            if trainer in gone:
                self._ledger.inherit(trainer, self._witnessed.values(), self._cursors.get(trainer, (0, 0)))
        self._settled = False
        self._changed.set()

    def end_term(self) -> None:
        """Another leads, or we do in another term: who asked us to join or to leave asks again."""
        self._ledger = None
        self._forget_asked()

    def _forget_asked(self) -> None:
        self._joins, self._leaves, self._unspared, self._lost = {}, {}, {}, frozenset()

    def count_on(self, gone: Container[PeerId]) -> bool:
        """Go on without the trainers that are gone, and with those that have come back; whether there is quota again
        that others must be told of."""
        ledger = self._ledger
        there = [trainer for trainer in self._roster.trainers if trainer not in gone]
        if ledger is None or set(there) == set(ledger.trainers):
            return False
        self._awaited = (self._awaited & set(there)) | (set(there) - set(ledger.trainers))
        keep = self._places(self._roster.trainers if self._hosted else ())
        ledger.share(self._rules.quota(self._step, there), keep)
        self._changed.set()
        return True

    def exclude(self, microbatches: Collection[MicrobatchId]) -> tuple[MicrobatchId, ...]:
        """Lost for good: see :meth:`Ledger.exclude`. Their trainers, should they be back already, must say anew what
        they have begun."""
        if self._ledger is None:
            return ()
        excluded = self._ledger.exclude(microbatches, self._places(self._roster.trainers))
        self._awaited |= {PeerId(one.trainer) for one in excluded} & set(self._ledger.trainers)
        self._changed.set()
        return excluded

    def _places(self, trainers: Iterable[PeerId]) -> dict[PeerId, tuple[int, int]]:
        """Where their shards go on in this step."""
        return {trainer: self._cursors.get(trainer, (0, 0)) for trainer in trainers}

    async def wait_full(self) -> tuple[Contribution, ...]:
        """The committed microbatches of the step we lead, once its batch is complete."""
        while self._ledger is None or not self._ledger.full or self._awaited:
            self._changed.clear()
            await self._changed.wait()
        return self._ledger.committed()

    async def wait_given_back(self) -> None:
        """Return when a microbatch was put aside since this returned last: there is quota again, for whoever asks."""
        await self._given_back.wait()
        self._given_back.clear()

    @property
    def full(self) -> bool:
        """Whether the batch of the step we lead is complete, as far as is known now."""
        return self._ledger is not None and self._ledger.full and not self._awaited

    @property
    def done(self) -> int:
        """How many microbatches of the step we lead are completed."""
        return 0 if self._ledger is None else self._ledger.done

    def waits_for(self) -> tuple[PeerId, ...]:
        """As :meth:`Ledger.waits_for`; first for those that have yet to say what they have begun, unless none has said
        it: nothing is leased before, and no batch is complete."""
        ledger = self._ledger
        if ledger is not None and self._awaited:
            return tuple(sorted(self._awaited)) if len(self._awaited) < len(ledger.trainers) else ()
        return () if ledger is None or ledger.full else ledger.waits_for()

    def aside(self) -> tuple[Quarantined, ...]:
        """What was put aside in the step we lead."""
        return () if self._ledger is None else self._ledger.aside()

    def asking(self) -> tuple[PeerId, ...]:
        """Who has asked to join with this step so far."""
        return tuple(self._joins)

    def settle(self, missing: Collection[PeerId], absent: Collection[PeerId] = ()) -> tuple[Changes, Roster]:
        """Who joins and leaves with this step, and the next step's roster. ``missing`` have asked to join and do not
        answer, ``absent`` are members that were lost. Where there are neither, and all have asked for the end, the run
        ends. Later requests must wait for the next step. Raises Refused when the run cannot do without those that were
        lost."""
        self._settled, self._lost = True, frozenset()  # who was taken for lost before is back, or absent
        now = self._moment
        joins = tuple(join for peer, join in self._joins.items() if peer not in missing and self._may_join(now, join))
        changes = None if joins or absent else self._end()
        if changes is None:
            changes = self._change_rules.gather(self._roster, joins, tuple(self._leaves.values()), absent)
        return changes, self._change_rules.apply(now, changes)

    def _end(self) -> Changes | None:
        """See :meth:`ChangeRules.end`."""
        everybody = {**self._unspared, **self._leaves}  # who could not be spared before may be by now
        return self._change_rules.end(self._roster, tuple(everybody.values())) if self._may_end else None

    def _may_join(self, now: OpenStepFacts, join: Admission) -> bool:
        """Whether it may still: who is lost, and who can be called, has changed since it asked."""
        try:
            self._change_rules.check_admission(now, join)
        except (Refused, Violation):
            return False
        return True

    def joining(self, lost: Collection[PeerId]) -> tuple[Admission, ...]:
        """Who asks to join with a step that is to be given up, without those that are lost again. From now on who is
        ``lost`` may ask too: it was started anew."""
        self._lost = frozenset(lost)
        return tuple(self._joins.values())

    def check_reassign(self, peer: PeerId, part: str, move: Reassign) -> None:
        """What a peer answered that was asked whether it would hold a lost part. Raises Refused, and Violation where no
        honest peer would say this."""
        if (move.peer, move.part) != (peer, part):
            raise Violation(f"asked to hold {part} it answers for {move.peer} and {move.part}", peer=peer)
        self._change_rules.check_reassign(self._moment, move)

    def give_up(
        self, moves: Sequence[Reassign], joins: Sequence[Admission], absent: Collection[PeerId]
    ) -> tuple[Changes, Roster]:
        """As :meth:`settle`, for a step that is given up: without those of ``joins`` that may not join any more. Raises
        Refused, with nothing settled, while the run cannot go on with the others."""
        now = dataclasses.replace(self._moment, lost=frozenset(absent))
        granted = tuple(join for join in joins if self._may_join(now, join))
        changes = Changes(joins=granted, reassigns=tuple(moves), absent=tuple(sorted(absent)))
        roster = self._change_rules.give_up(now, changes)
        self._settled = True
        return changes, roster

    @property
    def _moment(self) -> OpenStepFacts:
        return OpenStepFacts(self._step, self._roster, self._previous)

    async def _on_lease(self, caller: PeerId, body: Lease) -> Leased:
        ledger = await self._book(caller, body.step, body.term)
        self._check_resumed(caller)
        if self._awaited:
            raise Busy(f"{len(self._awaited)} trainers have yet to say what they have begun")
        total, reason = ledger.lease(body.step, caller, body.total)
        return Leased(total=total, reason=reason)

    async def _on_complete(self, caller: PeerId, body: Complete) -> Empty:
        await self._wait_for_trainer(caller, body.step)
        self._check(caller, body)
        if self._ledger is not None and body.term == self._term:
            self._check_resumed(caller)
            self._ledger.complete(body.step, caller, body.contribution)
            self._changed.set()
        elif owner(self._roster, self._step, body.term + 1) == self._me:
            self._witnessed[body.contribution.microbatch] = body.contribution
        else:
            raise self._not_leading()
        return Empty()

    async def _on_aside(self, caller: PeerId, body: Quarantine) -> Empty:
        ledger = await self._book(caller, body.step, body.term)
        self._check_resumed(caller)
        if ledger.put_aside(body.step, caller, body.aside):
            self._given_back.set()
        return Empty()

    async def _on_resume(self, caller: PeerId, body: ResumeTrainer) -> TrainerResumed:
        ledger = await self._book(caller, body.step, body.term)
        if caller not in ledger.trainers:
            raise Busy("this trainer was taken for gone; its leader has yet to count on it again")
        if len(body.started) > 2 * self._rules.target + len(body.aside):
            raise Violation(f"{len(body.started)} microbatches begun in a step of {self._rules.target}")
        if any(microbatch.trainer != caller for microbatch in body.started):
            raise Refused("a trainer reports its own microbatches only")
        if len(set(body.started)) != len(body.started):
            raise Violation("a microbatch that was begun twice")
        kept = ledger.resume(body.step, caller, body.started, body.aside)
        self._awaited.discard(caller)
        self._changed.set()
        return TrainerResumed(kept=kept)

    async def _book(self, caller: PeerId, step: int, term: int) -> Ledger:
        """Our ledger, for a trainer of the roster. Raises Superseded when another leads, or the trainer knows another
        term than ours."""
        await self._wait_for_trainer(caller, step)
        if self._ledger is None or term != self._term:
            raise self._not_leading()
        return self._ledger

    def _check_resumed(self, trainer: PeerId) -> None:
        """Raises Superseded for a trainer on which we do not count, or not yet: it must resume."""
        ledger = self._ledger
        if trainer in self._awaited or (ledger is not None and trainer not in ledger.trainers):
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
        for stage, (replica, receipt) in enumerate(zip(contribution.route, body.receipts, strict=True)):
            signed = receipt_bytes(self._rules.run, body.step, contribution.microbatch, stage)
            if not self._verify(PeerId(replica), signed, receipt):
                raise Violation(f"the receipt of stage {stage} is forged", peer=caller)

    async def _on_join(self, caller: PeerId, body: Admission) -> Empty:
        if body.member.peer != caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self._change_rules.check_admission(dataclasses.replace(self._moment, lost=self._lost), body)
        others = len(self._joins.keys() - {caller})
        if len(self._roster) + others >= self._rules.max_members:
            raise Refused(f"the run is full: a step's record has room for {self._rules.max_members} members")
        if others >= MAX_CHANGES:
            raise Busy(f"{MAX_CHANGES} peers join in this step already")
        self._joins[caller] = body
        return Empty()

    async def _on_leave(self, caller: PeerId, body: Departure) -> Empty:
        if body.peer != caller:
            raise Refused("a peer asks for itself only")
        await self._wait_to_change(body.step)
        self._change_rules.check_departure(self._moment, body)
        others = [peer for peer in self._leaves if peer != caller]
        if (reason := self._change_rules.spared(self._roster, others, caller)) is None:
            self._leaves[caller] = body
            return Empty()
        self._unspared[caller] = body
        if self._end() is None:
            raise Refused(self._why_not_yet(reason))
        return Empty()

    def _why_not_yet(self, reason: str) -> str:
        """Why one that cannot be spared, for that reason, must wait for more than the step."""
        if not self._may_end:
            return f"{reason}, once a majority is there again"
        if len(self._roster) > MAX_CHANGES or self._leaves.keys() | self._unspared.keys() < set(self._roster.peers):
            return reason
        return f"{ALL_ASKED}: the run ends soon, with the step that is open then, unless somebody joins"

    async def _wait_to_change(self, step: int) -> None:
        """Until ``step`` is open here, and only as long as its leader has not settled who joins and leaves."""
        await self._wait_for(step)
        if self._ledger is None:
            raise self._not_leading()
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
