"""The story of a replica that mixes with others while it trains: after each leg, with another group.

Wait-avoiding, after WAGMA (arXiv 2005.00124, §3): who comes to the end of a leg takes what the others of its group have
published last and goes on with the mean; who is late is not waited for, and finds the others' newest when it comes. A
version may be some legs old, but not the one with which all began, which would only hold the others back.
WAGMA's late process divides by S + 1 because the group's sum has its stale model in it and its fresh one comes on top.
Here everybody takes the mean itself, of one version of each member, its own being the fresh one, so nobody is in it
twice. What one learns while it takes the others' stays in its weights beside the mean.

The mean of all replicas is not kept exactly: one may be heard more often than another. That matters until the step
closes, where all are averaged exactly, each by the tokens that count for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from swarm.averaging.round import group_of
from swarm.averaging.strategies import Strategy
from swarm.averaging.versions import HeldVersion, TakeRequest, Version, take
from swarm.clock import Clock
from swarm.errors import PeerError, Violation
from swarm.events import EventSink, Mixed
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Endpoint
from swarm.planning.deadlines import AdaptiveDeadline

FLOOR_S, CEILING_S = 1.0, 60.0
"""Bounds of how long a version is waited for. It is not waited for with the training: that goes on."""

T = TypeVar("T")


class Runs(Protocol):
    """Where a part is worked on."""

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Run ``fn`` off the event loop, after everything asked for before."""


class MixedPart(HeldVersion, Protocol):
    """A part that trains apart; called where it is worked on, but for ``version``."""

    def mix(self, mine: Version, mean: torch.Tensor) -> bool:
        """Go as far as from ``mine`` to ``mean``; False when the step of that version is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingRules:
    """Who mixes with whom, every how many legs all do, when the step closes, and how many legs old a version may be."""

    strategy: Strategy
    seed: int
    sync_every: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingContext:
    """What mixing works with. ``held`` is our part with its replicas in the open step, None for none."""

    endpoint: Endpoint
    device: Runs
    clock: Clock
    events: EventSink
    held: Callable[[], tuple[PartName, MixedPart, Sequence[PeerId]] | None]


class Mixing:
    """Mixes one peer's part. Call :attr:`leg_over` from any thread after each leg, and :meth:`run`."""

    def __init__(self, context: MixingContext, rules: MixingRules) -> None:
        self._context, self._rules = context, rules
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._deadline = AdaptiveDeadline(FLOOR_S, CEILING_S)

    def leg_over(self) -> None:
        """There is a new version."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        """Mix whenever a leg is over, until cancelled. Legs that are over meanwhile are one."""
        while True:
            await self._news.wait()
            self._news.clear()
            held = self._context.held()
            if held is not None and held[1].version.leg % self._rules.sync_every:
                await self._mix(*held)

    async def _mix(self, name: PartName, part: MixedPart, replicas: Sequence[PeerId]) -> None:
        context, me, mine = self._context, self._context.endpoint.peer, part.version
        began, left_out = context.clock.monotonic(), dict[PeerId, str]()
        groups = self._rules.strategy.groups(replicas, mine.step, mine.leg - 1, self._rules.seed)
        others = [peer for peer in group_of(me, groups).members if peer != me]
        if not others:
            return
        total, ages = mine.params.detach().to("cpu", torch.float64, copy=True), list[int]()
        request = TakeRequest(part=name, step=mine.step, least=max(1, mine.leg - self._rules.staleness))

        async def one(peer: PeerId) -> None:
            try:
                theirs = await self._take(peer, request, total.numel())
                await context.device.run(_add, total, theirs, peer)
            except PeerError as error:
                left_out[peer] = f"{error.code}: {error.reason}"[:200]
            else:
                ages.append(mine.leg - theirs.leg)

        async with asyncio.TaskGroup() as asking:
            for peer in others:
                asking.create_task(one(peer))
        mixed = bool(ages) and await context.device.run(_mean_into, part, mine, total, len(ages) + 1)
        context.events.emit(
            Mixed(
                step=mine.step,
                part=name,
                leg=mine.leg,
                members=len(others) + 1,
                averaged=len(ages) + 1 if mixed else 1,
                oldest=max(ages, default=0),
                left_out=left_out,
                bytes_received=4 * total.numel() * len(ages),
                seconds=context.clock.monotonic() - began,
            )
        )

    async def _take(self, peer: PeerId, request: TakeRequest, elements: int) -> Version:
        clock = self._context.clock
        began = clock.monotonic()
        version = await take(self._context.endpoint, peer, request, elements, self._deadline.seconds())
        self._deadline.observe(clock.monotonic() - began)
        return version


def _add(total: torch.Tensor, theirs: Version, peer: PeerId) -> None:
    if not bool(torch.isfinite(theirs.params).all()):
        raise Violation("a version that is not finite", peer=peer)
    total.add_(theirs.params)


def _mean_into(part: MixedPart, mine: Version, total: torch.Tensor, count: int) -> bool:
    return part.mix(mine, (total / count).float())
