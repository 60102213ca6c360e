"""Calls of the step protocol, to others and to ourselves alike: a leader is also a member."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from swarm.clock import Clock
from swarm.errors import BugError, PeerError
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, Method, Request, Service
from swarm.schema import Message

ReplyT = TypeVar("ReplyT", bound=Message)


class StepCalls:
    """Asks members; what is meant for this peer goes straight to its own methods."""

    def __init__(self, endpoint: Endpoint, clock: Clock, services: Sequence[Service]) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._own: dict[str, Method] = {method.name: method for service in services for method in service.methods()}

    @property
    def me(self) -> PeerId:
        """Our own identity."""
        return self._endpoint.peer

    async def ask(self, peer: PeerId, method: str, body: Message, reply: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """One member's answer. Raises a PeerError that names it."""
        try:
            if peer != self.me:
                answer, _ = await self._endpoint.call(peer, method, body, reply, timeout_s=timeout_s)
                return answer
            deadline = self._clock.monotonic() + timeout_s
            own = await self._own[method].handle(Request(self.me, body, memoryview(b""), deadline))
        except PeerError as error:
            raise type(error)(error.reason, peer=peer) from error
        if not isinstance(own.body, reply):
            raise BugError(f"{method} answered {type(own.body).__name__}")
        return own.body

    async def ask_all(
        self, peers: Sequence[PeerId], method: str, body: Message, reply: type[ReplyT], *, timeout_s: float
    ) -> dict[PeerId, ReplyT]:
        """Everybody's answer; the first failure cancels the rest and is raised as it is."""
        tasks: dict[PeerId, asyncio.Task[ReplyT]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for peer in peers:
                    tasks[peer] = group.create_task(self.ask(peer, method, body, reply, timeout_s=timeout_s))
        except* PeerError as errors:
            raise first_leaf(errors) from errors
        return {peer: task.result() for peer, task in tasks.items()}


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
