"""Leaders and guests that do what no honest peer does, in one step of a simulated run; each notes when it struck.

with striking(evicts("host-1"), step=3) as struck:
    run_world(swarm.run())
assert struck
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.changes import Admission, admission_bytes
from swarm.consensus.faults import HopFault, auditors
from swarm.consensus.roster import Member, owner
from swarm.errors import Busy, PeerError
from swarm.ids import JourneyKey, MicrobatchId, PartName, PeerId, stage_of
from swarm.network.protocols import AnyMethod
from swarm.optim.part import TrainedPart
from swarm.schema import AFTER_CHARS
from swarm.security.signing import PrivateIdentity
from swarm.security.statements import AuditStatement
from swarm.sim.loop import PEER
from swarm.step.leader.answers import AnswerRules
from swarm.step.leader.batch import BatchCollection
from swarm.step.leader.book import StepBook
from swarm.step.leader.close import StepClose
from swarm.step.leader.lead_service import LeadService
from swarm.step.member.leader_watch import LeaderWatch
from swarm.step.member.open_step import Attempt
from swarm.step.messages import JOIN, RECONCILE, Apply, Reconcile
from swarm.step.observe_messages import STANDING, RunStanding, StandingRequest
from swarm.step.rules import StepRules

Attack = Callable[[pytest.MonkeyPatch, int, list[str]], None]


@contextlib.contextmanager
def striking(attack: Attack, *, step: int) -> Iterator[list[str]]:
    """Have the leader of the first term of ``step`` attack; yields what was done."""
    struck: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        attack(patch, step, struck)
        yield struck


def never_closes(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It begins to lead, and does nothing."""
    close = StepClose.close

    async def stands_still(leading: StepClose) -> Any:
        if (leading.book.step, leading.term) == (step, 0):
            struck.append("close")
            await asyncio.Event().wait()
        return await close(leading)

    patch.setattr(StepClose, "close", stands_still)


