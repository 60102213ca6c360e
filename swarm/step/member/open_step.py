"""What a member has done for the open step so far, and how it gets its part's mean gradient."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from swarm.averaging.allreduce.plan import RoundResult
from swarm.columns import shared_tokens
from swarm.consensus.acceptor import Vote
from swarm.consensus.ballot import Ballot
from swarm.consensus.ledger import assigned, fed, weights
from swarm.consensus.records import CloseRecord, Contribution, Late, by_trainer
from swarm.consensus.roster import Member, Roster
from swarm.consensus.trials import judged
from swarm.device import Device
from swarm.errors import PeerError, Refused, RoundFailed, Superseded
from swarm.ids import MicrobatchId, PartName, PeerId, StepWork
from swarm.step.lateness import weight
from swarm.step.member.conduct import LeaderConduct
from swarm.step.messages import Apply, Averaged, Reconcile
from swarm.waiting import LATER_S

MAX_HEARD = 1024
"""Members of whose links a member tells."""
SETTLE_ROUNDS = 8
"""How often a sum is made equal to what counts while late gradients still come in."""


class HeldPart(Protocol):
    """The part of the model this peer trains, as closing a step sees it; called on the device thread."""

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """Return what is in an open step's accumulator."""

    def contribution(self, step: int, assigned: Set[StepWork], tokens: int) -> torch.Tensor | None:
        """Return what goes into a step's round for the ``assigned`` work with so many target tokens, flat; None when it
        first has to be settled what is in it."""

    def words(self, step: int, trainers: Sequence[str]) -> tuple[int, ...]:
        """Return what is to be said of these trainers, of whose microbatches an open step's accumulator is the sum;
        nothing where nobody tests them."""

    def dropped(self, step: int) -> tuple[int, int]:
        """Return how many choices of experts found no room, of how many, in an open step's accumulator."""

    def lengths(self, step: int) -> tuple[float, float]:
        """Return the usual length of the gradients in an open step's accumulator, and of those from which they were
        computed; 0 where nobody bounds them. Any thread may ask."""

    def prepare(
        self, mean: torch.Tensor, *, lr: float, clip: float, step: int, fed: bool, left: torch.Tensor | None = None
    ) -> str:
        """Compute what the update makes of the state; its digest. ``fed``: :func:`swarm.consensus.ledger.fed`.
        ``left`` is what averaging did not bring to all of our contribution: it is added to the next one once the step
        is swapped."""

    def swap(self) -> None:
        """Take the prepared step."""

    def give_up(self) -> None:
        """Nothing of the open step counts; the state stays."""


class Settle(Protocol):
    """Makes the accumulator hold exactly what is assigned: the rest is reversed, what is missing replayed."""

    async def __call__(self, step: int, assigned: Mapping[StepWork, tuple[PeerId, ...]]) -> None:
        """``assigned`` is the step's work with its routes. Raises a PeerError saying what it cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One attempt at averaging a part: ``weights`` are the ledger's, by replica in rank order; ``members`` what the
    roster says of each; ``plainly`` and ``within_s``: see :class:`~swarm.step.messages.Reconcile`; ``divide_by``: see
    :class:`~swarm.averaging.allreduce.plan.RoundPlan`."""

    step: int
    part: PartName
    attempt: int
    weights: Mapping[PeerId, int]
    members: Mapping[PeerId, Member]
    plainly: bool = False
    within_s: float | None = None
    divide_by: int = 0


class Average(Protocol):
    """Runs a part's averaging round with its other replicas."""

    async def __call__(self, wanted: Round, sums: torch.Tensor) -> RoundResult:
        """``sums`` is our accumulator, and only read. Raises RoundFailed."""


