"""One member's side of one round: trade every chunk, add up what comes here, agree on the whole. The others are asked
until they have answered, or the round's time is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from swarm.averaging.allreduce.check import RoundCheck, commitment_bytes
from swarm.averaging.allreduce.guard import far_out
from swarm.averaging.allreduce.inbox import Inbox
from swarm.averaging.allreduce.messages import AGREE, CHUNK, ENTER, STAY, Agreement, ReduceRequest, RoundMessage
from swarm.averaging.allreduce.output import Floats, Leftover, ReducedVector
from swarm.averaging.allreduce.partition import ReduceChunk
from swarm.averaging.allreduce.plan import RoundPlan
from swarm.averaging.allreduce.questions import Means, RoundQuestions
from swarm.errors import RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload

INLINE_ELEMENTS = 1 << 13
"""Up to this many elements (some 50 µs of work) a thread hop would cost more than it hides."""

T = TypeVar("T")


class Exchange:
    """Carries a round out at this member. ``local`` is its vector of sums, (elements,) in the plan's dtype, or None.

    Each part has a tree (:mod:`swarm.averaging.schedules`). A member adds the sums of those below it to its own and
    asks the one above with it; the answer to a sum of a chunk *is* that chunk's result, which it passes on to those
    below. So reduce-scatter and all-gather are one call per chunk and pair, results wait in the output vector until
    asked for, and back-pressure needs nothing else: anyone who has a window of unanswered chunks of a part at a member
    sends no more of it. Windows are a part's own, and all its members go through it in the same order, so its lowest
    unanswered chunk is always within everybody's window and the round cannot lock up.
    """

    def __init__(self, means: Means, inbox: Inbox, local: Floats | None) -> None:
        self._means, self._inbox, self._local = means, inbox, local
        self._plan: RoundPlan = inbox.plan
        self._me = inbox.me
        self._others = self._plan.called_by(self._me)
        self._questions = RoundQuestions(means, inbox)
        self._entered: dict[PeerId, asyncio.Task[memoryview]] = {}
        self._ends: list[asyncio.Task[None]] = []
        self.formed_s = 0.0
        self.output = ReducedVector(self._plan)
        sends = self._plan.weights[self._me] > 0
        self.left = Leftover(self._plan, local, sends=sends) if self._plan.feeds_back else None
        self.left_out: Counter[PeerId] = Counter()
        checked = self._plan.checked > 0
        self._check = RoundCheck(means, inbox, self._questions, local if sends else None) if checked else None

    @property
    def bytes_sent(self) -> int:
        """Payload bytes put on the wire so far: sums sent (repetitions included) and results answered."""
        return self._questions.bytes_asked + self._inbox.bytes_answered

    async def complete(self) -> str:
        """Do it all; returns the result's digest, which all members of a signed round then hold. In another round the
        others have got from us what they need for theirs.

        Raises an exception group with a RoundFailed at the deadline, at the first member that fails, or at another
        member's Abort. When cancelled, all its tasks have ended before CancelledError leaves.
        """
        async with asyncio.TaskGroup() as guards:
            self._ends = [guards.create_task(self._questions.expire()), guards.create_task(self._inbox.wait_failure())]
            if self._check is not None:
                await self._check.commit()
            await self._trade(guards)
            digest = self.output.digest()
            await (self._agree(digest) if self._plan.signed else self._inbox.wait_given())
            if self._check is not None:
                await self._check.run(self.output)
            for guard in self._ends:
                guard.cancel()
        return digest

    def release(self) -> None:
        """Let go of the vectors once it has failed. A failure's traceback leads here, and task groups of Python 3.11
        keep theirs in a cycle, so that otherwise they would stay until the collector comes by."""
        self._local = self.left = None
        self.output.release()

    async def _trade(self, guards: asyncio.TaskGroup) -> None:
        """Until we hold every chunk's result. Asking everybody first whether it is in spares the bytes it would refuse,
        and finds a dead observer before the work is done."""
        question = RoundMessage.of(self._plan)
        async with asyncio.TaskGroup() as tasks:
            for peer in self._others:
                self._entered[peer] = tasks.create_task(self._enter(peer, question))
            if self._others:
                self._ends.append(guards.create_task(self._stay_with(self._next())))
            for root in self._plan.routes.roots:
                tasks.create_task(self._trade_part(root))
        self._inbox.traded()

    async def _enter(self, peer: PeerId, question: RoundMessage) -> memoryview:
        most = 0 if self._check is None else commitment_bytes(self._plan)
        answer = await self._questions.ask(peer, ENTER, question, max_reply_bytes=most)
        if self._check is not None:
            self._check.take(peer, answer)
        now = self._means.clock.monotonic()
        self._inbox.said_in(peer, now)
        self.formed_s = now - self._questions.began  # the last one's stays
        return answer

    def _next(self) -> PeerId:
        members = self._plan.members
        place = members.index(self._me)
        return next(peer for peer in (*members[place:], *members[:place]) if peer in self._others)

    async def _stay_with(self, peer: PeerId) -> None:
        """Have a call open to a member until it has its result: who only sends sums may have no other, and its death
        would show at the deadline."""
        await self._entered[peer]
        await self._questions.ask(peer, STAY, RoundMessage.of(self._plan))

    async def _trade_part(self, root: PeerId) -> None:
        """Trade all chunks of one part, in lanes: each takes the next chunk that no other took, until there is none. At
        the root, which waits for all others, one is enough."""
        place = self._inbox.place
        for peer in place.asks(root):
            await self._entered[peer]
        mine = self._plan.chunks_of(root)
        work = self._pass_on if place.parent(root) else self._swap if place.levels else self._finish
        chunks = iter(mine)
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(self._plan.window if place.asks(root) else 1, len(mine))):
                lanes.create_task(self._lane(chunks, work))

    async def _lane(self, chunks: Iterator[ReduceChunk], work: Callable[[ReduceChunk], Awaitable[memoryview]]) -> None:
        for chunk in chunks:
            self._inbox.publish(chunk, await work(chunk))

    async def _pass_on(self, chunk: ReduceChunk) -> memoryview:
        """Ask the member above with the sum of our own and of all below us: the chunk's result."""
        root, place = self._plan.reducer(chunk), self._inbox.place
        parent, sums = place.parent(root), await self._sums(chunk)
        assert parent is not None  # noqa: S101 - else it would be reduced here
        payload: Payload = sums.get(self._me, b"")
        if sums.keys() - {self._me}:
            payload = await self._off_loop(chunk, self._added, chunk, sums)
        question = ReduceRequest.of(self._plan, index=chunk.index, weight=place.weight(root, 0))
        encoded = await self._questions.ask(parent, CHUNK, question, payload, self.output.bytes_of(chunk))
        return await self._off_loop(chunk, self.output.store, chunk, encoded, parent)

    async def _finish(self, chunk: ReduceChunk) -> memoryview:
        """Add up all sums: the chunk's result."""
        if self._check is not None:  # what they committed to is known
            await asyncio.gather(*self._entered.values())
        return await self._off_loop(chunk, self._reduce, chunk, await self._sums(chunk))

    async def _swap(self, chunk: ReduceChunk) -> memoryview:
        """Trade with one member after the other, each of whom adds up the same: the chunk's result."""
        place, root = self._inbox.place, self._plan.reducer(chunk)
        sums = await self._sums(chunk)
        async with asyncio.TaskGroup() as asked:
            for level, partner in enumerate(place.asks(root), start=1):
                own = await self._off_loop(chunk, self._added, chunk, sums)
                question = ReduceRequest.of(
                    self._plan, index=chunk.index, weight=place.weight(root, level), level=level
                )
                asked.create_task(self._questions.ask(partner, CHUNK, question, own))
                sums = await self._inbox.wait_sums(chunk, level)
                if own:
                    sums[self._me] = own
        return await self._off_loop(chunk, self._reduce, chunk, sums)

    async def _sums(self, chunk: ReduceChunk) -> dict[PeerId, Payload]:
        """Those of a chunk that come here, our own with them."""
        sums = await self._inbox.wait_sums(chunk)
        if self._plan.weights[self._me]:
            sums[self._me] = await self._encoded(chunk)
        return sums

    async def _encoded(self, chunk: ReduceChunk) -> Payload:
        """Our sum of a chunk as any reducer gets it, we ourselves too: no matter who reduces, the bits are the same."""
        if not self._plan.weights[self._me] or self._local is None:
            return b""
        values, codec = self._local[chunk.start : chunk.stop], self._plan.sums
        return codec.encode(values, chunk) if codec.exact else await self._off_loop(chunk, self._rounded, values, chunk)

    def _rounded(self, values: Floats, chunk: ReduceChunk) -> Payload:
        encoded = self._plan.sums.encode(values, chunk)
        if self.left is not None:
            self.left.sent(chunk, values, self._decoded(self._me, chunk, encoded))
        return encoded

    def _reduce(self, chunk: ReduceChunk, sums: Mapping[PeerId, Payload]) -> memoryview:
        if self._check is not None:
            self._check.look_at(chunk, sums)
        decoded, divisor = self._decoded_all(chunk, sums), self._plan.divisor
        if self._plan.guarded:
            for peer in far_out(decoded, self._plan.weights):
                del decoded[peer]
                divisor -= self._plan.weights[peer]
                self.left_out[peer] += chunk.elements
        result = self._means.reducer(decoded, list(decoded), divisor, self._plan.result_dtype)
        encoded = self.output.settle(chunk, result)
        if self.left is not None:
            self.left.settled(chunk, result, self.output.vector[chunk.start : chunk.stop])
        return encoded

    def _added(self, chunk: ReduceChunk, sums: Mapping[PeerId, Payload]) -> Payload:
        """Return these sums, added and encoded as one sum for another member; nothing for none."""
        if not sums:
            return b""
        decoded = self._decoded_all(chunk, sums)
        return self._plan.sums.encode(self._means.reducer(decoded, list(decoded), 1, self._plan.dtype), chunk)

    def _decoded_all(self, chunk: ReduceChunk, encoded: Mapping[PeerId, Payload]) -> dict[PeerId, Floats]:
        """Sums by member, in rank order."""
        return {peer: self._decoded(peer, chunk, encoded[peer]) for peer in self._plan.members if peer in encoded}

    def _decoded(self, peer: PeerId, chunk: ReduceChunk, payload: Payload) -> Floats:
        try:
            return self._plan.sums.decode(payload, chunk.elements)
        except Violation as error:
            raise Violation(f"sent a sum of chunk {chunk.index} with {error.reason}", peer=peer) from error

    async def _agree(self, digest: str) -> None:
        """Sign the result off: it counts once all members said they hold the same. Costs K-1 small calls.

        A member answers when it has signed, too: until then a call to it is open, and its death is known at once. Those
        whom nobody calls it answers when they all have: so each of them hears of the others.
        """
        roots = {} if self._check is None else self._check.roots()
        message, uncalled = Agreement.of(self._plan, result=digest, sums=roots), self._me in self._plan.outgoing
        self._inbox.agree(self._me, message)
        async with asyncio.TaskGroup() as tasks:
            for peer in self._others:
                tasks.create_task(self._sign_with(peer, message))
            if not uncalled:  # one that differs from most is known before all have answered, which then nobody does
                tasks.create_task(self._inbox.wait_agreements())
        for peer in self._plan.outgoing if uncalled else ():
            self._inbox.agree(peer, message)
        await self._inbox.wait_agreements()

    async def _sign_with(self, peer: PeerId, message: Agreement) -> None:
        await self._questions.ask(peer, AGREE, message)
        if self._check is None:  # else it tells us what it was given, too
            self._inbox.agree(peer, message)

    async def _off_loop(self, chunk: ReduceChunk, work: Callable[..., T], *args: object) -> T:
        try:
            if chunk.elements <= INLINE_ELEMENTS:
                return work(*args)
            done: T = await self._means.run(work, *args)
            return done
        except Violation as error:
            raise RoundFailed(error.reason, peer=error.peer) from error
