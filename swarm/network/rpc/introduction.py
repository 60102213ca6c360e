"""What an endpoint says of itself to whoever does not know it, when it is asked to.

A call that is answered with :class:`~swarm.errors.Unadmitted` is made once more, when the introduction was heard; calls
to one peer share one introduction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from swarm.errors import PeerError, Unadmitted
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.schema import Message

ResultT = TypeVar("ResultT")
Say = Callable[[PeerId, Rpc[Any, Any], Message, float], Awaitable[object]]
"""Make a call: to whom, which, with what body, and for how many seconds."""

PATIENCE_S = 10.0


class Introduction:
    """One endpoint's. ``say`` makes a call that is not introduced."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: tuple[Rpc[Any, Any], Message] | None = None
        self._under_way: dict[PeerId, asyncio.Task[object]] = {}

    def prepare(self, rpc: Rpc[Any, Any], body: Message) -> None:
        """Say this from now on."""
        self._said = rpc, body

    async def call(self, target: PeerId, attempt: Callable[[float], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        """Return what ``attempt(seconds)`` does, tried again after an introduction where it was asked for one. Raises
        what it raises; Unadmitted with what the other side says to the introduction, where that does not count."""
        try:
            return await attempt(timeout_s)
        except Unadmitted:
            if self._said is None:
                raise
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._introduce(target, min(timeout_s, PATIENCE_S))
        return await attempt(max(timeout_s - (loop.time() - began), 1e-3))

    async def _introduce(self, target: PeerId, within_s: float) -> None:
        assert self._said is not None  # noqa: S101 - looked at by the caller
        task = self._under_way.get(target)
        if task is None:
            saying = self._say(target, *self._said, within_s)
            task = self._under_way[target] = asyncio.ensure_future(saying)
            task.add_done_callback(lambda done: self._ended(target, done))
        try:
            await asyncio.shield(task)
        except Unadmitted:
            raise
        except PeerError as error:
            if error.code in ("refused", "violation"):
                raise Unadmitted(error.reason, peer=target) from error
            raise

    def _ended(self, target: PeerId, done: asyncio.Task[object]) -> None:
        self._under_way.pop(target, None)
        if not done.cancelled():
            done.exception()  # retrieved: who waited for it may have gone
