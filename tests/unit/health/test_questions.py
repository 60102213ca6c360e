"""Questions to one peer of which several are answered at once, one way and another."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from swarm.errors import DeadlineMissed, Unreachable
from swarm.health.heartbeat import Heartbeat, HeartbeatReply, Questions
from swarm.ids import PeerId
from swarm.network.protocols import LinkStatistics
from tests.harness.rigs.clocks import in_virtual_time

PEER = PeerId("p")
STANDING = HeartbeatReply(step=0, member=True, incarnation=1)


class Line:
    """Calls to a peer that the test answers."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[HeartbeatReply]] = []

    async def call(self, *args: Any, **options: Any) -> tuple[HeartbeatReply, memoryview]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1], memoryview(b"")

    def statistics(self) -> LinkStatistics:
        return LinkStatistics({}, {})


def test_questions_that_fail_as_another_is_answered_are_nobodys_business() -> None:
    complaints: list[dict[str, Any]] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        line = Line()
        questions = Questions(line, PEER, 1.0, 60.0)  # type: ignore[arg-type]
        for _ in range(20):
            with pytest.raises(DeadlineMissed):
                await questions.ask(Heartbeat())
        asking = asyncio.create_task(questions.ask(Heartbeat()))
        await asyncio.sleep(0.5)
        for call in line.calls[:-1]:
            call.set_exception(Unreachable("the stream broke", peer=PEER))
        line.calls[-1].set_result(STANDING)
        assert await asking == STANDING
        await questions.close()
        line.calls.clear()
        gc.collect()
        await asyncio.sleep(0)

    in_virtual_time(story())
    assert complaints == []
