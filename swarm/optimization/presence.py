"""Whether those who asked to join are still there when the step closes: who is named in a record is counted on.

Nobody waits for the answer. It has the time that the members take to average; who asked before that and has not
answered after it is not named in this record, and may ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.optimization.calls import StepCalls
from swarm.optimization.observation import STANDING, RunStanding, StandingRequest

PRESENT_S = 10.0


@contextmanager
def absent(calls: StepCalls, asked: Iterable[PeerId]) -> Iterator[set[PeerId]]:
    """Those of ``asked`` that have not answered so far: the set shrinks while the body runs. Leaves no task behind that
    goes on asking."""
    missing = set(asked)

    async def ask(peer: PeerId) -> None:
        if await is_there(calls, peer, PRESENT_S):
            missing.discard(peer)

    asking = [asyncio.create_task(ask(peer)) for peer in missing]
    try:
        yield missing
    finally:
        for task in asking:
            task.cancel()


async def is_there(calls: StepCalls, peer: PeerId, timeout_s: float) -> bool:
    """Whether a peer answers the simplest question in time. Raises no PeerError."""
    try:
        await calls.ask(peer, STANDING, StandingRequest(), RunStanding, timeout_s=timeout_s)
    except PeerError:
        return False
    return True
