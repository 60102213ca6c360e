"""The context of a run for one of its peers: given to everything that lives as long as its membership."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.averaging.deadline import RoundDeadline, rate_needed, round_deadline
from swarm.consensus.ballot import Incarnation, VoteFile
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster, lacking, lost_parts
from swarm.errors import Ending, PeerError
from swarm.events import LimitSlows, LimitTooLow
from swarm.ids import PartName, PeerId
from swarm.membership.roles import PeerContext
from swarm.membership.rules import rules_of, step_bytes
from swarm.membership.settings import MemberSettings
from swarm.membership.state_keeper import StateKeeper
from swarm.membership.status import PeerStatus
from swarm.network.protocols import Directory
from swarm.security.signing import verify
from swarm.step.calls import StepCalls
from swarm.step.member.position import Forking, Position
from swarm.step.observe_messages import MAX_LACKING, RunStanding
from swarm.step.rules import StepRules
from swarm.waiting import AdaptiveDeadline

STEP_FLOOR_S, STEP_CEILING_S = 20.0, 120.0
"""Bounds of what a question of a step may take; the averaging of large parts over thin links may take longer."""
MAX_WAITING_CHARS = 400
SEEN = 1 << 12
SLOW_STEP_S = 1.0
"""A limit by which each step takes longer than this is told to who set it."""


@dataclass(slots=True)
class ExitRequest:
    """The orders to leave that this peer got.

    Attributes:
        told: Set once somebody told it to.
        told_at: When, on the peer's steady clock.
        ending: How the run has ended for this peer when it has left.
        reasons: Who told it, in words.
        admitted: Set once this peer has asked to be let in: from then on a record may name it, and it leaves by
            another.
    """

    told: asyncio.Event = field(default_factory=asyncio.Event)
    told_at: float = 0.0
    ending: Ending = Ending.DONE
    reasons: set[str] = field(default_factory=set)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def asked(self) -> bool:
        """Return whether this peer is to leave."""
        return self.told.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run as its peer knows it.

    Attributes:
        around: What the peer works with.
        settings: What its owner chose.
        directory: Where the peers of the run find each other.
        keeper: What keeps the run on this machine's disk.
        contact: The peer through which it found the run; itself for the founder.
        founder: The peer whose genesis counts.
        rules: What the manifest says about every step.
        history: The close records that are decided here.
        position: Where this peer stands among the members.
        situation: Where it stands for people, who read it on the control socket.
        calls: What it asks of members.
        deadline: How long a step takes, and so how long its questions may, but for :meth:`averaging_s`.
        exit: What it was told about leaving.
        seen: The hashes of the newest records that were decided here, by step, SEEN of them at most.
        returns: The decisions with which the run went back to a checkpoint, in this process; what is known here begins
            with the last one.
    """

    around: PeerContext
    settings: MemberSettings
    directory: Directory
    keeper: StateKeeper
    contact: PeerId
    founder: PeerId
    rules: StepRules
    history: History
    position: Position
    situation: PeerStatus
    calls: StepCalls
    deadline: AdaptiveDeadline
    exit: ExitRequest
    returns: tuple[Decision, ...] = ()
    seen: dict[int, str] = field(default_factory=dict)

    @property
    def founds(self) -> bool:
        """Return whether this peer is the founder."""
        return self.contact == self.around.endpoint.peer

    def gone_back(self) -> RunContext:
        """Return what follows, once the run has gone back to a checkpoint: the same peer, and a new chain."""
        assert self.position.back is not None  # noqa: S101 - asked before
        life = self.position.life
        history, position = _chain(self.settings, self.around, self.situation, self.rules, self.founder, life)
        returns = (*self.returns, self.position.back)
        return dataclasses.replace(self, history=history, position=position, returns=returns)

    def saw(self, record: CloseRecord) -> None:
        """Remember that this record was decided here."""
        self.seen.pop(record.step, None)  # the newest come last
        self.seen[record.step] = record.hash()
        while len(self.seen) > SEEN:
            del self.seen[next(iter(self.seen))]

    def lost(self) -> dict[PeerId, str]:
        """Return who counts as lost in the open step, and why: who is gone, and replicas that are proven to be tied."""
        return {**self.around.watch.gone, **self.position.open.conduct.tied}

    def learn(self, roster: Roster) -> None:
        """Remember where the others are; what is said of another life of ours is not where we are."""
        for member in roster.members:
            if member.peer != self.around.endpoint.peer:
                self.around.endpoint.learn(PeerId(member.peer), member.addresses)

    def standing(self, closed: int | None) -> RunStanding:
        """Return where the run stands, for peers that ask; ``closed`` is the newest published step, None before the
        genesis."""
        return RunStanding(
            founder=self.founder,
            closed=closed,
            waiting_for="" if closed is not None else self.situation.waiting_for[:MAX_WAITING_CHARS],
            lost=lost_parts(self.position.roster, self.around.watch.gone),
            lacking=lacking(self.position.roster, self.around.watch.gone)[:MAX_LACKING],
            leaving=self.exit.asked,
            returning=bool(self.position.cut_off) or (self.settings.returns and not self.position.is_member),
        )

    def round_deadline(self, part: PartName, plainly: bool) -> RoundDeadline:
        """Return how long the averaging of a part may take in the open step; ``plainly`` see :class:`Reconcile`."""
        links = self.history.head.links
        rates = [links.get(peer, (0, 0))[1] for peer in self.position.roster.replicas(part)]
        return round_deadline(
            self.rules.part_bytes.get(part, 0),
            rates,
            ordinary_s=self.deadline.seconds(),
            one_reduces=plainly or self.rules.one_reduces,
        )

    def assigned(self, part: PartName | None, reason: str, record: CloseRecord) -> None:
        """Say which part this peer is to hold after that record, and why; and where its owner's limit slows steps down,
        or is too low for the part's averaging. Nobody else can say so: to the run it looks like a peer that is slow, or
        fails in each round."""
        self.situation.assigned(part, reason)
        limit, me = self.settings.limit_bytes_s, self.around.endpoint.peer
        if part is None or limit is None:
            return
        others = [record.links.get(peer, (0, 0))[1] for peer in record.members.replicas(part) if peer != me]
        specs = self.around.boundary(0, 1)
        payload = specs.activation_bytes + specs.gradient_bytes
        mine = step_bytes(self.rules.part_bytes.get(part, 0), self.rules.target, payload, len(others) + 1)
        if mine >= limit * SLOW_STEP_S:
            self.around.events.emit(LimitSlows(part=part, rate=int(limit), step_bytes=mine))
        needed = rate_needed(
            self.rules.part_bytes.get(part, 0),
            others,
            limit,
            ordinary_s=STEP_CEILING_S,
            one_reduces=self.rules.one_reduces,
        )
        if needed:
            self.around.events.emit(LimitTooLow(part=part, rate=int(limit), needed=needed))

    def averaging_s(self, plainly: Collection[str]) -> float:
        """Return how long the averaging of the slowest part may take; these parts average plainly."""
        there = self.position.roster.parts
        return max(self.round_deadline(part, part in plainly).seconds for part in there)

    def question_s(self) -> float:
        """Return how long the last question of the open step's leader may take, as far as it was heard here."""
        opened = self.position.open
        if opened.reconciled is None or opened.applied is not None:
            return self.deadline.seconds()
        return self.averaging_s(opened.reconciled.plainly)

    def name_of(self, peer: str) -> str:
        """Return what people are shown of a peer; before the roster is known "the contact", else the peer's id."""
        roster = self.position.roster
        if not len(roster) and self.returns:
            roster = self.returns[-1].record.members
        if peer in roster:
            return roster.names[peer]
        return "the contact" if peer == self.contact and not len(roster) else peer

    def describe(self, error: BaseException) -> str:
        """Return a peer's failure in words, with the peer's name."""
        if isinstance(error, PeerError) and error.peer:
            name = self.name_of(error.peer)
            who = error.peer if name == error.peer else f"{name} ({error.peer})"
            return f"{who} failed: {error.code}, {error.reason}"
        return str(error)