def neither_closes(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It does nothing, and the next in the succession does not judge it."""
    never_closes(patch, step, struck)
    overdue = LeaderWatch.overdue

    def looks_away(watch: LeaderWatch) -> dict[PeerId, str]:
        at = watch._at
        return {} if at.open_step == step and owner(at.roster, step, 1) == watch._me else overdue(watch)

    patch.setattr(LeaderWatch, "overdue", looks_away)


def stops_in_the_middle(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It has all average, and then does nothing."""
    apply = StepClose.apply

    async def stands_still(leading: StepClose, table: Any) -> Any:
        if (leading.book.step, leading.term) == (step, 0):
            struck.append("apply")
            await asyncio.Event().wait()
        return await apply(leading, table)

    patch.setattr(StepClose, "apply", stands_still)


def _goes_on_asking(change: Callable[[Reconcile, int], Reconcile]) -> Attack:
    def attack(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
        reconcile = StepClose.reconcile

        async def asks(leading: StepClose, committed: Any) -> Any:
            if (leading.book.step, leading.term) != (step, 0):
                return await reconcile(leading, committed)
            body = leading._question(committed)
            while True:
                struck.append("reconcile")
                asked = change(body, len(struck))
                await leading._asks.all([PeerId(peer) for peer in body.live], RECONCILE, asked)
                await asyncio.sleep(20.0)

        patch.setattr(StepClose, "reconcile", asks)

    return attack


asks_again_and_again = _goes_on_asking(lambda body, number: body.model_copy(update={"within_s": 60.0 + number}))
"""It asks for the same round every 20 s, with another time for it."""

finds_more_to_ask = _goes_on_asking(
    lambda body, number: body.model_copy(
        update={"attempts": {part: attempt + number for part, attempt in body.attempts.items()}}
    )
)
"""It has the same averaged anew every 20 s."""


def leases_nothing(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It puts every trainer off."""
    lease = LeadService._on_lease

    async def gives_nothing(service: LeadService, caller: Any, body: Any) -> Any:
        if (body.step, body.term) == (step, 0) and owner(service.book.roster, step, 0) == service._me:
            struck.append("lease")
            raise Busy("later")
        return await lease(service, caller, body)

    patch.setattr(LeadService, "_on_lease", gives_nothing)


def evicts(victim: Callable[[], PeerId]) -> Attack:
    """It says that ``victim`` is lost, who is not."""

    def attack(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
        honest: Any = BatchCollection.out

        def out(batch: BatchCollection) -> Mapping[PeerId, str]:
            found: dict[PeerId, str] = honest.fget(batch)
            if (batch._book.step, batch._term) == (step, 0):
                struck.append("out")
                return {**found, victim(): "it does not answer"}
            return found

        patch.setattr(BatchCollection, "out", property(out))

    return attack


def invents_fault(victim: Callable[[], PeerId]) -> Attack:
    """It closes the step without ``victim``, whom two others prove wrong, as it says: it signed for them."""

    def attack(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
        collect = StepClose.collect

        async def accuses(leading: StepClose) -> Any:
            book, accused = leading.book, victim()
            if (book.step, leading.term) == (step, 0) and not struck:
                struck.append("fault")
                book.faults[accused] = invented(book, accused), (accused,)
            return await collect(leading)

        patch.setattr(StepClose, "collect", accuses)

    return attack


def invented(book: StepBook, accused: PeerId) -> HopFault:
    """Return a fault with signatures that are none."""
    stage = stage_of(PartName(book.roster[accused].part or ""))
    microbatch, after = MicrobatchId(book.roster.trainers[0], "ab" * 8, 0, 0), book.now.previous[:AFTER_CHARS]
    assert stage is not None
    judges = auditors(book.roster, JourneyKey(book.step, microbatch, 0, after), stage, accused)
    return HopFault(
        step=book.step,
        microbatch=microbatch,
        attempt=0,
        after=after,
        hop=stage,
        accused=accused,
        told=bytes(32),
        tokens=0,
        receipt=bytes(64),
        statements=tuple(AuditStatement(auditor=judge, wrong=True, signature=bytes(64)) for judge in judges),
    )


def evicts_after_trying(victim: Callable[[], PeerId]) -> Attack:
    """In each of its terms it makes an attempt with all, and says then that ``victim`` did not answer."""

    def attack(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
        honest: Any = BatchCollection.out
        reconcile, tried = StepClose.reconcile, set[int]()

        def leads(term: int, roster: Any) -> bool:
            return bool(owner(roster, step, term) == owner(roster, step, 0))

        def out(batch: BatchCollection) -> Mapping[PeerId, str]:
            found: dict[PeerId, str] = honest.fget(batch)
            if batch._book.step != step or batch._term not in tried:
                return found
            struck.append("out")
            return {**found, victim(): "it does not answer"}

        async def tries(leading: StepClose, committed: Any) -> Any:
            table = await reconcile(leading, committed)
            if leading.book.step == step and leading.term not in tried and leads(leading.term, leading.book.roster):
                tried.add(leading.term)
                return await reconcile(leading, committed)
            return table

        patch.setattr(BatchCollection, "out", property(out))
        patch.setattr(StepClose, "reconcile", tries)

    return attack


def victim_of(swarm: SimSwarm, step: int, who: str) -> Callable[[], PeerId]:
    """Return whom to evict in ``step``: its "successor", or a member of a role who neither leads nor succeeds."""

    def victim() -> PeerId:
        assert (at := swarm.peers["bootstrap"].membership) is not None
        leader, successor = owner(at.roster, step, 0), owner(at.roster, step, 1)
        if who == "successor":
            return successor
        others = [member for member in at.roster.members if member.peer not in (leader, successor)]
        return next(PeerId(member.peer) for member in others if member.role == who)

    return victim


def forges_rows(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It has all agree on rows of which it changed the loss, and asks no trainer."""
    reconcile = StepClose.reconcile

    async def forges(leading: StepClose, committed: Any) -> Any:
        if (leading.book.step, leading.term) == (step, 0):
            struck.append("rows")
            committed = tuple(one.model_copy(update={"loss_sum": 0.0}) for one in committed)
        return await reconcile(leading, committed)

    unsigned = AnswerRules.unsigned

    def does_not_ask(rules: AnswerRules, committed: Any, averaged: Any) -> list[PeerId]:
        return [] if (rules._step, rules._term) == (step, 0) else unsigned(rules, committed, averaged)

    patch.setattr(StepClose, "reconcile", forges)
    patch.setattr(AnswerRules, "unsigned", does_not_ask)


def bends_quota(patch: pytest.MonkeyPatch, step: int, struck: list[str]) -> None:
    """It leases all of the batch to one trainer."""
    ledger = StepBook._new_ledger

    def bent(book: StepBook, trainers: Sequence[PeerId]) -> Any:
        if book.step != step or book.led is not None and book.led.number > 0:
            return ledger(book, trainers)
        struck.append("quota")
        with pytest.MonkeyPatch.context() as quota:
            quota.setattr(
                StepRules, "quota", lambda rules, step, trainers, fed=None: _all_to_one(rules.target, trainers)
            )
            return ledger(book, trainers)

    patch.setattr(StepBook, "_new_ledger", bent)


def _all_to_one(target: int, trainers: Sequence[PeerId]) -> dict[PeerId, int]:
    return {peer: target if peer == trainers[0] else 0 for peer in trainers}


class _Idler:
    """A peer that answers that it is there, and nothing else."""

    def __init__(self, me: PeerId) -> None:
        self._me = me

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [STANDING.handled(self._standing)]

    async def _standing(self, caller: PeerId, body: StandingRequest) -> RunStanding:
        return RunStanding(founder=self._me, closed=None, waiting_for="")


async def sybils_join(swarm: SimSwarm, count: int) -> list[PeerId]:
    """Have ``count`` peers that do nothing let in as members, and vanish. Returns who was let in."""
    founder = swarm.peers["bootstrap"].membership
    assert founder is not None
    identities = [PrivateIdentity(hashlib.sha256(f"sybil-{n}".encode()).digest()) for n in range(count)]
    endpoints = [swarm.network.endpoint(one.peer) for one in identities]
    for endpoint in endpoints:
        await endpoint.enter(swarm.manifest.run_id)
        endpoint.mount(_Idler(endpoint.peer))
    at, inside = founder._run.position, set[PeerId]()
    while len(inside) < count:
        step, previous = at.open_step, at.history.head_hash
        leader = owner(at.roster, step, at.term)
        for one, endpoint in zip(identities, endpoints, strict=True):
            member = Member(peer=one.peer, role="bootstrap", name=one.peer, part=None, addresses=())
            signed = one.sign(admission_bytes(swarm.manifest.run_id, step, previous, member))
            with contextlib.suppress(PeerError):
                body = Admission(step=step, member=member, signature=signed)
                await endpoint.call(leader, JOIN, body, timeout_s=5.0)
        await at.wait_open(step + 1)
        inside |= {one.peer for one in identities if one.peer in at.roster}
    for endpoint in endpoints:
        swarm.network.leave(endpoint)
    return sorted(inside)


@contextlib.contextmanager
def lies_about_weights(name: str, swarm: SimSwarm, *, step: int, times: int = 1 << 30) -> Iterator[list[str]]:
    """Have a replica report another digest than its weights have, so many times from ``step`` on."""
    struck: list[str] = []
    prepare = Attempt.prepare

    async def lie(attempt: Attempt, part: Any, mean: Any, body: Apply, clip: float) -> str:
        digest = await prepare(attempt, part, mean, body, clip)
        if body.step < step or len(struck) >= times or attempt.me != swarm.peers[name].endpoint.peer:
            return digest
        struck.append(digest)
        return hashlib.sha256(f"{digest}|{len(struck)}".encode()).hexdigest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempt, "prepare", lie)
        yield struck


@contextlib.contextmanager
def corrupts_sums(name: str, corrupt: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[dict[int, list[str]]]:
    """Have a replica hand in corrupt sums in every step; yields of which parts, by step."""
    honest, corrupted = TrainedPart.contribution, dict[int, list[str]]()

    def contribution(part: TrainedPart, *said: Any) -> torch.Tensor | None:
        sums = honest(part, *said)
        if sums is None or PEER.get() != name:
            return sums
        corrupted[part.step + 1] = [part.spec.name]
        return corrupt(sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainedPart, "contribution", contribution)
        yield corrupted
