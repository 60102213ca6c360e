"""Complete a step's batch with the trainers that are there, as its leader: see :meth:`BatchCollection.run`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from swarm.consensus.acceptor import has_majority
from swarm.consensus.majority import majority
from swarm.consensus.records import Contribution
from swarm.consensus.roster import lost_parts, needed, part_lost
from swarm.errors import DeadlineMissed, PeerError, Unreachable
from swarm.events import WorkWithdrawn
from swarm.ids import PeerId
from swarm.step.blocked import awaited_answer, awaited_holders, awaited_majority, awaited_numbers, awaited_others
from swarm.step.calls import LiveCalls
from swarm.step.context import CloseContext
from swarm.step.leader.asking import RETURNED_S
from swarm.step.leader.book import StepBook
from swarm.step.leader.exclusion import LOOK_S, STALLED_S, BatchStall, ExclusionPolicy
from swarm.step.messages import AGAIN, OVER, PREPARE, Feed, Over, Prepare
from swarm.waiting import ExponentialBackoff, first_done

logger = logging.getLogger(__name__)

OVER_TRIES, OVER_TIMEOUT_S = 6, 2.0
LOST_PART_S = 10.0
"""How long a part that nobody holds is waited for: who stalled may come back, who died does not."""

Electors = Callable[[], tuple[PeerId, ...]]


class BatchCollection:
    """The batch of one term of a step. ``policy`` says whom its leader leaves out, ``electors`` who decides."""

    def __init__(
        self, context: CloseContext, book: StepBook, term: int, policy: ExclusionPolicy, electors: Electors
    ) -> None:
        self._context, self._book, self._term, self._policy = context, book, term, policy
        self._electors, self._roster = electors, book.roster
        self.calls = LiveCalls(context.calls, context.liveness)
        self._untold: set[PeerId] = set()
        self._fruitless, self._brought = False, (0, 0)

    def electors(self) -> tuple[PeerId, ...]:
        """Return who decides the step."""
        return self._electors()

    @property
    def out(self) -> dict[PeerId, str]:
        """Return who does not close this step, and why."""
        return self._policy.out(self._context.liveness.gone)

    def quota_again(self) -> None:
        """Every trainer must hear that there is quota again."""
        self._untold |= set(self._roster.trainers)

    async def run(self) -> tuple[Contribution, ...] | None:
        """Return the committed microbatches, when the batch is complete with the trainers that are there; None when a
        part, or with hosted ends every trainer, stays lost: nothing of the step can be finished. Raises Superseded when
        another leads, WrongStep when the step is closed, RunEnded when all that hold a part say no. Cancel freely."""
        stall = BatchStall(self._context.clock.monotonic())
        while True:
            await self._wait_majority()
            there = await self._wait_parts()
            if there == "lost":
                return None
            if there == "held":
                self._policy.parts_are_held(self.out.keys())
                if (committed := await self._filled(stall)) is not None:
                    return committed

    async def _filled(self, stall: BatchStall) -> tuple[Contribution, ...] | None:
        """The batch, once it is complete; None when who is there has changed, those left out that stalled among it, or
        others must hear that there is quota again."""
        book, out = self._book, self.out
        if self._fruitless:
            self._say_fruitless()  # others may have said something else
        self._count_trainers(out)
        full = asyncio.ensure_future(book.wait_full())
        changed = asyncio.ensure_future(self._context.liveness.changed())
        stalled = asyncio.ensure_future(self._stalled(stall))
        given_back = asyncio.ensure_future(book.wait_given_back())
        telling = asyncio.ensure_future(self._tell_to_feed())
        try:
            await _first_of({full, changed, stalled, given_back}, telling)
            committed = full.result() if full.done() else None
            if committed is None and stalled.done():
                self._policy.holds_up(stalled.result())
            if given_back.done():
                self.quota_again()
        finally:
            for task in (full, changed, stalled, given_back, telling):
                task.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        if committed is not None:
            self._tell_fruitless(0.0)
        # One that is found gone is so at once; those who wait for changes are told some turns later. Between this
        # and the question that names who is there nothing else runs.
        return committed if self.out.keys() == out.keys() else None

    async def _wait_majority(self) -> None:
        """A minority cannot decide anything: it does not judge either who is lost. Raises as :meth:`run`."""
        electors, said = self._electors(), ""
        enough = majority(len(electors))
        while (there := await self._there(electors)) < enough:
            few = awaited_majority(there, len(electors), enough, self._context.alone_at())
            if few != said:
                self._context.waiting(few)
            said = few
            await first_done(self._context.clock.sleep(RETURNED_S), self._context.liveness.changed())
        if said:
            self._context.waiting("")

    async def can_decide(self) -> bool:
        """Return whether a majority is there, those that are back with their votes alone counted."""
        electors = self._electors()
        return await self._there(electors) >= majority(len(electors))

    async def _there(self, electors: Sequence[PeerId]) -> int:
        """Return how many of the voters can vote; those that are gone are asked only where the others are no
        majority."""
        gone = self._context.liveness.gone
        if has_majority(electors, gone):
            return len(electors) - sum(peer in gone for peer in electors)
        lost = [peer for peer in electors if peer in gone]
        return len(electors) - len(lost) + sum(await asyncio.gather(*map(self._votes, lost)))

    async def _votes(self, peer: PeerId) -> bool:
        """Return whether it was started anew and follows our term: it has its vote, and nothing else. Who answers and
        has more is not gone, as the health watch finds out by itself."""
        body = Prepare(step=self._book.step, term=self._term)
        try:
            promise = await self._context.calls.ask(peer, PREPARE, body, timeout_s=RETURNED_S)
        except PeerError as error:
            if self._book.ends_term(error, self._context.calls.me):
                raise
            logger.info("step %d, %s is gone, and does not vote: %s", self._book.step, peer, error)
            return False
        return promise.votes_only

    async def _wait_parts(self) -> Literal["held", "lost", "no majority"]:
        """Wait until every part is held by a replica that is there. A part that has none for LOST_PART_S is lost; who
        sees no majority meanwhile does not judge that."""
        clock, liveness, said = self._context.clock, self._context.liveness, False
        until = clock.monotonic() + LOST_PART_S
        while lost := lost_parts(self._roster, self.out):
            # Who has lost sight of a whole part may have lost sight of nearly everybody, and not know it yet.
            await liveness.check(self._electors(), f"all of {lost[0]} are lost, as it seems")
            if not await self.can_decide():
                return "no majority"
            left = until - clock.monotonic()
            if left <= 0:
                return "lost"
            said = True
            self._context.waiting(self._awaited(lost))
            await first_done(clock.sleep(left), liveness.changed())
        if said:
            self._context.waiting("")
        return "held"

    def _awaited(self, lost: Sequence[str]) -> str:
        there = needed(self._roster, lost) - set(self._context.liveness.gone)
        late, differing = self._policy.forgivable(there), self._policy.differing(there)
        gone = {peer: why for peer, why in self.out.items() if peer not in late and peer not in differing}
        said = [awaited_answer(self._roster, late), awaited_others(self._roster, differing)]
        holders = awaited_holders(self._roster, gone, self._context.copies, how=self._context.rules.how_to_join)
        return "; ".join(filter(None, (*said, holders)))

    async def end(self, part: str, lost: Callable[[], Mapping[PeerId, str]], why: str = "") -> None:
        """Raises RunEnded where all replicas of a part are ``lost`` (see :func:`~swarm.consensus.roster.lost_parts`),
        once the others were told. It stands once one of them may have ended; before that a replica that comes back
        prevents it, and this returns."""
        error = part_lost(self._roster, part, lost(), why)
        if error is not None and (await self._tell_over(part) or part_lost(self._roster, part, lost()) is not None):
            raise error

    async def _tell_over(self, part: str) -> bool:
        """The others need not find out one after the other. Who believes that a replica is there is asked some more
        times, and then left alone. Returns whether anybody may have ended. Never raises a PeerError."""
        anybody, body = False, Over(step=self._book.step, term=self._term, part=part)
        others = [peer for peer in self._roster.peers if peer not in self.out and peer != self._context.calls.me]
        patience = ExponentialBackoff(0.5)
        for _ in range(OVER_TRIES):
            said = await asyncio.gather(*(self._objection(peer, body) for peer in others))
            anybody = anybody or any(one is None or isinstance(one, (Unreachable, DeadlineMissed)) for one in said)
            others = [peer for peer, no in zip(others, said, strict=True) if no is not None]
            if not others:
                break
            await self._context.clock.sleep(patience.pause_s())
        return anybody

    async def _objection(self, peer: PeerId, body: Over) -> PeerError | None:
        try:
            await self.calls.ask(peer, OVER, body, timeout_s=OVER_TIMEOUT_S)
        except PeerError as error:
            logger.info("step %d, %s does not see that %s is lost: %s", self._book.step, peer, body.part, error)
            return error
        return None

    def _count_trainers(self, out: Mapping[PeerId, str]) -> None:
        """Take back what trainers had leased that are gone or have no way, and early work that nobody can add any more;
        the others must hear that there is quota again."""
        if self._book.void_early(out):
            self.quota_again()
        if self._book.count_on(out):
            feeding = self._roster.feeding(out)
            lost = tuple(peer for peer in self._roster.trainers if peer not in feeding)
            self._context.events.emit(WorkWithdrawn(step=self._book.step, trainers=lost))
            self.quota_again()

    async def _stalled(self, stall: BatchStall) -> dict[PeerId, str]:
        """Once there are trainers that hold the batch up, they and why: they are there and get nothing done, which the
        others can do instead."""
        book, clock = self._book, self._context.clock
        while not (late := stall.look(clock.monotonic(), book.done, book.waits_for())):
            self._tell_fruitless(stall.still_s(clock.monotonic()))
            await clock.sleep(LOOK_S)
        logger.warning("step %d is closed without %s: nothing comes of it", self._book.step, ", ".join(late))
        return late

    def _tell_fruitless(self, still_s: float) -> None:
        """Where all that came for long was put aside, no peer is at fault: a person must know of it."""
        aside, done = self._book.aside(), self._book.done
        if done != self._brought[0]:
            self._brought = done, len(aside)
        fruitless = len(aside) > self._brought[1] and still_s >= STALLED_S
        if fruitless != self._fruitless:
            self._fruitless = fruitless
            self._say_fruitless()

    def _say_fruitless(self) -> None:
        aside = self._book.aside()
        self._context.waiting(awaited_numbers(len(aside), aside[-1].reason) if self._fruitless and aside else "")

    async def _tell_to_feed(self) -> None:
        """Until all that are there have heard it: who has not would wait for ever, and the step with it. Raises
        Superseded and WrongStep."""
        patience = ExponentialBackoff(0.1)
        while untold := sorted(self._untold - self.out.keys()):
            told = await asyncio.gather(*(self._told(peer) for peer in untold))
            self._untold -= {peer for peer, heard in zip(untold, told, strict=True) if heard}
            if not all(told):
                await self._context.clock.sleep(patience.pause_s())

    async def _told(self, peer: PeerId) -> bool:
        """Return whether this trainer follows our term, and has heard."""
        timeout_s, prepare = self._context.timeout_s(), Prepare(step=self._book.step, term=self._term)
        try:
            await self.calls.ask(peer, PREPARE, prepare, timeout_s=timeout_s)
            faults = tuple(fault for fault, found in self._book.faults.values() if fault.accused in found)
            feed = Feed(step=self._book.step, term=self._term, faults=faults)
            await self.calls.ask(peer, AGAIN, feed, timeout_s=timeout_s)
        except PeerError as error:
            if self._book.ends_term(error, self._context.calls.me):
                raise
            logger.info("step %d, %s does not hear that there is quota again: %s", self._book.step, peer, error)
            return False
        return True


async def _first_of(tasks: set[asyncio.Future[Any]], aside: asyncio.Future[None]) -> None:
    """Return when one of ``tasks`` is done. What ``aside`` raises meanwhile is raised."""
    waiting: set[asyncio.Future[Any]] = {*tasks, aside}
    while not any(task.done() for task in tasks):
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if aside in done:
            aside.result()
            waiting.discard(aside)
