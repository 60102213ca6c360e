"""The story of a replica that mixes with others while it trains: after each leg, with others than before.

Wait-avoiding (:mod:`swarm.averaging.gossip.wait_avoiding`): who comes to the end of a leg takes what the others of its
group have published last, and nobody waits for anybody. To their mixture it adds its own version, the sum of S and one
divided by S + 1; where that is so old that it would hold them back it takes the mixture alone. The version with which
all began is nobody's contribution. What one learns while it takes the others' versions stays beside the mean.

The mean of all replicas is not kept exactly: one may be heard more often than another. That matters until the step
closes, where all are averaged exactly, each by the tokens that count for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from swarm.averaging.allreduce.round import group_of
from swarm.averaging.gossip.patience import CEILING_S, PatientCalls
from swarm.averaging.gossip.versions import HeldVersion, TakeRequest, Version, take
from swarm.averaging.gossip.wait_avoiding import Published, WaitAvoiding
from swarm.averaging.strategies import Strategy
from swarm.clock import Clock
from swarm.device import Executor
from swarm.errors import PeerError, Violation
from swarm.events import EventSink, Mixed
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Endpoint

T = TypeVar("T")


class MixedPart(HeldVersion, Protocol):
    """A part that trains apart; called where it is worked on, but for ``version``."""

    def mix(self, mine: Version, mean: torch.Tensor) -> bool:
        """Go as far as from ``mine`` to ``mean``; False when the step of that version is over."""


Held = tuple[PartName, MixedPart, Sequence[PeerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingRules:
    """The rules of mixing: groups, the largest age of a version, and a replica's largest distance (L2 norm) from the
    anchor."""

    strategy: Strategy
    seed: int
    wait_avoiding: WaitAvoiding
    reach: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingContext:
    """The shared objects of mixing. ``held`` is our part with its replicas in the open step, None for none."""

    endpoint: Endpoint
    device: Executor
    clock: Clock
    events: EventSink
    held: Callable[[], Held | None]


class Mix(Protocol):
    """One way to mix."""

    async def mix(self, beside: asyncio.TaskGroup, name: PartName, part: MixedPart, replicas: Sequence[PeerId]) -> None:
        """After a leg. What goes wrong with others is told by an event, and ends nothing; calls to those who are late
        go on ``beside``."""


class Mixing:
    """Mixes one peer's part. Call :attr:`leg_over` from any thread after each leg, and :meth:`run`. After every
    ``sync_every``-th leg the step is about to close, where all average: nobody mixes then."""

    def __init__(self, mixes: Mix, held: Callable[[], Held | None], sync_every: int) -> None:
        self._mixes, self._held, self._sync_every = mixes, held, sync_every
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def leg_over(self) -> None:
        """There is a new version."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        """Mix whenever a leg is over, until cancelled. Legs that are over meanwhile are one."""
        mixed = (0, 0)
        async with asyncio.TaskGroup() as beside:
            while True:
                await self._news.wait()
                self._news.clear()
                held = self._held()
                if held is None:
                    continue
                at = held[1].version.step, held[1].version.leg
                if at != mixed and at[1] % self._sync_every:
                    mixed = at
                    await self._mixes.mix(beside, *held)


class Taking:
    """Mixes by taking what the others of a group have published."""

    def __init__(self, context: MixingContext, rules: MixingRules) -> None:
        self._context, self._rules = context, rules
        self._patience = PatientCalls[Version](context.clock)

    async def mix(self, beside: asyncio.TaskGroup, name: PartName, part: MixedPart, replicas: Sequence[PeerId]) -> None:
        """See :class:`Mix`: with a group that is another after each leg."""
        context, me, mine = self._context, self._context.endpoint.peer, part.version
        began = context.clock.monotonic()
        groups = self._rules.strategy.groups(replicas, mine.step, mine.leg - 1, self._rules.seed)
        others = [peer for peer in group_of(me, groups).members if peer != me]
        if not others:
            return
        request = TakeRequest(part=name, step=mine.step, least=max(1, mine.leg - self._rules.wait_avoiding.most_stale))

        def ask(peer: PeerId) -> Awaitable[Version]:
            return take(context.endpoint, peer, request, mine.params.numel(), CEILING_S)

        answers = await self._patience.answers(beside, others, ask)
        settled, published, left_out = await context.device.run(_settle, self._rules, part, (me, mine), answers)
        context.events.emit(
            Mixed(
                step=mine.step,
                part=name,
                leg=mine.leg,
                members=len(others) + 1,
                averaged=len(published) + (settled != "too old") if settled else 1,
                oldest=max((mine.leg - one.version for one in published.values()), default=0),
                left_out=left_out,
                own=settled or "alone",
                bytes_received=4 * mine.params.numel() * len(published),
                seconds=context.clock.monotonic() - began,
            )
        )


def why_not(answers: Mapping[PeerId, object]) -> dict[PeerId, str]:
    """Return the event's words about members without a valid answer."""
    errors = {peer: error for peer, error in answers.items() if isinstance(error, PeerError)}
    return {peer: f"{error.code}: {error.reason}"[:200] for peer, error in errors.items()}


def check_near(theirs: torch.Tensor, ours: torch.Tensor, reach: float, peer: PeerId) -> None:
    """Raises Violation for weights that no honest replica has: both may be ``reach`` away from where all began. Cost:
    two passes and 4 bytes an element, so call it where the part is worked on."""
    if not float(torch.linalg.vector_norm(theirs - ours)) <= 2 * reach:  # nor for one that is not finite
        raise Violation("weights that are not finite, or farther away than training leads", peer=peer)


def _settle(
    rules: MixingRules,
    part: MixedPart,
    own: tuple[PeerId, Version],
    answers: Mapping[PeerId, Version | PeerError],
) -> tuple[str, dict[PeerId, Published], dict[PeerId, str]]:
    """Go on from what the rules say, "" where nobody was heard or the step is over; whose versions count, and why the
    others' do not. How far the others are is what at least two say: a leg that one alone claims makes nobody too old.
    """
    me, mine = own
    checked = {peer: _checked(peer, one, mine, rules.reach) for peer, one in answers.items()}
    published = {peer: Published(one.leg, one.params) for peer, one in checked.items() if isinstance(one, Version)}
    left_out = why_not(checked)
    newest = sorted([mine.leg, *(one.version for one in published.values())])[-2:][0]
    counted = {peer: replace(one, version=min(one.version, newest)) for peer, one in published.items()}
    mixture, _ = rules.wait_avoiding.mix(sorted(counted), counted, newest)
    if mixture is None:
        return "", published, left_out
    settled = rules.wait_avoiding.settle(mixture, me, Published(min(mine.leg, newest), mine.params.cpu()))
    return settled.how if part.mix(mine, settled.vector) else "", published, left_out


def _checked(peer: PeerId, answer: Version | PeerError, mine: Version, reach: float) -> Version | PeerError:
    try:
        if isinstance(answer, Version):
            check_near(answer.params, mine.params, reach, peer)
    except Violation as error:
        return error
    return answer
