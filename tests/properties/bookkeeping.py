"""Who does what for a step, without tensors and time: real services, trainers' real view of their leader, real wiring.

What is pretended is only the computing: a replica *holds* what travelled through it, and makes its sum equal to what is
assigned to it when the step closes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.consensus.ledger import assigned, reassigned, weights
from swarm.consensus.records import CloseRecord, Contribution, Quarantined
from swarm.consensus.roster import Member, Roster, due_term, owner
from swarm.errors import PeerError, Refused, Unreachable
from swarm.ids import MicrobatchId, PartName, PeerId, RunId, stage_part
from swarm.membership.founding_record import genesis
from swarm.network.protocols import Rpc
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.pipeline.wiring import Wiring
from swarm.step.decisions import cursors, totals
from swarm.step.leader.lead_service import LeadService
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.messages import COMPLETE, Averaged
from swarm.step.rules import StepRules
from tests.harness.rigs.common import asked, issued

STAGES = [[PeerId(f"{stage}{number}") for number in range(3)] for stage in "xy"]
TRAINERS = [PeerId(f"t{number}") for number in range(3)]
PARTS = (PartName("ends"), stage_part(0), stage_part(1))
ROSTER = Roster(
    [
        *(
            Member(peer=peer, role="stage", name=peer, part=stage_part(stage), addresses=())
            for stage, peers in enumerate(STAGES)
            for peer in peers
        ),
        *(Member(peer=peer, role="trainer", name=peer, part="ends", addresses=()) for peer in TRAINERS),
    ]
)
RULES = StepRules(
    run=RunId("ab" * 32),
    steps=1_000_000,
    target=6,
    max_share=0.7,
    max_tokens=32,
    max_members=32,
    reproducible=False,
    optimizer=OptimizerConfig(),
)


class Blocked(Exception):
    """Those asked would have to wait now: nothing else happens until another rule."""


@dataclass
class Feeder:
    """One trainer: what it took, where it is, what travels for it."""

    me: PeerId
    remote: RemoteLeader
    wiring: Wiring
    position: int = 0

    def __post_init__(self) -> None:
        self.taken = IssuedTable()
        self.under_way: dict[MicrobatchId, list[PeerId]] = {}
        self.home: dict[MicrobatchId, Contribution] = {}
        self.remote.begun = self

    def started(self, step: int) -> Sequence[MicrobatchId]:
        """See :class:`~swarm.step.member.remote_leader.Begun`."""
        return self.taken.started(step)

    def keep(self, step: int, count: int) -> None:
        """See :class:`~swarm.step.member.remote_leader.Begun`."""
        for row in self.taken.keep(step, count):
            self.under_way.pop(row.work.microbatch, None)
            self.home.pop(row.work.microbatch, None)

    def take(self, step: int) -> MicrobatchId:
        """The next of the shard."""
        microbatch = MicrobatchId(self.me, "00" * 8, 0, self.position)
        self.position += 1
        self.taken.add(issued(step, microbatch))
        return microbatch


class CallsOf:
    """The calls of one trainer, in a swarm where all share them."""

    def __init__(self, books: Books, me: PeerId) -> None:
        self._books, self.me = books, me

    def __getattr__(self, name: str) -> Any:
        return getattr(self._books, name)


class Books:
    """The swarm. Implements what RemoteLeader needs of its surroundings: calls, the member's view, and a clock."""

    def __init__(self, *, hosted: bool) -> None:
        self.hosted, self.rules, self.loop = hosted, RULES, asyncio.new_event_loop()
        self.roster, self.term = ROSTER, 0
        self.head = genesis(RULES.run, ROSTER, dict.fromkeys(PARTS, "0" * 64))
        self.records: list[CloseRecord] = [self.head]
        self.dead: set[PeerId] = set()
        self.suspected: set[PeerId] = set()
        self.services: dict[PeerId, LeadService] = {}
        self.feeders: dict[PeerId, Feeder] = {}
        self.held: dict[PeerId, set[MicrobatchId]] = defaultdict(set)
        self._open()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Its result. Raises what it raises."""
        return self.loop.run_until_complete(work)

    # --- what a RemoteLeader sees --------------------------------------------------------------------------------

    @property
    def open_step(self) -> int:
        """See :class:`~swarm.step.member.member_service.MemberService`."""
        return self.head.step + 1

    @property
    def leader(self) -> PeerId:
        """See :class:`~swarm.step.member.member_service.MemberService`."""
        return owner(self.roster, self.open_step, self.term)

    @property
    def is_member(self) -> bool:
        """See :class:`~swarm.step.member.member_service.MemberService`."""
        return True

    async def ask(self, peer: PeerId, rpc: Rpc[Any, Any], body: Any, *, timeout_s: float) -> Any:
        """See :class:`~swarm.step.calls.LiveCalls`."""
        if peer in self.gone:
            raise Unreachable("gone", peer=peer)
        caller = PeerId(body.contribution.microbatch.trainer) if rpc is COMPLETE else self._asking
        return await asked(self.services[peer], body, caller)

    async def sleep(self, seconds: float) -> None:
        """See :class:`~swarm.clock.Clock`."""
        raise Blocked

    def told(self, feeder: Feeder, work: Coroutine[Any, Any, Any]) -> Any:
        """What a trainer's question gives. Raises Blocked, and PeerError where the leader says no."""
        self._asking = feeder.me
        return self.run(work)

    # --- who is here ---------------------------------------------------------------------------------------------

    @property
    def gone(self) -> set[PeerId]:
        """Whom everybody believes to be gone."""
        return self.dead | self.suspected

    def here(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """Those of them that are in the roster and not gone."""
        return [peer for peer in peers if peer in self.roster and peer not in self.gone]

    def can_spare(self, peer: PeerId) -> bool:
        """Whether a majority and a replica of every part would be left."""
        left = {other for other in self.here(self.roster.peers) if other != peer}
        return 2 * len(left) > len(self.roster) and all(left & set(self.roster.replicas(part)) for part in PARTS)

    def noticed(self) -> None:
        """The leader counts on those that are there; when it is gone, the next one takes over."""
        if self.leader in self.gone:
            terms = [
                due_term(self.roster, self.open_step, peer, self.term, self.gone) for peer in self.here(ROSTER.peers)
            ]
            self.services[self.leader].book.end_term()
            self.term = next(term for term in terms if term is not None)
            self.services[self.leader].book.begin_term(self.term, self.gone)
        self.services[self.leader].book.count_on(self.gone)

    # --- steps ---------------------------------------------------------------------------------------------------

    def close(self) -> CloseRecord:
        """The leader closes the step with those that are there. Raises Blocked when its batch is not complete."""
        book = self.services[self.leader].book
        if not book.full:
            raise Blocked
        live = [self.here(replicas) for replicas in self.roster.columns()]
        committed = reassigned(self.run(book.wait_full()), live)
        RULES.check_committed(self.roster, committed)
        self._settle(committed, live)
        averaged = {peer: self._answer(peer, committed) for peer in self.here(self.roster.trainers)}
        lost = [peer for peer in self.roster.peers if peer in self.gone]
        changes, following = book.requests.settle((), lost)
        tokens, loss_sum = totals(committed)
        return CloseRecord(
            run=RULES.run,
            step=self.open_step,
            term=self.term,
            committed=committed,
            aside=book.aside(),
            tokens=tokens,
            loss_sum=loss_sum,
            grad_norm=1.0,
            clip=1.0,
            lr=1.0,
            digests=dict.fromkeys(PARTS, "1" * 64),
            cursors=cursors(self.head, committed, averaged, following, RULES.max_members),
            roster=following.members,
            absent=changes.absent,
            previous=self.head.hash(),
        )

    def _settle(self, committed: Sequence[Contribution], live: Sequence[Sequence[PeerId]]) -> None:
        """Everybody holds what is assigned to it; the weights of each stage are all tokens."""
        for stage, replicas in enumerate(live):
            for peer in replicas:
                self.held[peer] = {work.microbatch for work in assigned(1, committed, peer, stage_part(stage))}
            shares = weights(committed, replicas, stage_part(stage))
            assert sum(shares.values()) == sum(one.tokens for one in committed)
            assert sum(len(self.held[peer]) for peer in replicas) == len(committed)

    def _answer(self, peer: PeerId, committed: Sequence[Contribution]) -> Averaged:
        feeder = self.feeders[peer]
        ids = {one.microbatch for one in committed}
        cursor = feeder.taken.first_left(self.open_step, ids) or (0, feeder.position)
        return Averaged(digest="", sq_norm=0.0, cursor=cursor)

    def decide(self, record: CloseRecord, back: Sequence[PeerId] = ()) -> None:
        """The record is decided: the next step is open, with those who come ``back`` in its roster as well."""
        self.records.append(record)
        returned = [member for member in ROSTER.members if member.peer in back and member.peer not in record.members]
        for peer in [peer for peer in self.services if peer not in record.members]:
            del self.services[peer]
            self.feeders.pop(peer, None)
        self.dead -= set(back)
        self.suspected &= set(record.members.peers)
        self.head = record.model_copy(update={"roster": Roster([*record.roster, *returned]).members})
        self.roster, self.term = self.head.members, 0
        self.held.clear()
        self._open()

    def _open(self) -> None:
        for peer in self.roster.peers:
            if peer not in self.services:
                self.services[peer] = LeadService(
                    RULES, peer, _opened, lambda *_: True, term_of=lambda: self.term, hosted=self.hosted
                )
            self.services[peer].open_step(self.open_step, self.roster, self.head.hash(), self.head.cursors)
        for number, peer in enumerate(self.roster.trainers):
            if peer not in self.feeders:
                remote = RemoteLeader(CallsOf(self, peer), self, self, lambda: 1.0, lambda *_: True)  # type: ignore[arg-type]
                self.feeders[peer] = Feeder(peer, remote, Wiring(self.roster.columns(), seed=number))
            self._open_feeder(self.feeders[peer])

    def _open_feeder(self, feeder: Feeder) -> None:
        feeder.under_way.clear()
        feeder.home.clear()
        feeder.taken.drop_before(self.open_step)
        feeder.wiring.follow(self.roster.columns())
        feeder.position = self.head.cursors.get(feeder.me, (0, 0))[1]

    def close_loop(self) -> None:
        """The end of this world."""
        self.loop.close()


async def _opened(step: int) -> None:
    return None


def aside(microbatch: MicrobatchId) -> Quarantined:
    """Put aside, for a reason."""
    return Quarantined(microbatch=microbatch, reason="poison")


NO = (PeerError, Blocked, Refused)
"""What a question may end with."""