def open_run(
    settings: MemberSettings,
    around: PeerContext,
    directory: Directory,
    *,
    contact: PeerId,
    founder: PeerId,
    keeper: StateKeeper,
) -> RunContext:
    """Return what the run is for this peer, from what its disk remembers of it.

    Args and errors are those of :func:`swarm.membership.composition.compose`.
    """
    me, situation = around.endpoint.peer, PeerStatus(around.events)
    rules = dataclasses.replace(rules_of(around.manifest), how_to_join=around.how_to_join)
    refuses = functools.partial(situation.disk_refuses, "its votes")
    life = Incarnation(me, around.watch.incarnation, VoteFile(settings.votes), refuses)
    history, position = _chain(settings, around, situation, rules, founder, life)
    return RunContext(
        around=around,
        settings=settings,
        directory=directory,
        keeper=keeper,
        contact=contact,
        founder=founder,
        rules=rules,
        history=history,
        position=position,
        situation=situation,
        calls=StepCalls(around.endpoint),
        deadline=AdaptiveDeadline(STEP_FLOOR_S, STEP_CEILING_S),
        exit=ExitRequest(),
    )


def _chain(
    settings: MemberSettings,
    around: PeerContext,
    situation: PeerStatus,
    rules: StepRules,
    founder: PeerId,
    life: Incarnation,
) -> tuple[History, Position]:
    """Return the chain of records that is decided here, empty in memory, and where this peer stands in it."""
    refuses = functools.partial(situation.disk_refuses, "the run's history")
    history = History(settings.history, around.manifest.run_id, trouble=refuses)
    forking = Forking(around.endpoint.peer, history, life, verify, lambda: around.watch.gone)
    return history, Position(history, life, rules, founder, forking)
