"""An open step whose questions are cancelled where they are answered."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from swarm.ids import stage_part
from swarm.step.member.open_step import Mean, OpenStep
from swarm.step.messages import Averaged, Reconcile
from tests.harness.rigs.step import stop

PART = stage_part(0)


def asked(*routes: str) -> Reconcile:
    return Reconcile.model_construct(committed=cast(Any, routes), attempts={str(PART): 1})


async def test_question_cancelled_while_it_ends_the_attempt_before_leaves_none_that_is_taken_for_running() -> None:
    state, endless, ending = OpenStep(cast(Any, None)), asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> Mean:
        try:
            await endless.wait()
        except asyncio.CancelledError:
            ending.set()
            await asyncio.sleep(0)
            raise
        raise AssertionError

    async def result() -> Mean:
        return Mean(None, Averaged.model_construct(failure=""))

    await state.begin(asked("one way"), PART, slow_to_end)
    await asyncio.sleep(0)
    second = asyncio.create_task(state.begin(asked("another"), PART, result))
    await ending.wait()
    await stop(second)
    await state.begin(asked("one way"), PART, result)
    assert (await state.wait_mean()).answer.failure == ""
