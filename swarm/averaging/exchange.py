"""One member's side of one round: trade every chunk, reduce one's own, agree on the whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swarm.averaging.inbox import Inbox
from swarm.averaging.messages import AGREE, CHUNK, ENTER, Agreement, ChunkRequest, RoundMessage
from swarm.averaging.output import Output, raw
from swarm.averaging.partition import Chunk
from swarm.averaging.plan import RoundPlan
from swarm.averaging.reducers import Floats, Reducer
from swarm.clock import Clock
from swarm.errors import Busy, DeadlineMissed, PeerError, RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, Payload
from swarm.schema import Empty

INLINE_ELEMENTS = 1 << 13
"""Up to this many elements (some 50 µs of work) a thread hop would cost more than it hides."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
"""Pauses before asking a busy member again, doubling: it enters the round when its own step gets there, which takes
from milliseconds to the whole round's time."""


class Run(Protocol):
    """Runs a plain function off the event loop: ``asyncio.to_thread`` or a peer's own executor."""

    def __call__(self, fn: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        """The function's result; its exception is raised here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What an exchange works with, the same for all rounds of a peer."""

    endpoint: Endpoint
    clock: Clock
    run: Run
    reducer: Reducer


class Exchange:
    """Carries a round out at this member. ``local`` is its vector of sums, (elements,) in the plan's dtype, or None.

    The answer to a member's sum of a chunk *is* that chunk's result, so reduce-scatter and all-gather are one call per
    chunk and pair, results wait in the output vector until asked for, and back-pressure needs nothing else: whoever
    has a window of unanswered chunks at a reducer sends no more. All members go through a part in the same order, so
    the lowest unanswered chunk is always within everybody's window and the round cannot lock up.
    """

    def __init__(self, means: Means, inbox: Inbox, local: Floats | None) -> None:
        self._means, self._inbox, self._local = means, inbox, local
        self._plan: RoundPlan = inbox.plan
        self._me = inbox.me
        self._others = self._plan.called_by(self._me)
        self._began = means.clock.monotonic()
        self._ends_at = self._began + self._plan.timeout_s
        self._asking: Counter[PeerId] = Counter()
        self._bytes_asked = 0
        self.formed_s = 0.0
        self.output = Output(self._plan)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes put on the wire so far: sums sent (repetitions included) and results answered."""
        return self._bytes_asked + self._inbox.bytes_answered

    async def complete(self) -> str:
        """Do it all; returns the result's digest, which all members then hold.

        Raises an exception group with a RoundFailed at the deadline, at the first member that fails, or at another
        member's Abort. When cancelled, all its tasks have ended before CancelledError leaves.
        """
        async with asyncio.TaskGroup() as guards:
            ends = guards.create_task(self._expire()), guards.create_task(self._inbox.wait_failure())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reduce_own())
                for peer in self._others:
                    tasks.create_task(self._trade_with(peer))
            digest = self.output.digest()
            await self._agree(digest)
            for guard in ends:
                guard.cancel()
        return digest

    async def _trade_with(self, peer: PeerId) -> None:
        """Everything between us and one member. Asking first whether it is in spares the bytes it would refuse, and
        finds a dead observer before the work is done."""
        await self._ask(peer, ENTER, RoundMessage.of(self._plan))
        self.formed_s = self._means.clock.monotonic() - self._began  # the last one's stays
        chunks = iter(self._plan.chunks_of(peer))
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(self._plan.window, len(self._plan.chunks_of(peer)))):
                lanes.create_task(self._trade(peer, chunks))

    async def _trade(self, peer: PeerId, chunks: Iterator[Chunk]) -> None:
        """One lane of a window: the next chunk that no other lane took, until there is none."""
        weight = self._plan.weights[self._me]
        for chunk in chunks:
            payload: Payload = b""
            if weight and self._local is not None:
                payload = raw(self._local[chunk.start : chunk.stop])
            question = ChunkRequest.of(self._plan, index=chunk.index, weight=weight)
            encoded = await self._ask(peer, CHUNK, question, payload, self.output.bytes_of(chunk))
            await self._off_loop(chunk, self.output.store, chunk, encoded)

    async def _reduce_own(self) -> None:
        plan = self._plan
        for chunk in plan.chunks_of(self._me):
            sums = await self._inbox.wait_sums(chunk)
            if plan.weights[self._me] and self._local is not None:
                sums[self._me] = self._local[chunk.start : chunk.stop]
            await self._off_loop(chunk, self._reduce, chunk, sums)
            self._inbox.publish(chunk, self.output.encoded(chunk))

    def _reduce(self, chunk: Chunk, sums: dict[PeerId, Floats]) -> None:
        plan = self._plan
        result = self._means.reducer(sums, plan.contributors, plan.divisor, plan.result_dtype)
        self.output.store(chunk, raw(np.ascontiguousarray(result)))

    async def _agree(self, digest: str) -> None:
        """Sign the result off: it counts once all members said they hold the same. Costs K-1 small calls.

        A member answers when it has signed, too: until then a call to it is open, and its death is known at once. Those
        whom nobody calls it answers when they all have: so each of them hears of the others.
        """
        self._inbox.agree(self._me, digest)
        message = Agreement.of(self._plan, result=digest)
        async with asyncio.TaskGroup() as tasks:
            for peer in self._others:
                tasks.create_task(self._sign_with(peer, message))
        for peer in self._plan.outgoing if self._me in self._plan.outgoing else ():
            self._inbox.agree(peer, digest)
        await self._inbox.wait_agreements()

    async def _sign_with(self, peer: PeerId, message: Agreement) -> None:
        await self._ask(peer, AGREE, message)
        self._inbox.agree(peer, message.result)

    async def _ask(
        self, peer: PeerId, method: str, message: RoundMessage, payload: Payload = b"", max_reply_bytes: int = 0
    ) -> memoryview:
        """Ask a member until it is no longer busy. Raises RoundFailed naming it."""
        pause_s = FIRST_PAUSE_S
        self._asking[peer] += 1
        while True:
            try:
                return await self._call(peer, method, message, payload, max_reply_bytes)
            except Busy:
                await self._means.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except PeerError as error:
                if isinstance(error, DeadlineMissed):
                    raise self._overdue() from error
                raise _blame(error, peer) from error

    async def _call(
        self, peer: PeerId, method: str, message: RoundMessage, payload: Payload, max_reply_bytes: int
    ) -> memoryview:
        timeout_s = self._ends_at - self._means.clock.monotonic()
        if timeout_s <= 0:
            raise DeadlineMissed("the round's time is over", peer=peer)
        self._bytes_asked += len(payload)
        _, encoded = await self._means.endpoint.call(
            peer, method, message, Empty, timeout_s=timeout_s, payload=payload, max_reply_bytes=max_reply_bytes
        )
        self._asking[peer] -= 1
        return encoded

    async def _off_loop(self, chunk: Chunk, work: Callable[..., None], *args: object) -> None:
        try:
            if chunk.elements <= INLINE_ELEMENTS:
                work(*args)
            else:
                await self._means.run(work, *args)
        except Violation as error:
            raise RoundFailed(error.reason, peer=error.peer) from error

    async def _expire(self) -> None:
        await self._means.clock.sleep(max(0.0, self._ends_at - self._means.clock.monotonic()))
        raise self._overdue()

    def _overdue(self) -> RoundFailed:
        """The deadline's failure. Blames whoever owes us a sum; a reducer that owes an answer may itself be waiting."""
        owing = self._inbox.missing_sums()
        if owing:
            return RoundFailed(f"no sum in {self._plan.timeout_s:.3g} s", peer=owing[0])
        silent = sorted(peer for peer, calls in (+self._asking).items() if calls)
        unsure = sorted(set(self._plan.members) - set(self._inbox.agreements))
        told = f"no answer from {', '.join(silent)}" if silent else f"no agreement from {', '.join(unsure)}"
        return RoundFailed(f"{self._plan.timeout_s:.3g} s are over: {told}")


def _blame(error: PeerError, peer: PeerId) -> RoundFailed:
    """A member that refuses reports on a round already void there, perhaps through no fault of its own."""
    if error.code in ("unreachable", "violation", "failed"):
        return RoundFailed(error.reason, peer=peer)
    return RoundFailed(f"{peer} says: {error.reason}")