@dataclass(frozen=True, slots=True)
class Mean:
    """What averaging gave: our part's mean gradient (None without a part, or when it failed), the answer that says so,
    and what is ``left`` of our contribution: :attr:`~swarm.averaging.allreduce.plan.RoundResult.left`. ``proven``: it
    failed because the answer's culprit was proven wrong here. ``fed``: :func:`swarm.consensus.ledger.fed`.
    ``dropped``: see :meth:`HeldPart.dropped`."""

    gradient: torch.Tensor | None
    answer: Averaged
    left: torch.Tensor | None = None
    proven: bool = False
    fed: bool = True
    dropped: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class OpenStep:
    """What this member has done for the open step so far. ``busy`` is held while a question is checked; ``in_round``
    says that the attempt under way holds what it was told to, and averages."""

    ballot: Ballot
    candidate: Vote | None = None
    reconciled: Reconcile | None = None
    averaging: asyncio.Task[Mean] | None = None
    in_round: bool = False
    applied: Apply | None = None
    digest: str | None = None
    closing: asyncio.Task[None] | None = None
    conduct: LeaderConduct = field(default_factory=LeaderConduct)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def accept(self, vote: Vote, me: PeerId) -> None:
        """Accept a record in its term; one that is to be closed without a majority is no vote (see
        ``swarm.consensus.branches``). Raises as :meth:`Ballot.accept`."""
        if vote.record.forks and vote.record.term == vote.term and me not in vote.record.absent:
            await self.ballot.follow(vote.term)
            self.candidate = vote
        else:
            await self.ballot.accept(vote)

    def accepted(self, digest: str) -> Vote:
        """Return what was accepted here under this hash. Raises Refused."""
        for vote in (self.ballot.vote, self.candidate):
            if vote is not None and vote.record.hash() == digest:
                return vote
        raise Refused("this record was not accepted here")

    @property
    def mean(self) -> Mean | None:
        """The result of averaging, once there is one."""
        task = self.averaging
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        result = task.result()
        return None if result.answer.failure else result

    async def begin(
        self, body: Reconcile, part: PartName | None, attempt: Callable[[], Coroutine[None, None, Mean]]
    ) -> None:
        """Start the attempt that ``body`` asks for, unless our part's is the one under way or done. One that still
        fetches what it lacks begins anew where the routes are others: those whom it asks may be gone. What was prepared
        from another mean is forgotten. Raises Superseded for an older attempt, whose question was late. Cancelled, it
        may be asked for again."""
        before = self.reconciled
        if before is not None and any(body.attempts.get(p, 0) < number for p, number in before.attempts.items()):
            raise Superseded("a newer attempt at closing the step has begun")
        if before is None or self.averaging is None or self.averaging.cancelled() or self._anew(before, body, part):
            await self.stop_averaging()
            self.applied = self.digest = None
            self.in_round = False
            self.averaging = asyncio.create_task(attempt())
        self.reconciled = body

    def _anew(self, before: Reconcile, body: Reconcile, part: PartName | None) -> bool:
        if before.committed != body.committed and (part is None or not self.in_round):
            return True  # without a part our cursor may be another
        return part is not None and before.attempts.get(part) != body.attempts.get(part)

    async def wait_mean(self) -> Mean:
        """The running attempt's outcome; it goes on when the caller is cancelled. Raises Superseded when a newer one
        has begun meanwhile."""
        task = self.averaging
        assert task is not None  # noqa: S101 - begin() has made it
        await asyncio.wait([task])
        if task.cancelled():
            raise Superseded("a newer attempt at closing the step has begun")
        return task.result()

    def enter_round(self) -> None:
        """From now on other routes change nothing: all that counts is held."""
        self.in_round = True

    def holds(self, record: CloseRecord, name: PartName | None) -> bool:
        """Return whether what was prepared for our part is what the record says. Of one that begins a provisional
        lineage it must have been proposed to us: else we could not stand for it among the others later."""
        if record.forks and self.candidate is None:
            return False
        if record.founding or record.void or name is None:
            return True
        return self.applied is not None and record.told_of(name) == self.digest

    async def close(self) -> None:
        """Give up what runs; returns when it has ended, and when no vote is being written any more."""
        await self.stop_averaging()
        await self.ballot.close()

    async def stop_averaging(self) -> None:
        """Give up what runs. Returns when it has ended; its inputs are as they were."""
        if self.averaging is not None and not self.averaging.done():
            self.averaging.cancel()
            await asyncio.gather(self.averaging, return_exceptions=True)


