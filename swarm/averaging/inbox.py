"""Everything the other members said in one round: their sums of our part, their agreement, their giving up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np

from swarm.averaging.messages import ChunkRequest
from swarm.averaging.partition import Chunk
from swarm.averaging.plan import RoundPlan
from swarm.averaging.reducers import Floats
from swarm.errors import Busy, Refused, RoundFailed, Violation
from swarm.ids import PeerId


class Inbox:
    """What arrived for one round, from the moment it is expected until it is over. For one event loop, no I/O.

    Holds at most ``plan.window`` unreduced chunks of each contributor; a sum sent twice counts once, the first.
    Whoever waits here is woken when the round ends, whichever way.
    """

    def __init__(self, plan: RoundPlan, me: PeerId) -> None:
        self.plan, self.me = plan, me
        self.failure: RoundFailed | None = None
        self.agreements: dict[PeerId, str] = {}
        self.bytes_answered = 0
        self._senders = frozenset(plan.contributors) - {me}
        self._mine: dict[int, Chunk] = {chunk.index: chunk for chunk in plan.chunks_of(me)}
        self._sums: dict[int, dict[PeerId, Floats]] = {}
        self._held: Counter[PeerId] = Counter()
        self._taken: set[int] = set()
        self._results: dict[int, memoryview] = {}
        self._changed: dict[object, asyncio.Event] = {}

    def admit(self, caller: PeerId, request: ChunkRequest, payload_bytes: int) -> None:
        """Raise Violation or Refused unless this member may send this many bytes, before there is room for them.

        Raises Busy when it has more chunks unreduced here than its window allows.
        """
        self.admit_member(caller, request.plan)
        weight = self.plan.weights[caller]
        chunk = self._mine.get(request.index)
        if request.weight != weight:
            raise Violation(f"claims weight {request.weight}, the ledger says {weight}", peer=caller)
        if chunk is None or caller == self.me:
            raise Violation(f"chunk {request.index} is not reduced here", peer=caller)
        expected = chunk.elements * self.plan.item_bytes if weight else 0
        if payload_bytes != expected:
            raise Violation(f"chunk {request.index} has {payload_bytes} bytes, not {expected}", peer=caller)
        if self._is_new(caller, request.index) and self._held[caller] >= self.plan.window:
            raise Busy("that is more than the window")

    def admit_member(self, caller: PeerId, plan_digest: str) -> None:
        """Raise Violation for one who is no member, Refused for a member under another plan or after a failure."""
        if caller not in self.plan.weights:
            raise Violation(f"is no member of round {self.plan.key}", peer=caller)
        self._refuse_if_void()
        if plan_digest != self.plan.digest:
            raise Refused(f"round {self.plan.key} is planned differently here")

    async def answer(self, caller: PeerId, request: ChunkRequest, payload: memoryview) -> memoryview:
        """Hold an admitted sum and wait for the chunk's result, as bytes that must not change before the round ends.

        Raises Refused when the round fails meanwhile. Cancelling forgets the question, not the sum.
        """
        if payload and self._is_new(caller, request.index):
            sums = self._sums.setdefault(request.index, {})
            sums[caller] = np.frombuffer(payload, dtype=np.dtype(self.plan.dtype).newbyteorder("<"))
            self._held[caller] += 1
            self._wake(request.index)
        await self._wait(("result", request.index), lambda: request.index in self._results)
        self._refuse_if_void()
        encoded = self._results[request.index]
        self.bytes_answered += len(encoded)
        return encoded

    def agree(self, caller: PeerId, result: str) -> None:
        """Note that a member holds the whole result, by its digest. The first word counts."""
        self.agreements.setdefault(caller, result)
        self._wake("agreement")

    def fail(self, failure: RoundFailed) -> None:
        """End the round for all who wait here. The first reason stays; what was held is let go."""
        if self.failure is None:
            self.failure = failure
        self._sums.clear()
        self._held.clear()
        for topic in list(self._changed):
            self._wake(topic)

    async def wait_sums(self, chunk: Chunk) -> dict[PeerId, Floats]:
        """All other contributors' sums of one chunk of our part; they are let go here. Raises RoundFailed."""
        await self._wait(chunk.index, lambda: self._sums.get(chunk.index, {}).keys() >= self._senders)
        self.raise_failure()
        self._taken.add(chunk.index)
        return self._sums.pop(chunk.index, {})

    def publish(self, chunk: Chunk, encoded: memoryview) -> None:
        """Answer those who wait for a chunk's result, and let their next ones in. ``encoded`` must stay as it is."""
        self._results[chunk.index] = encoded
        self._held.subtract(self._senders)
        self._wake(("result", chunk.index))

    async def wait_signed(self, caller: PeerId, result: str) -> None:
        """Until we signed the same result ourselves; for a caller whom nobody calls, until all such have told us, too.
        Raises Refused when the round fails meanwhile or a result differs."""
        outgoing = self.plan.outgoing
        awaited = {self.me, *outgoing} if caller in outgoing else {self.me}
        await self._wait("agreement", lambda: awaited <= self.agreements.keys())
        self._refuse_if_void()
        if any(self.agreements[peer] != result for peer in awaited):
            raise Refused(f"round {self.plan.key} has another result here: members hold different results")

    async def wait_agreements(self) -> None:
        """Until every member agreed or the round failed. Raises RoundFailed, also when the results differ."""
        await self._wait("agreement", lambda: len(self.agreements) == len(self.plan.members))
        self.raise_failure()
        if len(set(self.agreements.values())) > 1:
            told = ", ".join(f"{peer} {self.agreements[peer][:12]}" for peer in self.plan.members)
            raise RoundFailed(f"members hold different results: {told}")

    async def wait_failure(self) -> None:
        """Until another member's message voids the round; then raises its RoundFailed."""
        await self._wait("failure", lambda: False)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the round's failure, if it failed."""
        if self.failure is not None:
            raise RoundFailed(self.failure.reason, peer=self.failure.peer)

    def missing_sums(self) -> tuple[PeerId, ...]:
        """Contributors whose sum of the first unreduced chunk of our part has not come, in rank order."""
        for index in self._mine:
            if index not in self._taken:
                there = self._sums.get(index, {})
                return tuple(peer for peer in self.plan.contributors if peer in self._senders and peer not in there)
        return ()

    def _refuse_if_void(self) -> None:
        if self.failure is not None:
            raise Refused(f"round {self.plan.key} is void: {self.failure}")

    def _is_new(self, caller: PeerId, index: int) -> bool:
        return index not in self._taken and caller in self._senders and caller not in self._sums.get(index, {})

    async def _wait(self, topic: object, reached: Callable[[], bool]) -> None:
        while not reached() and self.failure is None:
            await self._changed.setdefault(topic, asyncio.Event()).wait()

    def _wake(self, topic: object) -> None:
        event = self._changed.pop(topic, None)
        if event is not None:
            event.set()
