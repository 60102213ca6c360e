"""Noticing at once that a replica died: an open question to it, whose connection breaks with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from swarm.clock import Clock
from swarm.errors import DeadlineMissed, PeerError, Unreachable
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint
from swarm.pipeline.messages import ATTEND, ProbeRequest

QUESTION_S = 20.0
ANSWER_S = 30.0
"""A question is answered after QUESTION_S; who has not answered after ANSWER_S may be stalled, which is for the hops'
deadlines to find out."""


class LivenessProbes:
    """Open questions to replicas, one each until :meth:`close`, as tasks that ``begin`` begins. ``lost`` is told who
    broke off, once, and may call :meth:`need` again later. Costs one call in 20 s per replica in use."""

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None] | None],
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self._endpoint, self._clock, self._begin, self._lost = endpoint, clock, begin, lost
        self._asked: dict[PeerId, asyncio.Task[None]] = {}

    def need(self, peers: Iterable[PeerId]) -> None:
        """Attend to these as well; to nobody any more where nothing is begun."""
        for peer in peers:
            if peer not in self._asked and (task := self._begin(self._attend(peer))) is not None:
                self._asked[peer] = task

    def close(self) -> None:
        """Withdraw all questions, until one is needed again."""
        for task in self._asked.values():
            task.cancel()
        self._asked = {}

    async def _attend(self, peer: PeerId) -> None:
        body = ProbeRequest(seconds=QUESTION_S)
        while True:
            try:
                await self._endpoint.call(peer, ATTEND, body, timeout_s=ANSWER_S)
            except DeadlineMissed:
                continue
            except Unreachable as error:
                self._asked.pop(peer, None)
                self._lost(peer, error.reason)
                return
            except PeerError:  # it does not answer such questions, or not now
                await self._clock.sleep(QUESTION_S)
