"""Frames of legal size, spoilt or not, given to the dispatchers of a swarm that trains: what each costs the loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peers.chaos.strangers.bodies import AnyRpc, all_rpcs, frames
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.protocols import Incoming
from swarm.network.rpc.bodies import Envelope
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits, handle
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES
from swarm.schema import Empty, Message
from tests.harness.libp2p_swarm import LibP2PSwarm

SEED = 3
LARGE_BYTES = 256 << 10
"""Of what only members may send; it is decoded beside the loop."""
ANSWERED_S = 0.1
"""Handlers that wait for something are cancelled then, as by their caller's deadline."""
WORST = 5

T = TypeVar("T")


@dataclass(slots=True)
class Frames:
    """What the frames came to. ``worst`` are milliseconds, method and bytes, the slowest first."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    worst: list[tuple[float, str, int]] = field(default_factory=list)

    def note(self, ms: float, method: str, size: int) -> None:
        """One more."""
        self.tried += 1
        self.worst = sorted([*self.worst, (ms, method, size)], reverse=True)[:WORST]


class Stopwatch(Coroutine[Any, Any, T]):
    """A coroutine as it is, that counts the processor time of the thread that runs it, while it runs."""

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner, self.ns = inner, 0

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        return self._timed(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """See Coroutine."""
        return self._timed(self._inner.throw, *error)

    def close(self) -> None:
        """See Coroutine."""
        self._inner.close()

    def __await__(self) -> Iterator[Any]:
        """See Coroutine."""
        return self._inner.__await__()

    def _timed(self, step: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return step(*given)
        finally:
            self.ns += time.thread_time_ns() - began


async def try_frames(swarm: LibP2PSwarm, each: int) -> Frames:
    """Send ``each`` frames of every method that there is, and as many larger ones, to a peer that answers it, as if a
    member had; a method that none of these peers answers now is only decoded."""
    found, caller = Frames(), swarm.peers["host-0"].endpoint.peer
    for rpc in all_rpcs():
        desk = _desk_of(swarm, rpc)
        for most in (MAX_STRANGER_BODY_BYTES, LARGE_BYTES):
            tasks = [_dispatch(desk, caller, rpc, packed, found) for packed in frames(rpc, each, SEED, most)]
            await asyncio.gather(*tasks)
    return found


def _desk_of(swarm: LibP2PSwarm, rpc: AnyRpc) -> Dispatcher:
    for peer in reversed(swarm.peers.values()):
        desk: Dispatcher = peer.endpoint._desk  # type: ignore[attr-defined]
        if rpc.name in desk._methods:
            return desk
    desk = Dispatcher(ServeLimits())
    desk.mount(_Silent(rpc))
    return desk


class _Silent:
    """Answers one method with nothing."""

    def __init__(self, rpc: AnyRpc) -> None:
        self._rpc = rpc

    def methods(self) -> list[Any]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [self._rpc.handled(self._answer)]

    async def _answer(self, caller: PeerId, body: Message) -> Empty:
        return Empty()


async def _dispatch(desk: Dispatcher, caller: PeerId, rpc: AnyRpc, packed: bytes, found: Frames) -> None:
    """One frame: what admitting, answering and releasing it cost this thread."""
    began, in_handler = time.thread_time_ns(), 0
    admitted, outcome = None, "answered"
    try:
        admitted = desk.admit(caller, Envelope(rpc.name, ANSWERED_S, 1 << 20, packed), 0, public=rpc.public)
    except PeerError as error:
        outcome = type(error).__name__
    spent = time.thread_time_ns() - began
    if admitted is not None:
        watch = Stopwatch(handle(admitted, caller, Incoming(memoryview(b""), time.monotonic() + ANSWERED_S)))
        answering = asyncio.get_running_loop().create_task(watch)
        done, _ = await asyncio.wait([answering], timeout=ANSWERED_S)
        answering.cancel()
        (told,) = await asyncio.gather(answering, return_exceptions=True)
        if isinstance(told, BaseException):
            outcome = type(told).__name__ if done else "waited"
        in_handler = watch.ns
        began = time.thread_time_ns()
        desk.release(caller, admitted)
        spent += time.thread_time_ns() - began
    found.outcomes[outcome] += 1
    found.note((spent + in_handler) / 1e6, rpc.name, len(packed))