Contributed = tuple[torch.Tensor, tuple[int, ...], tuple[int, int]]
"""A replica's sum, what it says of its trainers, and what its experts had no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One member's way from its sum to its part's mean. ``cursor`` says where our shard continues after a step with
    these microbatches; ``left_out`` is told, for a step, of whom its leader makes it without, and why. ``attest`` signs
    our rows where they are what we reported, but for what those did that are absent, and gives b"" where not;
    ``pace_us`` is what records are to say of our pace; ``owed`` is what the record before the open step owes those
    that were late (:mod:`swarm.step.lateness`)."""

    me: PeerId
    device: Device
    settle: Settle
    average: Average
    cursor: Callable[[int, Collection[MicrobatchId]], tuple[int, int] | None]
    left_out: Callable[[int, Mapping[str, str]], None] = lambda step, why: None
    attest: Callable[[int, Sequence[Contribution], Collection[str]], bytes] = lambda step, rows, absent: b""
    pace_us: Callable[[], int] = lambda: 0
    owed: Callable[[], Mapping[str, Late]] = dict

    async def run(
        self,
        body: Reconcile,
        roster: Roster,
        held: tuple[PartName, HeldPart] | None,
        enter: Callable[[], None] = lambda: None,
    ) -> Mean:
        """Make our sum equal to what counts, and average it with those replicas of our part in ``roster`` that are
        there; ``enter`` is called in between. A failure is an answer, with its culprit."""
        self.left_out(body.step, body.left_out)
        cursor = self.cursor(body.step, {one.microbatch for one in body.committed})
        if held is None:
            return Mean(None, Averaged(digest="", sq_norm=0.0, cursor=cursor))
        name, part = held
        expected, step = assigned(body.step, body.committed, self.me, name), body.step
        live = frozenset(body.live)
        group = [peer for peer in roster.replicas(name) if peer in live]
        did = weights(body.committed, roster.replicas(name), name)
        owed = {peer: late for peer, late in self.owed().items() if peer not in body.forfeits}
        shares = {peer: weight(did[peer], owed.get(peer)) for peer in group}
        try:
            tokens, trainers = shares[self.me], judged(body.committed, self.me, name)

            def contribution() -> Contributed | None:
                found = part.contribution(step, expected.keys(), tokens)
                return None if found is None else (found, part.words(step, trainers), part.dropped(step))

            sums, words, dropped = await self._settled(step, expected, contribution)
            lengths = part.lengths(step)
        except PeerError as error:
            there = await self.device.run(part.accumulated, step)
            missing = tuple(sorted({work.microbatch for work in expected.keys() - there}))
            return _failed(f"it does not hold what counts: {error.reason}", culprit=self.me, missing=missing)
        wanted = Round(
            step=body.step,
            part=name,
            attempt=body.attempts.get(name, 0),
            weights=shares,
            members={peer: roster[peer] for peer in group},
            plainly=name in body.plainly,
            within_s=body.within_s,
            divide_by=shared_tokens(name, shares.values()),
        )
        enter()
        try:
            result = await self.average(wanted, sums)
        except RoundFailed as error:
            culprit, told_by = error.peer or None, error.aborted_by or None
            failed = _failed(error.reason, culprit=culprit, aborted_by=told_by, differs=error.differs)
            return replace(failed, proven=error.proven)
        heard: dict[str, tuple[int, int]] = {
            peer: (each.latency_us, each.bytes_per_s) for peer, each in list(result.heard.items())[:MAX_HEARD]
        }
        elements, far = result.tensor.numel(), list(result.left_out.items())[:MAX_HEARD]
        answer = Averaged(
            digest=result.digest,
            sq_norm=result.squared_norm,
            cursor=cursor,
            heard=heard,
            pace_us=self.pace_us(),
            guarded={peer: math.ceil(shares[peer] * size / elements) for peer, size in far},
            waited=dict([(str(peer), s) for peer, s in result.waited.items() if s > LATER_S][:MAX_HEARD]),
            lengths=lengths,
            words=words,
        )
        return Mean(result.tensor, answer, result.left, fed=fed(body.committed, name), dropped=dropped)

    def rows(self, body: Reconcile, roster: Roster) -> bytes:
        """Return our signature under our rows of what a leader says; b"" where there are none, or it says something
        else than we did. With each question: replicas may be lost while the result of a round is kept."""
        own = by_trainer(body.committed).get(self.me)
        return self.attest(body.step, own, body.absent(roster.peers)) if own else b""

    async def prepare(self, part: HeldPart | None, mean: Mean, body: Apply, clip: float) -> str:
        """Compute what the update makes of the state, ``clip`` being our part's factor; its digest, empty without a
        part."""
        gradient = mean.gradient
        if part is None or gradient is None:
            return ""
        return await self.device.run(
            lambda: part.prepare(gradient, lr=body.lr, clip=clip, step=body.step, fed=mean.fed, left=mean.left)
        )

    async def _settled(
        self,
        step: int,
        expected: Mapping[StepWork, tuple[PeerId, ...]],
        contribution: Callable[[], Contributed | None],
    ) -> Contributed:
        """Our sum, and what is said of it, when it holds what is expected and nothing else; a gradient that comes in
        meanwhile is reversed. Raises a PeerError. Cost: one copy of the sum, when it is right."""
        for _ in range(SETTLE_ROUNDS):
            if (found := await self.device.run(contribution)) is not None:
                return found
            await self.settle(step, expected)
        raise Refused(f"its sum still changes after {SETTLE_ROUNDS} times")


def _failed(reason: str, **more: Any) -> Mean:
    answer = Averaged(digest="", sq_norm=0.0, cursor=None, failure=reason[:400] or "it failed", **more)
    return Mean(None, answer)
