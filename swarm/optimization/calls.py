"""Asking members of the roster, one or all. A leader asks itself over the same path."""

from __future__ import annotations

from typing import TypeVar

from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint
from swarm.schema import Message

ReplyT = TypeVar("ReplyT", bound=Message)


class StepCalls:
    """Calls of the step protocol. Every error names the member it came from."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def me(self) -> PeerId:
        """Our own identity."""
        return self._endpoint.peer

    async def ask(self, peer: PeerId, method: str, body: Message, reply: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """One member's answer. Raises a PeerError that names it."""
        try:
            answer, _ = await self._endpoint.call(peer, method, body, reply, timeout_s=timeout_s)
        except PeerError as error:
            raise type(error)(error.reason, peer=peer) from error
        return answer


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
