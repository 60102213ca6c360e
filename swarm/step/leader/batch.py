"""How a leader gets its step's batch complete, with the trainers that are there: see :meth:`BatchCollection.run`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from swarm.consensus.acceptor import has_majority, majority
from swarm.consensus.records import Contribution
from swarm.consensus.roster import Roster, lost_parts, needed, part_lost, unserved
from swarm.errors import PeerError, Superseded, WrongStep
from swarm.events import WorkWithdrawn
from swarm.ids import PartName, PeerId
from swarm.step.blocked import awaited_answer, awaited_holders, awaited_majority, awaited_numbers, awaited_others
from swarm.step.calls import LiveCalls
from swarm.step.context import CloseContext
from swarm.step.leader.exclusion import LOOK_S, STALLED_S, BatchStall, ExclusionPolicy
from swarm.step.messages import AGAIN, OVER, PREPARE, Feed, Over, Prepare
from swarm.step.turnout import MAX_TOLD, REASON_CHARS
from swarm.waiting import ExponentialBackoff, first_done

logger = logging.getLogger(__name__)

OVER_TRIES, OVER_TIMEOUT_S = 6, 2.0
RETURNED_S = 2.0
"""How long a member that is gone may take to say that it has kept its vote, and how often it is asked."""
LOST_PART_S = 10.0
"""How long a part that nobody holds is waited for: who stalled may come back, who died does not."""
ALONE_S = 300.0
"""For so long a replica that differs from what most held decides nothing alone: others may come back."""

Electors = Callable[[], tuple[PeerId, ...]]


class PartsLost(Exception):
    """Parts of the model have no replica that is there, and nobody came back: nothing of the step can be finished."""


class BatchCollection:
    """The batch of one term of a step. ``fitness`` says whom its leader leaves out."""

    def __init__(
        self, closing: CloseContext, step: int, term: int, fitness: ExclusionPolicy, electors: Electors
    ) -> None:
        self._closing, self._step, self._term, self._fitness = closing, step, term, fitness
        self._electors = electors
        self._roster: Roster = closing.history.head.members
        self.calls = LiveCalls(closing.calls, closing.liveness)
        self._untold: set[PeerId] = set()
        self._lost_since: dict[str, float] = {}
        self._fruitless, self._brought = False, (0, 0)

    @property
    def out(self) -> dict[PeerId, str]:
        """Who does not close this step, and why."""
        out = {**self.lost, **self._fitness.unfit}
        return out | unserved(self._roster, out) if self._closing.rules.served else out

    @property
    def lost(self) -> dict[PeerId, str]:
        """Who counts as lost, and why: those that are gone, and all replicas of a part that are tied."""
        return {**self._closing.liveness.gone, **self._fitness.tied}

    def tie(self, peers: Iterable[PeerId], why: str) -> None:
        """These are there, and count as lost from now on."""
        self._fitness.tied |= dict.fromkeys(peers, why)

    def untie(self, part: PartName) -> bool:
        """Ask the replicas of a part again that were tied, for nobody can take it over; whether there were any."""
        tied = [peer for peer in self._roster.replicas(part) if self._fitness.tied.pop(peer, None) is not None]
        return bool(tied)

    @property
    def left_out(self) -> dict[str, str]:
        """Those of them that take part in the step, as far as others are told."""
        told = [(peer, why) for peer, why in sorted(self.out.items()) if peer in self._roster]
        return {peer: why[:REASON_CHARS] for peer, why in told[:MAX_TOLD]}

    def forgive_needed(self) -> None:
        """Have those asked again that were left out and without whom a part is lost, or nobody feeds: what kept them
        from answering may have passed. One that differs is, too, when ALONE_S have gone by and no other is back: its
        numbers count as those of any replica do that is the only one."""
        now, lost = self._closing.clock.monotonic(), lost_parts(self._roster, self.out)
        self._lost_since = {part: self._lost_since.get(part, now) for part in lost}
        long_ago = [part for part, since in self._lost_since.items() if now - since >= ALONE_S]
        self._fitness.trust(needed(self._roster, long_ago) - set(self._closing.liveness.gone))
        self._fitness.forgive(needed(self._roster, lost))

    def is_last(self, peer: PeerId) -> bool:
        """Whether a part would be lost without this member, or, with hosted ends, nobody would feed."""
        return peer in needed(self._roster, lost_parts(self._roster, {*self.out, peer}))

    def quota_again(self) -> None:
        """Every trainer must hear that there is quota again."""
        self._untold |= set(self._roster.trainers)

    async def run(self) -> tuple[Contribution, ...]:
        """The committed microbatches, when the batch is complete with the trainers that are there. Raises Superseded
        when another leads, WrongStep when the step is closed, PartsLost when a part, or with hosted ends every trainer,
        stays lost, RunEnded when all that hold a part say no. Cancel freely."""
        stall = BatchStall(self._closing.clock.monotonic())
        while True:
            await self._wait_majority()
            if not await self._wait_parts():
                continue
            self._lost_since = {part: since for part, since in self._lost_since.items() if not self._held(part)}
            if (committed := await self._filled(stall)) is not None:
                return committed

    def _held(self, part: str) -> bool:
        """Whether one of its replicas is there that was not left out before in this term."""
        there = needed(self._roster, [part]) - self.out.keys()
        return not all(self._fitness.on_trial(peer) for peer in there)

    async def _filled(self, stall: BatchStall) -> tuple[Contribution, ...] | None:
        """The batch, once it is complete; None when who is there has changed, those left out that stalled among it, or
        others must hear that there is quota again."""
        desk, out = self._closing.desk.book, self.out
        if self._fruitless:
            self._say_fruitless()  # others may have said something else
        self._count_trainers(out)
        full = asyncio.ensure_future(desk.wait_full())
        changed = asyncio.ensure_future(self._closing.liveness.changed())
        stalled = asyncio.ensure_future(self._stalled(stall))
        given_back = asyncio.ensure_future(desk.wait_given_back())
        telling = asyncio.ensure_future(self._tell_to_feed())
        try:
            await _first_of({full, changed, stalled, given_back}, telling)
            committed = full.result() if full.done() else None
            if committed is None and stalled.done():
                self._fitness.holds_up(stalled.result())
            if given_back.done():
                self.quota_again()
        finally:
            for task in (full, changed, stalled, given_back, telling):
                task.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        if committed is not None:
            self._tell_fruitless(0.0)
        # Whoever is found gone is so at once; those who wait for changes are told some turns later. Between this
        # and the question that names who is there nothing else runs.
        return committed if self.out.keys() == out.keys() else None

    async def _wait_majority(self) -> None:
        """A minority cannot decide anything: it does not judge either who is lost. Raises as :meth:`run`."""
        electors, said = self._electors(), ""
        enough = majority(len(electors))
        while (there := await self._there(electors)) < enough:
            few = awaited_majority(there, len(electors), enough, self._closing.alone_at())
            if few != said:
                self._closing.waiting(few)
            said = few
            await first_done(self._closing.clock.sleep(RETURNED_S), self._closing.liveness.changed())
        if said:
            self._closing.waiting("")

    async def can_decide(self) -> bool:
        """Whether a majority is there, those that are back with their votes alone counted."""
        electors = self._electors()
        return await self._there(electors) >= majority(len(electors))

    async def _there(self, electors: Sequence[PeerId]) -> int:
        """How many of the voters can vote; those that are gone are asked only where the others are no majority."""
        gone = self._closing.liveness.gone
        if has_majority(electors, gone):
            return len(electors) - sum(peer in gone for peer in electors)
        lost = [peer for peer in electors if peer in gone]
        return len(electors) - len(lost) + await self._returned(lost)

    async def _returned(self, gone: Sequence[PeerId]) -> int:
        """How many of these were started anew and follow our term: they have their vote, and nothing else. Who answers
        and has more is not gone, as the health watch finds out by itself."""
        return sum(await asyncio.gather(*map(self._votes, gone)))

    async def _votes(self, peer: PeerId) -> bool:
        body = Prepare(step=self._step, term=self._term)
        try:
            promise = await self._closing.calls.ask(peer, PREPARE, body, timeout_s=RETURNED_S)
        except (Superseded, WrongStep):
            raise
        except PeerError as error:
            logger.info("step %d, %s is gone, and does not vote: %s", self._step, peer, error)
            return False
        return promise.votes_only

    async def _wait_parts(self) -> bool:
        """Until every part has a replica that is there: then True; False when no majority is left meanwhile. Raises
        PartsLost when one has none for LOST_PART_S."""
        clock, liveness, said = self._closing.clock, self._closing.liveness, False
        until = clock.monotonic() + LOST_PART_S
        while lost := lost_parts(self._roster, self.out):
            await self._end_if_hopeless()
            # Who has lost sight of a whole part may have lost sight of nearly everybody, and not know it yet.
            await liveness.check(self._electors(), f"all of {lost[0]} are lost, as it seems")
            if not await self.can_decide():
                return False
            left = until - clock.monotonic()
            if left <= 0:
                raise PartsLost(", ".join(lost))
            said = True
            self._closing.waiting(self._awaited(lost))
            await first_done(clock.sleep(left), liveness.changed())
        if said:
            self._closing.waiting("")
        return True

    def _awaited(self, lost: Sequence[str]) -> str:
        there = needed(self._roster, lost) - set(self._closing.liveness.gone)
        late, differing = self._fitness.forgivable(there), self._fitness.differing(there)
        gone = {peer: why for peer, why in self.out.items() if peer not in late and peer not in differing}
        said = [awaited_answer(self._roster, late), awaited_others(self._roster, differing)]
        holders = awaited_holders(self._roster, gone, self._closing.copies, how=self._closing.rules.how_to_join)
        return "; ".join(filter(None, (*said, holders)))

    async def _end_if_hopeless(self) -> None:
        """Raises RunEnded when no replica of a part will ever close the step, as they said. Who is only late is asked
        again."""
        for part in self._roster.parts:
            if self._fitness.hopeless(self._roster.replicas(part)):
                await self.tell_over(part)
                error = part_lost(self._roster, part, self.out)
                assert error is not None  # noqa: S101 - that is what was found
                raise error

    async def tell_over(self, part: PartName) -> None:
        """The others need not find out one after the other. Who believes that a replica is there is asked some more
        times, and then left alone. Never raises a PeerError."""
        body = Over(step=self._step, term=self._term, part=str(part))
        others = [peer for peer in self._roster.peers if peer not in self.out and peer != self._closing.calls.me]
        patience = ExponentialBackoff(0.5)
        for _ in range(OVER_TRIES):
            told = await asyncio.gather(*(self._agrees(peer, body) for peer in others))
            others = [peer for peer, agrees in zip(others, told, strict=True) if not agrees]
            if not others:
                return
            await self._closing.clock.sleep(patience.pause_s())

    async def _agrees(self, peer: PeerId, body: Over) -> bool:
        try:
            await self.calls.ask(peer, OVER, body, timeout_s=OVER_TIMEOUT_S)
        except PeerError as error:
            logger.info("step %d, %s does not see that %s is lost: %s", self._step, peer, body.part, error)
            return False
        return True

    def _count_trainers(self, out: Mapping[PeerId, str]) -> None:
        """Take back what gone trainers had leased; the others must hear that there is quota again."""
        if self._closing.desk.book.count_on(out):
            lost = tuple(peer for peer in self._roster.trainers if peer in out)
            self._closing.events.emit(WorkWithdrawn(step=self._step, trainers=lost))
            self.quota_again()

    async def _stalled(self, stall: BatchStall) -> dict[PeerId, str]:
        """Once there are trainers that hold the batch up, they and why: they are there and get nothing done, which the
        others can do instead."""
        desk, clock = self._closing.desk.book, self._closing.clock
        while not (late := stall.look(clock.monotonic(), desk.done, desk.waits_for())):
            self._tell_fruitless(stall.still_s(clock.monotonic()))
            await clock.sleep(LOOK_S)
        logger.warning("step %d is closed without %s: nothing comes of it", self._step, ", ".join(late))
        return late

    def _tell_fruitless(self, still_s: float) -> None:
        """Where all that came for long was put aside, no peer is at fault: a person must know of it."""
        aside, done = self._closing.desk.book.aside(), self._closing.desk.book.done
        if done != self._brought[0]:
            self._brought = done, len(aside)
        fruitless = len(aside) > self._brought[1] and still_s >= STALLED_S
        if fruitless != self._fruitless:
            self._fruitless = fruitless
            self._say_fruitless()

    def _say_fruitless(self) -> None:
        aside = self._closing.desk.book.aside()
        self._closing.waiting(awaited_numbers(len(aside), aside[-1].reason) if self._fruitless and aside else "")

    async def _tell_to_feed(self) -> None:
        """Until all that are there have heard it: who has not would wait for ever, and the step with it. Raises
        Superseded and WrongStep."""
        patience = ExponentialBackoff(0.1)
        while untold := sorted(self._untold - self.out.keys()):
            told = await asyncio.gather(*(self._told(peer) for peer in untold))
            self._untold -= {peer for peer, heard in zip(untold, told, strict=True) if heard}
            if not all(told):
                await self._closing.clock.sleep(patience.pause_s())

    async def _told(self, peer: PeerId) -> bool:
        """Whether this trainer follows our term, and has heard."""
        timeout_s, prepare = self._closing.timeout_s(), Prepare(step=self._step, term=self._term)
        try:
            await self.calls.ask(peer, PREPARE, prepare, timeout_s=timeout_s)
            feed = Feed(step=self._step, term=self._term)
            await self.calls.ask(peer, AGAIN, feed, timeout_s=timeout_s)
        except (Superseded, WrongStep):
            raise
        except PeerError as error:
            logger.info("step %d, %s does not hear that there is quota again: %s", self._step, peer, error)
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
