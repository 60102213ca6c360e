"""Keep the book of one step: what was leased, what came home, who joins and leaves.

One object a step: books of two steps share nothing. Of a peer that does not lead the step the book has what it was told
as the leader's successor: what only one peer knows dies with it. Nothing here asks anybody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.consensus.changes import OpenStepFacts
from swarm.consensus.faults import MAX_FAULTS, Fault, Proven, barring, newly_barred
from swarm.consensus.ledger import Ledger
from swarm.consensus.records import CloseRecord, Contribution, Quarantined
from swarm.consensus.roster import Roster
from swarm.consensus.slowness import Barred
from swarm.errors import Busy, PeerError, Refused, Superseded, Violation, WrongStep
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId
from swarm.security.signing import Verify
from swarm.step.leader.requests import ChangeRequests
from swarm.step.messages import Leased, ResumeTrainer, TrainerResumed
from swarm.step.rules import StepRules

MOST_ENDED = 20
"""So often in a step a leader gives up a term because one and the same member says that it is over. By then it leads
terms beyond any that the member can be in, and has learnt what was decided: whatever the member knows, it is told."""


@dataclass(slots=True)
class LedTerm:
    """A term of a step that this peer leads. ``awaited`` are the trainers that have yet to say what they have begun."""

    number: int
    ledger: Ledger
    awaited: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class Witness:
    """What a leader's successors were told in the open step: microbatches ``completed``, and the trainers that are
    ``starved``, to which the leader gives nothing."""

    completed: dict[MicrobatchId, Contribution] = field(default_factory=dict)
    starved: set[PeerId] = field(default_factory=set)


class StepBook:
    """One step's book: ``led`` is the term that this peer leads by now, if it leads one. ``cursors`` are those of the
    record before. ``lost_since`` is when a part was found to be lost in it, by this peer's steady clock. ``hosted``
    says that the ends are part of the stages: then what a lost trainer completed is held by others and counts.
    ``may_end``: see :class:`ChangeRequests`."""

    def __init__(
        self,
        rules: StepRules,
        verify: Verify,
        now: OpenStepFacts,
        cursors: Mapping[str, tuple[int, int]] | None = None,
        *,
        hosted: bool = False,
        may_end: bool = True,
    ) -> None:
        self.now, self._rules, self._hosted, self._cursors = now, rules, hosted, cursors or {}
        self.requests = ChangeRequests(rules, verify, now, may_end=may_end)
        self.witness = Witness()
        self.led: LedTerm | None = None
        self.refused: set[str] = set()
        """Records of earlier terms, by their hashes, that too many refused for them to be decided again."""
        self.faults: dict[PeerId, tuple[Fault, Proven]] = {}
        """By the accused: the proof, and whom it proves wrong."""
        self._ended_by = Counter[str]()
        self.early_void = False
        self.lost_since: float | None = None
        self._changed, self._given_back = asyncio.Event(), asyncio.Event()

    @property
    def step(self) -> int:
        """Return the number of the step."""
        return self.now.step

    @property
    def roster(self) -> Roster:
        """Return the members that close the step."""
        return self.now.roster

    def computes_early(self, peer: str) -> bool:
        """Return whether a member has the parameters with which early work of the step is computed."""
        return self.roster.computes(peer, self.step - 2)

    def may_hold(self, one: Contribution, peer: PeerId) -> bool:
        """Return whether a member of the column may be given a microbatch to compute again: near its trainer, of the
        variant that it passes, and with the parameters that it is computed with."""
        near = self.roster.borders.near(one.microbatch.trainer, peer)
        return near and self.roster.holds(peer, one.choice) and (not one.early or self.computes_early(peer))

    def movers(self, before: CloseRecord, out: Collection[PeerId]) -> Mapping[PeerId, PartName]:
        """Return who is to hold which other part after the step, as far as is known now: ``before`` is the record
        before it, and those that are ``out`` do not close it."""
        lost = [peer for peer in out if peer in self.roster]
        return self._rules.moves.planned(before, self.requests.expected(lost))

    # --- terms ---------------------------------------------------------------------------------------------------

    def begin_first(self) -> None:
        """Lead the first term: nothing was begun before. Each trainer has its first lease by rule, and need not ask."""
        trainers = self.roster.feeding()
        self.led = LedTerm(0, self._new_ledger(trainers))
        fed = self.roster.fed(trainers)
        for trainer in fed:
            self.led.ledger.lease(self.step, trainer, self._rules.first_lease(fed))

    def begin_term(self, term: int, gone: Container[PeerId]) -> None:
        """Lead a later term: nothing is known yet, every trainer that is there must say what it has begun before
        anything is leased. With hosted ends, what we bore witness of for a lost trainer counts."""
        there = self.roster.feeding(gone)
        self.led = LedTerm(term, self._new_ledger(there), set(there))
        for trainer in self._held_by_others(gone):
            if trainer in gone:
                self.led.ledger.inherit(trainer, self.witness.completed.values(), self._cursors.get(trainer, (0, 0)))
        self.requests.begin_term()
        self._changed.set()

    def ends_term(self, error: PeerError, me: PeerId) -> bool:
        """Return whether an answer says that our term is over: another leads, or the step is closed. Not where one that
        is not ``me`` says so again and again: it could have nobody close the step."""
        if not isinstance(error, (Superseded, WrongStep)):
            return False
        if error.peer == me:
            return True
        self._ended_by[error.peer] += 1
        return self._ended_by[error.peer] <= MOST_ENDED

    def end_term(self) -> None:
        """Another leads, or we do in another term: who asked us to join or to leave asks again."""
        self.led = None
        self.requests.forget()

    def _new_ledger(self, trainers: Sequence[PeerId]) -> Ledger:
        return Ledger(self.step, self._rules.target, self._quota(trainers))

    def _quota(self, trainers: Sequence[PeerId]) -> Mapping[PeerId, int]:
        return self._rules.quota(self.step, trainers, self.roster.fed(trainers))

    # --- what the leader does with it ----------------------------------------------------------------------------

    def count_on(self, gone: Container[PeerId]) -> bool:
        """Go on without the trainers that are gone or have no way, and with those that have come back; whether there is
        quota again that others must be told of."""
        led = self.led
        there = self.roster.feeding(gone)
        if led is None or set(there) == set(led.ledger.trainers):
            return False
        led.awaited = (led.awaited & set(there)) | (set(there) - set(led.ledger.trainers))
        keep = self._places(self._held_by_others(gone))
        led.ledger.share(self._quota(there), keep)
        self._changed.set()
        return True

    def _held_by_others(self, gone: Container[PeerId]) -> list[PeerId]:
        """Return the trainers whose work can be finished without them: with hosted ends, and where it has a way."""
        return [trainer for trainer in self.roster.trainers if self._hosted and self.roster.whole(trainer, gone)]

    def void_early(self, gone: Container[PeerId]) -> bool:
        """Find whether at some stage nobody is left, or nobody near a trainer, who has the parameters that early work
        is computed with: all who are there have joined since. Then none of it counts. Whether that is news."""
        if self.early_void or not self._rules.early:
            return False
        able = [peer for peer in self.roster.peers if peer not in gone and self.computes_early(peer)]
        stages, unable = [part for part in self.roster.parts if part != ENDS], set(self.roster.peers).difference(able)
        held = all(any(self.roster[peer].part == part for peer in able) for part in stages)
        if held and all(self.roster.whole(trainer, unable) for trainer in self.roster.feeding(gone)):
            return False
        self.early_void = True
        if self.led is not None:
            self.exclude([one.microbatch for one in self.led.ledger.committed() if one.early])
        return True

    def exclude(self, microbatches: Collection[MicrobatchId]) -> tuple[MicrobatchId, ...]:
        """Lost for good: see :meth:`Ledger.exclude`. Their trainers, should they be back already, must say anew what
        they have begun."""
        led = self.led
        if led is None:
            return ()
        excluded = led.ledger.exclude(microbatches, self._places(self.roster.trainers))
        led.awaited |= {PeerId(one.trainer) for one in excluded} & set(led.ledger.trainers)
        self._changed.set()
        return excluded

    def _places(self, trainers: Iterable[PeerId]) -> dict[PeerId, tuple[int, int]]:
        """Return where their shards go on in this step."""
        return {trainer: self._cursors.get(trainer, (0, 0)) for trainer in trainers}

    async def wait_full(self) -> tuple[Contribution, ...]:
        """Return the committed microbatches, once we lead the step and its batch is complete."""
        while (led := self.led) is None or not self.full:
            self._changed.clear()
            await self._changed.wait()
        return led.ledger.committed()

    async def wait_given_back(self) -> None:
        """Return when a microbatch was put aside, a lease not used, or a member proven wrong, since this returned last:
        there is quota again, for anyone who asks."""
        await self._given_back.wait()
        self._given_back.clear()

    @property
    def full(self) -> bool:
        """Return whether the batch is complete, as far as is known now."""
        return self.led is not None and self.led.ledger.full and not self.led.awaited

    @property
    def done(self) -> int:
        """Return the number of completed microbatches."""
        return 0 if self.led is None else self.led.ledger.done

    def waits_for(self) -> tuple[PeerId, ...]:
        """As :meth:`Ledger.waits_for`; first for those that have yet to say what they have begun, unless none has said
        it: nothing is leased before, and no batch is complete."""
        led = self.led
        if led is not None and led.awaited:
            return tuple(sorted(led.awaited)) if len(led.awaited) < len(led.ledger.trainers) else ()
        return () if led is None or led.ledger.full else led.ledger.waits_for()

    def aside(self) -> tuple[Quarantined, ...]:
        """Return the microbatches that were put aside."""
        return () if self.led is None else self.led.ledger.aside()

    # --- what trainers tell it -----------------------------------------------------------------------------------

    def lease(self, led: LedTerm, trainer: PeerId, total: int) -> Leased:
        """Lease quota. Raises Superseded for a trainer that must resume, Busy while others have to."""
        self._check_resumed(led, trainer)
        if led.awaited:
            raise Busy(f"{len(led.awaited)} trainers have yet to say what they have begun")
        granted, reason = led.ledger.lease(self.step, trainer, total)
        if not granted and trainer in self.roster.unfed:
            reason = (
                f"its microbatches pull against the others': it feeds again from step {self.roster.unfed[trainer]} on"
            )
        return Leased(total=granted, reason=reason)

    def complete(self, led: LedTerm, trainer: PeerId, contribution: Contribution) -> None:
        """Count what came home. Raises Superseded for a trainer that must resume."""
        self._check_resumed(led, trainer)
        led.ledger.complete(self.step, trainer, contribution)
        self._changed.set()

    def bear_witness(self, contribution: Contribution) -> None:
        """Keep what another leader is told. Raises Refused for more of one trainer than replicas take of it: what a
        leader counts is leased, and here nothing is."""
        kept, one = self.witness.completed, contribution.microbatch
        most = 2 * self._rules.target
        if one not in kept and sum(other.trainer == one.trainer for other in kept) >= most:
            raise Refused(f"{most} microbatches of {one.trainer} are witnessed in step {self.step} already")
        kept[one] = contribution

    def witnessed(self, gone: Container[PeerId]) -> int:
        """Return how many of the microbatches that were witnessed a leader may have counted: of no trainer more than
        its share, with those that are gone or without them, so that none makes the batch look complete by itself."""
        all_there, left = self._quota(self.roster.feeding()), self._quota(self.roster.feeding(gone))
        told = Counter(PeerId(one.trainer) for one in self.witness.completed)
        most = {trainer: max(all_there.get(trainer, 0), left.get(trainer, 0)) for trainer in told}
        return sum(min(count, most[trainer]) for trainer, count in told.items())

    def put_aside(self, led: LedTerm, trainer: PeerId, aside: Quarantined) -> None:
        """Count another in place of this one. Raises Superseded for a trainer that must resume."""
        self._check_resumed(led, trainer)
        if led.ledger.put_aside(self.step, trainer, aside):
            self._given_back.set()

    def accuse(self, fault: Fault, found: Proven) -> None:
        """Take a checked fault, the first about each accused, or the first that proves it wrong: what proves its
        accusers wrong keeps no place from that. Raises Refused where no record of this step has room for it."""
        accused = PeerId(fault.accused)
        if accused not in self.faults and len(self.faults) >= MAX_FAULTS:
            raise Refused(f"{MAX_FAULTS} members were accused in this step already")
        _, known = self.faults.get(accused, (None, ()))
        if not known or (accused in found and accused not in known):
            self.faults[accused] = fault, found
            self._given_back.set()

    def wrong(self) -> dict[PeerId, set[PeerId]]:
        """Return by the accused the members that are barred with the step by what accuses it: all of them, or none."""
        return {
            peer: newly_barred(self.barred([peer]), self.step).intersection(found, self.roster.peers)
            for peer, (_, found) in self.faults.items()
        }

    def barred(self, accused: Iterable[PeerId]) -> dict[str, Barred]:
        """Return what the record says that carries the faults of these."""
        found = {str(peer): self.faults[peer][1] for peer in accused}
        return barring(self.roster.barred, self.step, found)

    def resume(self, led: LedTerm, trainer: PeerId, said: ResumeTrainer) -> TrainerResumed:
        """Take up what a trainer has begun. Raises Busy for one that is not counted on yet, Refused and Violation for
        what no honest trainer says."""
        if trainer not in led.ledger.trainers:
            raise Busy("this trainer was taken for gone; its leader has yet to count on it again")
        if len(said.started) > 2 * self._rules.target + len(said.aside):
            raise Violation(f"{len(said.started)} microbatches begun in a step of {self._rules.target}")
        if any(microbatch.trainer != trainer for microbatch in said.started):
            raise Refused("a trainer reports its own microbatches only")
        if len(set(said.started)) != len(said.started):
            raise Violation("a microbatch that was begun twice")
        before = led.ledger.leased(trainer)
        kept = led.ledger.resume(self.step, trainer, said.started, said.aside)
        if kept < before:
            self._given_back.set()
        led.awaited.discard(trainer)
        self._changed.set()
        return TrainerResumed(kept=kept, early=not self.early_void)

    def _check_resumed(self, led: LedTerm, trainer: PeerId) -> None:
        """Raises Superseded for a trainer on which we do not count, or not yet: it must resume."""
        if trainer in led.awaited or trainer not in led.ledger.trainers:
            raise Superseded("what this trainer has begun is not known here: resume")
