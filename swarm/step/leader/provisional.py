"""Lead on without a majority when none is there for long, and settle it when the others are back.

See :mod:`swarm.consensus.branches` for what a provisional record is worth.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from swarm.consensus.acceptor import Vote, has_majority
from swarm.consensus.branches import Fork
from swarm.consensus.changes import OpenStepFacts
from swarm.consensus.records import CloseRecord, Decision, check_confirmed, voters
from swarm.consensus.roster import lost_parts, own_term
from swarm.errors import OutOfSync, PeerError, Refused, Superseded, WrongStep
from swarm.events import LineageConfirmed
from swarm.ids import PeerId
from swarm.step.context import CloseContext
from swarm.step.leader.book import StepBook
from swarm.step.leader.close import StepClose
from swarm.step.member.member_service import MemberService
from swarm.step.member.position import Position
from swarm.step.observe_messages import NEXT, START, NextRequest, StartRequest
from swarm.waiting import ExponentialBackoff, first_done

LOOK_S = 1.0
"""How often those who are back are asked again what became of the step after the fork point."""
ASK_S = 2.0

logger = logging.getLogger(__name__)


class SpeculativeClose(StepClose):
    """Closes a step with those that are there, who are no majority: see :meth:`StepClose.close`."""

    provisional: ClassVar[bool] = True

    def __init__(self, context: CloseContext, book: StepBook, term: int, overdue: str = "") -> None:
        super().__init__(context, book, term, overdue)
        gone = context.liveness.gone
        self._there = tuple(peer for peer in book.roster.entitled if peer not in gone)

    def electors(self) -> tuple[PeerId, ...]:
        """Return those that were there when the term began."""
        return self._there

    async def promises(self) -> Vote | None:
        """Ask for promises. What they have accepted cannot be decided here, and is not touched."""
        await super().promises()
        return None

    def _lineage(self) -> dict[str, Any]:
        return {"lineage": self.book.step}


class Confirming(StepClose):
    """Asks the voters of the fork point to accept a candidate, ours or a better one: as the leader of a later term of
    the step after it. Members of this ``lineage`` that know nothing of the fork give no answer."""

    def __init__(self, context: CloseContext, book: StepBook, term: int, lineage: Collection[PeerId]) -> None:
        super().__init__(context, book, term)
        self._asks.excused = lineage

    async def close(self) -> CloseRecord:
        """See :meth:`StepClose.close`. Raises WrongStep when a majority has decided the step without us."""
        vote = await self.promises()
        if vote is None:
            raise OutOfSync("nobody offers a candidate, not even this peer, which did not answer itself in time")
        await self.decide(self._again(vote))
        return vote.record


def may_go_on_alone(head: CloseRecord, gone: Collection[str], grace_s: float) -> bool:
    """Return whether those that are there may ever go on after ``head`` without a majority. Not within a provisional
    lineage, nor where a part has no replica that is there. Pure."""
    return bool(grace_s) and not head.provisional and not lost_parts(head.members, gone)


class Isolation:
    """Whether no majority of the voters has been there for so long that those who are may go on by themselves."""

    def __init__(self, position: Position, context: CloseContext) -> None:
        self._at, self._context = position, context
        self._since: float | None = None
        self._since_wall = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self._look()
            await self._context.liveness.changed()

    def _look(self) -> None:
        head, gone = self._at.head, self._context.liveness.gone
        if head is None or not self._at.is_member or has_majority(voters(head.members, head.hash()), gone):
            self._since = None
        elif self._since is None:
            self._since, self._since_wall = self._context.clock.monotonic(), self._context.clock.wall()

    def ends_at(self) -> float | None:
        """Return when it is :meth:`over` (seconds since the epoch) if nobody comes back; None: never."""
        self._look()  # anyone who asks may have found out before run() has
        head, grace_s = self._at.head, self._context.rules.quorum_grace_s
        if self._since is None or head is None or not may_go_on_alone(head, self._context.liveness.gone, grace_s):
            return None
        return self._since_wall + grace_s

    def over(self) -> bool:
        """Return whether that is so now: see :func:`may_go_on_alone`."""
        self._look()  # each record has other voters where there are many members
        head, grace_s = self._at.head, self._context.rules.quorum_grace_s
        if self._since is None or head is None:
            return False
        return may_go_on_alone(head, self._context.liveness.gone, grace_s) and self._left_s() <= 0

    def _left_s(self) -> float:
        assert self._since is not None  # noqa: S101 - asked before
        return self._since + self._context.rules.quorum_grace_s - self._context.clock.monotonic()

    async def turned(self) -> None:
        """Return when :meth:`over` changes."""
        before = self.over()
        while self.over() == before:
            changed = self._context.liveness.changed()
            if self._since is None or self._left_s() <= 0 or not self._context.rules.quorum_grace_s:
                await changed
            else:
                await first_done(changed, self._context.clock.sleep(self._left_s() + 0.001))


class Reconnection:
    """What a member of a provisional lineage does when others of the fork point are back."""

    def __init__(self, member: MemberService, context: CloseContext) -> None:
        self._member, self._context = member, context
        self._patience = ExponentialBackoff(0.1)

    async def run(self) -> None:
        """Until cancelled: find out what a majority has decided, and else have our candidate accepted. Raises OSError
        when the disk does not let us give our lineage up."""
        fork: Fork | None = None
        said: Fork | None = None
        while True:
            here = self._member.position.forking.fork
            if here is not None and here.confirmation is None:
                await self._meet(here)
            fork = here or fork  # one that was confirmed may be over before it is looked at again
            if fork is not None and fork is not said and fork.confirmation is not None:
                said = fork
                self._say_confirmed(fork)
            await self._context.clock.sleep(LOOK_S)

    async def _meet(self, fork: Fork) -> None:
        gone = self._context.liveness.gone
        there = [peer for peer in fork.others if peer not in gone]
        if await self._is_decided(fork, there):
            return
        if there and has_majority(fork.voters, gone) and self._is_our_turn(fork):
            await self._confirm(fork, there)

    async def _is_decided(self, fork: Fork, there: Sequence[PeerId]) -> bool:
        """Return whether one of these can prove what a majority has decided: then our lineage is confirmed, or given
        up."""
        for decision in filter(None, await asyncio.gather(*(self._proof(fork, peer) for peer in there))):
            record = decision.record
            if record.hash() == fork.candidate.record.hash():
                fork.decided(record.hash(), decision.term, decision.acceptances)
            else:
                await self._member.rewind("a majority went on without it", record)
            return True
        return False

    async def _proof(self, fork: Fork, peer: PeerId) -> Decision | None:
        """Return what a majority has decided in the step after the fork point, as far as this peer can prove it."""
        body = NextRequest(part=None, step=fork.step)
        try:
            said = await self._context.calls.ask(peer, NEXT, body, timeout_s=ASK_S)
            decision = said.decision()
            fork.history().check(decision.record)
            check_confirmed(decision.record, fork.point.members, decision.acceptances, fork.verify, decision.term)
        except (PeerError, OutOfSync) as error:
            logger.info("%s proves nothing about step %d: %s", peer, fork.step, error)
            return None
        return decision

    def _is_our_turn(self, fork: Fork) -> bool:
        """The first in the succession that was of our lineage from the beginning asks for all of us."""
        ours, gone = set(fork.ours).intersection(self._member.position.roster.peers), self._context.liveness.gone
        order = [peer for peer in fork.point.members.succession(fork.step) if peer in ours and peer not in gone]
        return bool(order) and order[0] == self._context.calls.me

    async def _confirm(self, fork: Fork, there: Sequence[PeerId]) -> None:
        term = own_term(fork.point.members, fork.step, self._context.calls.me, fork.acceptor.term)
        context = dataclasses.replace(self._context, history=fork.history(), waiting=lambda _: None)
        now = OpenStepFacts(fork.step, fork.point.members, fork.point.hash())
        book = StepBook(context.rules, context.verify, now)
        asking = Confirming(context, book, term, frozenset(self._member.position.roster.peers))
        try:
            await first_done(asking.run(), self._context.liveness.changed(), self._confirmed(fork))
        except WrongStep as closed:
            if not await self._is_decided(fork, there) and not await self._is_with_us(PeerId(closed.peer)):
                await self._member.rewind(f"step {fork.step} was decided without it", None)
        except (Superseded, Refused, OutOfSync) as error:
            logger.info("the lineage since step %d is not confirmed yet: %s", fork.step, error)
            await self._context.clock.sleep(self._patience.pause_s())

    async def _confirmed(self, fork: Fork) -> None:
        """Return when another than we has told us so."""
        while fork.confirmation is None:
            await self._context.clock.sleep(LOOK_S)

    async def _is_with_us(self, peer: PeerId) -> bool:
        """Return whether who has closed that step already follows our lineage: one that closed another has left us
        out."""
        try:
            newest = await self._context.calls.ask(peer, START, StartRequest(part=None), timeout_s=ASK_S)
        except PeerError as error:
            logger.info("%s does not say what it follows: %s", peer, error)
            return True  # it is asked again
        return self._context.calls.me in newest.record.members

    def _say_confirmed(self, fork: Fork) -> None:
        if self._is_our_turn(fork):
            self._context.events.emit(LineageConfirmed(step=fork.step, microbatches=fork.closed))
