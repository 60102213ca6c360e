"""The page to read first: what a peer does, step after step.

    open the step      everybody works with the parameters of the last close record
    feed it            trainers lease quota and send microbatches on their journeys       (pipeline.trainer)
    close it           the leader averages, decides and has everybody swap                (optimization.step)

Stage replicas compute all the while (``pipeline.server``); a member answers its leader (``optimization.member``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.optimization.lead import LeadDesk
from swarm.optimization.member import Member
from swarm.optimization.parting import Parting
from swarm.optimization.step import Closing, close_step

Feed = Callable[[int], Coroutine[Any, Any, None]]
"""A trainer's work for one step."""


class StepLoop:
    """Runs the steps of one peer until the last one is closed, or a record lets it leave."""

    def __init__(self, member: Member, desk: LeadDesk, closing: Closing, parting: Parting, feed: Feed | None) -> None:
        self._member, self._desk, self._closing, self._feed = member, desk, closing, feed
        self._parting = parting

    async def run(self) -> None:
        """Take part from the step in which this peer is in the roster. Raises, in an ExceptionGroup, what ends it
        earlier."""
        try:
            await self._member.wait_member()
            while (step := self._member.open_step) <= self._closing.rules.steps and not self._member.departed:
                leader = self._member.roster.leader(step)
                async with asyncio.TaskGroup() as group:
                    if self._feed is not None:
                        group.create_task(self._feed(step))
                    if leader == self._closing.calls.me:
                        group.create_task(self._lead(step))
                    await self._member.wait_open(step + 1)
                last = self._member.departed or step >= self._closing.rules.steps
                if last and leader != self._closing.calls.me:
                    await self._parting.wait(leader)
        finally:
            await self._member.close()

    async def _lead(self, step: int) -> None:
        """Close the step when its batch is complete, and let those go who leave with it: all, with the last one."""
        before = self._member.roster
        committed = await self._desk.wait_full()
        record = await close_step(self._closing, step, committed)
        last = step >= self._closing.rules.steps
        leaving = before.peers if last else [peer for peer in before.peers if peer not in record.members]
        await self._parting.dismiss(self._closing.calls, leaving, step)
