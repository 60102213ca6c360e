"""What an endpoint says of itself to anyone who does not know it, when it is asked to.

A call that is answered with :class:`~swarm.errors.Unadmitted` is made once more, when the introduction was heard; calls
to one peer share one introduction.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from swarm.errors import PeerError, Unadmitted
from swarm.ids import PeerId
from swarm.network.protocols import Payload, ReplyT, RequestT, Rpc
from swarm.schema import Message

PATIENCE_S = 10.0


class BareCall(Protocol):
    """Makes an endpoint's call once, as it is: see :meth:`swarm.network.protocols.Endpoint.call`."""

    async def __call__(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        timeout_s: float,
        payload: Payload,
        max_reply_bytes: int,
    ) -> tuple[ReplyT, memoryview]:
        """Return the answer and its payload. Raises a PeerError."""


class Introduction:
    """One endpoint's, whose calls are made through it; ``bare`` makes one of them."""

    def __init__(self, bare: BareCall) -> None:
        self._bare = bare
        self._said: tuple[Rpc[Any, Any], Message] | None = None
        self._under_way: dict[PeerId, asyncio.Task[object]] = {}

    def prepare(self, rpc: Rpc[Any, Any], body: Message) -> None:
        """Say this from now on."""
        self._said = rpc, body

    async def call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        timeout_s: float,
        payload: Payload,
        max_reply_bytes: int,
    ) -> tuple[ReplyT, memoryview]:
        """Return what the call does, made again after an introduction where it was answered with the wish for one.
        Raises what it raises; Unadmitted with what the other side says to the introduction, where that does not
        count."""
        try:
            return await self._bare(target, rpc, body, timeout_s, payload, max_reply_bytes)
        except Unadmitted:
            if self._said is None:
                raise
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._introduce(target, min(timeout_s, PATIENCE_S))
        left_s = max(timeout_s - (loop.time() - began), 1e-3)
        return await self._bare(target, rpc, body, left_s, payload, max_reply_bytes)

    async def _introduce(self, target: PeerId, within_s: float) -> None:
        assert self._said is not None  # noqa: S101 - looked at by the caller
        task = self._under_way.get(target)
        if task is None:
            saying = self._bare(target, *self._said, within_s, b"", 0)
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
