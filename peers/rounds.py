"""A member's averaging rounds, as the manifest says they go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import torch

from peers.links import dial_only, links_of
from peers.roles import Surroundings
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.plan import RoundKey, RoundResult
from swarm.averaging.round import RoundCall, average, plan_rounds
from swarm.averaging.strategies.sites import plainest, strategy_at
from swarm.events import SumTaken
from swarm.ids import PartName
from swarm.optimization.history import History
from swarm.optimization.open_step import Round
from swarm.schema import AFTER_CHARS

ROUND_SHARE = 0.8
"""A round's share of the time that the leader waits for its outcome: so the round fails first and names the culprit."""


Averaged = Callable[[PartName, int, torch.Tensor], Awaitable[None]]


class Rounds:
    """See :class:`swarm.optimization.open_step.Average`. ``leader_waits_s`` is how long it takes for a leader to
    give up, where the leader itself says no less; ``averaged``
    is told of every mean (part, step, float32 on CPU). ``history`` ends with the record before the open step, which
    says to all replicas alike what their links are."""

    def __init__(
        self,
        around: Surroundings,
        allreduce: AllReduce,
        leader_waits_s: Callable[[], float],
        averaged: Averaged,
        history: History,
    ) -> None:
        self._around, self._allreduce, self._leader_waits_s = around, allreduce, leader_waits_s
        self._averaged, self._history = averaged, history

    async def __call__(self, wanted: Round, sums: torch.Tensor) -> RoundResult:
        """All rounds of our part's averaging. Raises RoundFailed."""
        # Before anything is waited for: what is added from now on is written after it.
        self._around.events.emit(SumTaken(step=wanted.step, part=wanted.part, attempt=wanted.attempt))
        manifest = self._around.manifest
        call = RoundCall(
            key=RoundKey(wanted.step, wanted.part, wanted.attempt, after=self._history.head_hash[:AFTER_CHARS]),
            replicas=tuple(wanted.weights),
            weights=wanted.weights,
            elements=sums.numel(),
            timeout_s=ROUND_SHARE * min(self._leader_waits_s(), wanted.within_s or math.inf),
            dtype="float64" if manifest.run.reproducible else "float32",
            codec=manifest.averaging.codec,
            seed=manifest.run.seed,
            schedule=manifest.averaging.schedule,
            turn=wanted.attempt if wanted.plainly else 0,
            links=links_of(self._history.head),
            dial_only=dial_only(self._history.head),
        )
        name = manifest.averaging.closing_strategy
        strategy = plainest(wanted.attempt, wanted.members) if wanted.plainly else strategy_at(name, wanted.members)
        # Comparing schedules for many members takes longer than a loop should stand still.
        plans = await asyncio.to_thread(plan_rounds, call, strategy, self._around.endpoint.peer)
        result = await average(self._allreduce, plans, sums, self._around.events)
        await self._averaged(wanted.part, wanted.step, result.tensor)
        return result
