"""One member's questions of one round: asked until they are answered, or the round's time is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.averaging.allreduce.inbox import Inbox
from swarm.averaging.allreduce.messages import ENTER, STAY
from swarm.averaging.allreduce.output import Reducer
from swarm.averaging.allreduce.plan import RoundPlan
from swarm.clock import Clock
from swarm.errors import Busy, DeadlineMissed, PeerError, RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, Payload, RequestT, Rpc
from swarm.schema import Empty
from swarm.security.signing import Signing
from swarm.waiting import ExponentialBackoff, first_done

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
"""Pauses before asking a busy member again, doubling: it enters the round when its own step gets there, which takes
from milliseconds to the whole round's time."""


class Run(Protocol):
    """Runs a plain function off the event loop: ``asyncio.to_thread`` or a peer's own executor."""

    def __call__(self, fn: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        """The function's result; its exception is raised here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The means of an exchange, the same for all rounds of a peer. ``signing`` is for rounds that are checked."""

    endpoint: Endpoint
    clock: Clock
    run: Run
    reducer: Reducer
    signing: Signing | None


class RoundQuestions:
    """Our questions of one round. ``began`` is when the first could be asked; ``bytes_asked`` counts the payloads,
    repetitions included."""

    def __init__(self, means: Means, inbox: Inbox) -> None:
        self._means, self._inbox = means, inbox
        self._plan: RoundPlan = inbox.plan
        self.began = means.clock.monotonic()
        self._ends_at = self.began + self._plan.timeout_s
        self._asking: Counter[PeerId] = Counter()
        self._came_in: set[PeerId] = set()
        self.bytes_asked = 0

    async def ask(
        self,
        peer: PeerId,
        rpc: Rpc[RequestT, Empty],
        message: RequestT,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> memoryview:
        """Ask a member until it is no longer busy. Raises RoundFailed naming it."""
        backoff = ExponentialBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._asking[peer] += rpc is not STAY  # who is not answered to that owes nothing
        while True:
            try:
                return await self._call(peer, rpc, message, payload, max_reply_bytes)
            except Busy:
                self._inbox.said_busy(peer)
                # Who asks whether we are in is in itself: a late member need not wait until we ask it again.
                await first_done(self._means.clock.sleep(backoff.pause_s()), self._come_in(peer, rpc))
            except PeerError as error:
                if isinstance(error, DeadlineMissed):
                    raise self._overdue() from error
                raise self._broken(error, peer) from error

    async def _come_in(self, peer: PeerId, rpc: Rpc[Any, Empty]) -> None:
        """Until a member that was not in is, once; for ever where it has more of ours than it takes."""
        if rpc is not ENTER or peer in self._came_in:
            await asyncio.get_running_loop().create_future()
        await self._inbox.wait_in(peer)
        self._came_in.add(peer)

    async def _call(
        self, peer: PeerId, rpc: Rpc[RequestT, Empty], message: RequestT, payload: Payload, max_reply_bytes: int
    ) -> memoryview:
        timeout_s = self._ends_at - self._means.clock.monotonic()
        if timeout_s <= 0:
            raise DeadlineMissed("the round's time is over", peer=peer)
        self.bytes_asked += len(payload)
        began = self._means.clock.monotonic()
        _, encoded = await self._means.endpoint.call(
            peer, rpc, message, timeout_s=timeout_s, payload=payload, max_reply_bytes=max_reply_bytes
        )
        self._asking[peer] -= rpc is not STAY
        if rpc is ENTER:
            self._inbox.meter.answered(peer, self._means.clock.monotonic() - began)
        return encoded

    def _broken(self, error: PeerError, peer: PeerId) -> RoundFailed:
        """A member that refuses reports on a round already void there, perhaps through no fault of its own."""
        if error.code in ("unreachable", "violation", "failed"):
            return RoundFailed(error.reason, peer=peer)
        return self._inbox.given_up_by(peer, f"{peer} says: {error.reason}", self._means.clock.monotonic())

    async def expire(self) -> None:
        """Raise RoundFailed when the round's time is over."""
        await self._means.clock.sleep(max(0.0, self._ends_at - self._means.clock.monotonic()))
        raise self._overdue()

    def _overdue(self) -> RoundFailed:
        """The deadline's failure, on whom it broke where we know (see :meth:`Inbox.suspects`)."""
        if self._inbox.judged is not None:
            return self._inbox.judged
        lacking, suspects = self._inbox.suspects()
        if suspects:
            return RoundFailed(f"{lacking} in {self._plan.timeout_s:.3g} s", peer=suspects[0])
        silent = sorted(peer for peer, calls in (+self._asking).items() if calls)
        # Straight to who reduces, who alone does not answer waits for nobody but us, or for whom it blames itself.
        if len(silent) == 1 and self._plan.schedule == "direct" and len(self._plan.members) > 2:
            return RoundFailed(f"no answer in {self._plan.timeout_s:.3g} s", peer=silent[0])
        unsure = ", ".join(self._inbox.unsure())
        told = f"no answer from {', '.join(silent)}" if silent else f"no agreement from {unsure}"
        return RoundFailed(f"{self._plan.timeout_s:.3g} s are over: {told}")
