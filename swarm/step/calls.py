"""Call members of the roster, one or all, and give a call up as soon as its member is believed gone.

:class:`StepCalls` sends; :class:`LiveCalls` bounds its calls by what the health watch believes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from swarm.errors import DeadlineMissed, PeerError, Unreachable
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint, ReplyT, RequestT, Rpc
from swarm.waiting import ended


class Liveness(Protocol):
    """Who is there, as the health watch believes."""

    @property
    def gone(self) -> Mapping[PeerId, str]:
        """Members that do not answer, with the reason."""

    @property
    def unanswered(self) -> Mapping[PeerId, PeerError]:
        """Of those that are gone because a question failed, the error of it."""

    async def check(self, peers: Collection[PeerId], reason: str) -> None:
        """Ask these at once; return when each has answered or is gone, after some seconds at the latest: who sends and
        does not answer is neither."""

    def changed(self) -> Coroutine[None, None, None]:
        """Awaited, it returns when somebody is gone, or back, that was not when this was called."""


def fell_silent(liveness: Liveness, peer: PeerId) -> bool:
    """Return whether who is gone may only be cut off, and come back as it was: nothing was heard of it. Who is refused
    by its machine, leaves or was started anew is not there any more."""
    return isinstance(liveness.unanswered.get(peer), DeadlineMissed)


@dataclass(frozen=True, slots=True)
class Answers(Generic[ReplyT]):
    """What members said, and why others said nothing. In neither is who was not waited for."""

    given: dict[PeerId, ReplyT]
    failed: dict[PeerId, PeerError]


class LiveCalls:
    """A peer that stalls is given up as soon as it is gone, however long its answer might have taken."""

    def __init__(self, calls: StepCalls, liveness: Liveness) -> None:
        self._calls, self._liveness = calls, liveness

    @property
    def me(self) -> PeerId:
        """Our own identity."""
        return self._calls.me

    async def ask(self, peer: PeerId, rpc: Rpc[RequestT, ReplyT], body: RequestT, *, timeout_s: float) -> ReplyT:
        """One member's answer. Raises a PeerError that names it: Unreachable when it is, or is found, gone."""
        asking = asyncio.create_task(self._calls.ask(peer, rpc, body, timeout_s=timeout_s))
        try:
            while peer not in self._liveness.gone:
                changed = asyncio.create_task(self._liveness.changed())
                try:
                    await asyncio.wait({asking, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if asking.done():
                    return asking.result()
            raise Unreachable(self._liveness.gone[peer], peer=peer)
        finally:
            asking.cancel()

    async def gather(
        self, peers: Sequence[PeerId], rpc: Rpc[RequestT, ReplyT], body: RequestT, *, timeout_s: float
    ) -> Answers[ReplyT]:
        """Ask all, up to the first that fails: the others are not waited for then. Raises no PeerError; cancelled, it
        leaves no task behind."""
        tasks = {peer: asyncio.create_task(self.ask(peer, rpc, body, timeout_s=timeout_s)) for peer in peers}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await ended([task for task in tasks.values() if not task.done()])
        said = {peer: task for peer, task in tasks.items() if not task.cancelled()}
        given = {peer: task.result() for peer, task in said.items() if task.exception() is None}
        failed: dict[PeerId, PeerError] = {}
        for peer, task in said.items():
            error = task.exception()
            if isinstance(error, PeerError):
                failed[peer] = error
            elif error is not None:
                raise error
        return Answers(given, failed)


# --- asking members --------------------------------------------------------------------------------------------------
# A leader asks itself over the same path.


class StepCalls:
    """Calls of the step protocol. Every error names the member it came from."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def me(self) -> PeerId:
        """Our own identity."""
        return self._endpoint.peer

    async def ask(self, peer: PeerId, rpc: Rpc[RequestT, ReplyT], body: RequestT, *, timeout_s: float) -> ReplyT:
        """One member's answer. Raises a PeerError that names it."""
        try:
            answer, _ = await self._endpoint.call(peer, rpc, body, timeout_s=timeout_s)
        except PeerError as error:
            raise type(error)(error.reason, peer=peer) from error
        return answer


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
