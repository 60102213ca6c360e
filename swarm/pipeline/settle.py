"""Making what a replica has accumulated equal to what the ledger assigns to it, at the closing of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Literal, Protocol

from swarm.errors import PeerError, Refused, WrongStep
from swarm.events import ContributionReplayed, ContributionReversed
from swarm.ids import PeerId, StepWork
from swarm.phases import complete
from swarm.pipeline.messages import ATTEND, ProbeRequest
from swarm.pipeline.recall import Errand, Missing, Recalls
from swarm.pipeline.seals import hash_of
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.pipeline.stage.table import MicrobatchTable

AT_A_TIME = 8
"""Microbatches replayed or reversed at a time: while one is computed the tensors of others are fetched."""

LIVING_TIMEOUT_S = 2.0
"""Who does not answer a question as small as can be in this time is not asked for tensors."""

Assigned = Mapping[StepWork, tuple[PeerId, ...]]
Verb = Literal["reverse", "replay"]
_Job = tuple[Verb, StepWork, Callable[[], Awaitable[None]]]


class Settling(Protocol):
    """A part of which each microbatch can be taken out, or put in."""

    async def held(self, step: int) -> frozenset[StepWork]:
        """Return what is in the sum of an open step now. Raises WrongStep."""

    async def reverse(self, work: StepWork) -> None:
        """Take one out, by what it was added from. Raises PeerError when that cannot be had, or is something else."""

    async def take_all_out(self, step: int) -> None:
        """Take all out of the sum of an open step. Raises PeerError when that cannot be done."""

    async def replay(self, work: StepWork, route: tuple[PeerId, ...]) -> None:
        """Put one in. Raises PeerError when what it takes cannot be had."""


async def settle(part: Settling, step: int, assigned: Assigned) -> None:
    """Reverse what is not assigned, replay what is missing, until exactly the assigned microbatches are in the sum.

    What can be done is done before what cannot is reported: Refused names each microbatch and the reason. May be
    repeated, with the same set or another; cancelled at any point it leaves each microbatch wholly in or wholly out.
    Work of the step that goes on meanwhile is looked at again, but may add more afterwards: the one who takes the sum
    compares the microbatches in the same piece of work on the device thread, and settles again.
    Cost: one forward and backward for each difference, and its tensors from the neighbours where they were dropped.
    Where a microbatch cannot be taken out, since a neighbour gives other tensors than it did or none, the whole sum is
    made anew: nobody has a say in what is taken out, and a microbatch that is put in again is bounded as any.
    """
    emptied = False
    while True:
        held, wanted = await part.held(step), frozenset(assigned)
        if held == wanted:
            return
        jobs: list[_Job] = [("reverse", one, partial(part.reverse, one)) for one in sorted(held - wanted)]
        jobs += [("replay", one, partial(part.replay, one, assigned[one])) for one in sorted(wanted - held)]
        failed = await _all(jobs)
        if not emptied and any(verb == "reverse" for verb, _ in failed):
            await part.take_all_out(step)
            emptied = True
        elif failed:
            more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
            raise Refused(f"{'; '.join(why for _, why in failed[:3])}{more}")


def not_as_added(work: StepWork) -> Refused:
    """Return the error that what a microbatch was added from cannot be had again."""
    return Refused(f"what is held or given of {work.microbatch} is not what was added")


async def _all(jobs: Iterable[_Job]) -> list[tuple[Verb, str]]:
    places = asyncio.Semaphore(AT_A_TIME)
    failures: list[tuple[Verb, str]] = []

    async def one(verb: Verb, work: StepWork, job: Callable[[], Awaitable[None]]) -> None:
        async with places:
            try:
                await job()
            except PeerError as error:
                failures.append((verb, f"cannot {verb} {work.microbatch}: {error}"[:300]))

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(*job))
    return failures


class StageSettling:
    """One replica's part. Implements :class:`Settling`."""

    def __init__(
        self,
        settings: StageSettings,
        context: StageContext,
        table: MicrobatchTable,
        recalls: Recalls,
        alike: Callable[[int, PeerId], Iterable[PeerId]],
    ) -> None:
        self._settings, self._context, self._table, self._recalls = settings, context, table, recalls
        self._alike = alike
        self._computed: dict[StepWork, Callable[[], None]] = {}
        """What is still to be done, in the loop, about work that the device has done: by microbatch."""

    async def held(self, step: int) -> frozenset[StepWork]:
        """See :class:`Settling`."""
        there = await self._context.device.run(self._context.compute.held, step)
        held = frozenset(work for work in there if work.hop == self._settings.hop)
        for work in list(self._computed):  # the one who waited for these was cancelled while the device computed
            self._follow_up(work)
        return held

    def _follow_up(self, work: StepWork) -> None:
        follow_up = self._computed.pop(work, None)
        if follow_up is not None:
            follow_up()

    async def reverse(self, work: StepWork) -> None:
        """See :class:`Settling`. What was dropped is fetched from the neighbours it came from."""
        state = self._table.find(work)
        if state is None:
            raise WrongStep(f"{work.microbatch} did not come by here in step {work.step}")
        try:
            material = await self._recalls.material(self._errand(state))
        except Missing:  # the one it came from may be gone: others of their stages can have it from the trainer
            state.route = await self._living(state.route)
            material = await self._recalls.material(self._errand(state))
        came = material.gradient if material.targets is None else material.targets
        if (await hash_of(material.input), await hash_of(came)) != state.hashes.came:
            raise not_as_added(work)

        def compute() -> None:
            self._context.compute.reverse(material)
            self._taken_out(state)

        await self._recalls.on_device(compute)
        self._follow_up(state.work)

    async def take_all_out(self, step: int) -> None:
        """See :class:`Settling`."""

        def compute() -> None:
            self._context.compute.take_all_out(step)
            for state in [one for one in self._table if one.work.step == step and one.accumulated]:
                self._taken_out(state)

        await self._recalls.on_device(compute)
        for work in list(self._computed):
            self._follow_up(work)

    def _taken_out(self, state: MicrobatchState) -> None:
        state.take_out()
        self._computed[state.work] = partial(self._reversed, state)

    def _reversed(self, state: MicrobatchState) -> None:
        part = self._settings.part
        self._context.events.emit(ContributionReversed(part=part, **state.work._asdict()))

    async def replay(self, work: StepWork, route: tuple[PeerId, ...]) -> None:
        """See :class:`Settling`. What is not held is fetched from the neighbours that ``route`` names."""
        state = self._table.place(work, route)
        state.in_use += 1
        try:
            await self._replay(state)
        finally:
            state.in_use -= 1

    async def _replay(self, state: MicrobatchState) -> None:
        material = await self._recalls.material(self._errand(state))

        def compute() -> None:
            new = state.work not in self._context.compute.held(state.work.step)
            result = complete(self._context.compute.contribute(material, None, None))
            state.accumulate(result.loss_sum, result.tokens)
            self._computed[state.work] = partial(self._replayed, state, new)

        await self._recalls.on_device(compute)
        self._follow_up(state.work)

    def _replayed(self, state: MicrobatchState, new: bool) -> None:
        state.take_graph()
        state.take_rest()
        if not state.dropped:
            self._table.retention.hold(state)
        if new:
            part = self._settings.part
            self._context.events.emit(ContributionReplayed(part=part, **state.work._asdict()))

    async def _living(self, route: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        """A route of those that answer: for each stage the one on it, else the first other; our own place as it is."""
        found = await asyncio.gather(*(self._first_living(stage, peer) for stage, peer in enumerate(route)))
        return tuple(found)

    async def _first_living(self, stage: int, preferred: PeerId) -> PeerId:
        if stage == self._settings.stage:
            return preferred
        for peer in dict.fromkeys((preferred, *self._alike(stage, preferred))):
            try:
                body = ProbeRequest(seconds=0.001)
                await self._context.endpoint.call(peer, ATTEND, body, timeout_s=LIVING_TIMEOUT_S)
            except PeerError:
                continue
            return peer
        return preferred

    def _errand(self, state: MicrobatchState) -> Errand:
        return Errand.of(state, self._settings.send_timeout_s)
