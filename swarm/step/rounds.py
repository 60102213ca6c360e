"""Run a member's averaging rounds as the manifest says they go, with the links that the close record names."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import torch

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.plan import RoundKey, RoundResult
from swarm.averaging.allreduce.round import RoundCall, average, plan_rounds
from swarm.averaging.config import AveragingConfig
from swarm.averaging.deadline import RoundDeadline
from swarm.averaging.schedules.costs import LinkCost
from swarm.averaging.strategies import plainest, strategy_at
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member
from swarm.events import EventSink, SumTaken
from swarm.ids import PartName, PeerId
from swarm.schema import AFTER_CHARS
from swarm.step.member.open_step import Round

ROUND_SHARE = 0.8
"""A round's share of the time that the leader waits for its outcome: so the round fails first and names the culprit."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """See :class:`swarm.step.member.open_step.Average`. ``averaging``, ``seed`` and ``reproducible`` are the
    manifest's. ``deadline`` is how long it takes for a leader to give up on a part, plainly or not, where the leader
    itself says no less; ``averaged`` is told of every mean (part, step, float32 on CPU). ``history`` ends with the
    record before the open step, which says to all replicas alike what their links are. ``sums`` is what is averaged
    just now."""

    me: PeerId
    averaging: AveragingConfig
    seed: int
    reproducible: bool
    allreduce: AllReduce
    events: EventSink
    history: History
    deadline: Callable[[PartName, bool], RoundDeadline]
    averaged: Callable[[PartName, int, torch.Tensor], Awaitable[None]]
    sums: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the sum that is averaged just now, and of the mean that comes of it."""
        return 0 if self.sums is None else self.sums.nbytes + 4 * self.sums.numel()

    async def __call__(self, wanted: Round, sums: torch.Tensor) -> RoundResult:
        """All rounds of our part's averaging. Raises RoundFailed."""
        # Before anything is waited for: what is added from now on is written after it.
        self.events.emit(SumTaken(step=wanted.step, part=wanted.part, attempt=wanted.attempt))
        allowed = self.deadline(wanted.part, wanted.plainly)
        logger.debug("step %d, the leader waits %.3g s: %s", wanted.step, allowed.seconds, allowed.reason)
        call = RoundCall(
            key=RoundKey(wanted.step, wanted.part, wanted.attempt, after=self.history.head_hash[:AFTER_CHARS]),
            replicas=tuple(wanted.weights),
            weights=wanted.weights,
            elements=sums.numel(),
            timeout_s=ROUND_SHARE * min(allowed.seconds, wanted.within_s or math.inf),
            dtype="float64" if self.reproducible else "float32",
            codec=self.averaging.codec,
            seed=self.seed,
            schedule=self.averaging.schedule,
            turn=wanted.attempt if wanted.plainly else 0,
            links=links_of(self.history.head),
            dial_only=dial_only(self.history.head),
            guarded=self.averaging.guard != "none",
            checked=self.averaging.check,
            divide_by=wanted.divide_by,
        )
        name = self.averaging.closing_strategy
        strategy = plainest(wanted.attempt, wanted.members) if wanted.plainly else strategy_at(name, wanted.members)
        # Comparing schedules for many members takes longer than a loop should stand still.
        plans = await asyncio.to_thread(plan_rounds, call, strategy, self.me)
        self.sums = sums
        try:
            result = await average(self.allreduce, plans, sums, self.events)
        finally:
            self.sums = None
        await self.averaged(wanted.part, wanted.step, result.tensor)
        return result


# --- links -----------------------------------------------------------------------------------------------------------
# What a close record says of the links between the replicas of a part, as their averaging sees it. Pure.


ASSUMED_BYTES_PER_S = 12_500_000
"""Of a link whose latency alone is known yet, because only small vectors went over it: 100 Mbit/s."""


def links_of(record: CloseRecord) -> Mapping[PeerId, LinkCost]:
    """Those that were measured, of the members of the next step."""
    return {
        PeerId(member.peer): LinkCost(
            latency_s=record.links[member.peer][0] / 1e6,
            bytes_per_s=record.links[member.peer][1] or ASSUMED_BYTES_PER_S,
            site=site_of(member),
        )
        for member in record.roster
        if member.peer in record.links
    }


def dial_only(record: CloseRecord) -> frozenset[PeerId]:
    """Members that call others, and that nobody should call where there is a choice."""
    return frozenset(PeerId(member.peer) for member in record.roster if member.outgoing)


def site_of(member: Member) -> str:
    """Return whose link it shares: the host of its most useful address, itself where that says nothing. Behind one
    router all have the same."""
    for address in member.addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and "p2p-circuit" not in parts:
            return parts[2]
    return member.peer
