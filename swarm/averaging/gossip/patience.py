"""Limit a mixing replica's wait for the others: a replica that hangs costs them one deadline, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from swarm.clock import Clock
from swarm.errors import DeadlineMissed, PeerError
from swarm.ids import PeerId
from swarm.waiting import AdaptiveDeadline

FLOOR_S, FIRST_S = 1.0, 5.0
"""Bounds of how long a mixing waits: at least, and until anything was measured."""

CEILING_S = 60.0
"""How long a call may take whether or not anybody still waits for it, and the most that a mixing waits."""

T = TypeVar("T")


class PatientCalls(Generic[T]):
    """Calls to others, at most one at a time to each.

    A mixing waits for those who answered the last time, until a deadline from what answers took. Who misses it is
    *late*: its call goes on during the mixing and those that follow, and nobody waits for it before it has answered
    one, however late; what it then says is too old to be used. So a link that is slower than the deadline is measured
    all the same, and the deadline follows.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadline = AdaptiveDeadline(FLOOR_S, CEILING_S, first_s=FIRST_S)
        self._asked: set[PeerId] = set()
        self._late: set[PeerId] = set()

    def asks(self, peer: PeerId) -> bool:
        """Return whether a call to this peer is still under way."""
        return peer in self._asked

    async def answers(
        self, beside: asyncio.TaskGroup, peers: Sequence[PeerId], ask: Callable[[PeerId], Awaitable[T]]
    ) -> dict[PeerId, T | PeerError]:
        """Ask all whom no call is under way to: what those said who did in time, and for the others why not.

        ``ask`` gives up after CEILING_S and raises PeerError; in ``beside`` it may outlast this call.
        """
        calls = {peer: beside.create_task(self._call(peer, ask)) for peer in peers if peer not in self._asked}
        self._asked |= calls.keys()
        seconds = self._deadline.seconds()
        awaited = [call for peer, call in calls.items() if peer not in self._late]
        if awaited:
            await asyncio.wait(awaited, timeout=seconds)
        outcomes: dict[PeerId, T | PeerError] = {}
        for peer in peers:
            call = calls.get(peer)
            if call is not None and call.done():
                outcomes[peer] = call.result()
            elif peer in self._late:
                outcomes[peer] = DeadlineMissed("has been late since an earlier leg: not waited for", peer=peer)
            else:
                self._late.add(peer)
                outcomes[peer] = DeadlineMissed(f"no answer in {seconds:.3g} s", peer=peer)
        return outcomes

    async def _call(self, peer: PeerId, ask: Callable[[PeerId], Awaitable[T]]) -> T | PeerError:
        began = self._clock.monotonic()
        try:
            answer = await ask(peer)
        except DeadlineMissed as error:
            self._late.add(peer)
            return error
        except PeerError as error:
            self._late.discard(peer)  # it was heard of, if only that it has nothing, or is gone
            return error
        finally:
            self._asked.discard(peer)
        self._late.discard(peer)
        self._deadline.observe(self._clock.monotonic() - began)
        return answer
