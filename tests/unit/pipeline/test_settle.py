"""The end of a step: accumulators made equal to what the ledger assigns, from what was retained or from neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swarm.compression.dense import FLOAT32
from swarm.errors import PeerError, Refused, WrongStep
from swarm.events import Accumulated, ContributionReplayed, ContributionReversed, RetentionDropped
from swarm.ids import MicrobatchId, PeerId
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig, token_spec
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.boundary import BoundarySpecs
from swarm.sim.network import SimNetwork
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.pipeline import (
    TRAINER,
    Crew,
    FakeBatch,
    FakeLeader,
    FakeSource,
    LoopClock,
    Replica,
    TrainerSide,
    enter,
    failing,
    microbatch,
    tensor,
    working,
    works,
)

A0, A1, B0, B1, C0, C1 = (PeerId(name) for name in ("a0", "a1", "b0", "b1", "c0", "c1"))
STAGES = [[A0, A1], [B0, B1], [C0, C1]]
QUOTA = 6


@asynccontextmanager
async def fed(quota: int = QUOTA, **options: Any) -> AsyncIterator[tuple[Crew, dict[MicrobatchId, tuple[PeerId, ...]]]]:
    """A crew that has computed a step; its replicas still work. With the routes."""
    crew = await Crew.of(STAGES, **options)
    leader = FakeLeader(quota)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)
        yield crew, {journey.key.microbatch: journey.route for journey in leader.finished}


def along(route: tuple[PeerId, ...]) -> dict[MicrobatchId, tuple[PeerId, ...]]:
    """Everything, by that route."""
    return {microbatch(position): route for position in range(QUOTA)}


def dropped_all(crew: Crew) -> None:
    """The fault did fire: everything that could be dropped was."""
    for replica in crew.replicas.values():
        assert len(replica.events.of(RetentionDropped)) == len(replica.events.of(Accumulated))


@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
@pytest.mark.parametrize("budget", [1 << 20, 0], ids=["retained", "nothing retained"])
async def test_any_replica_can_be_assigned_anything(hosted: bool, budget: int) -> None:
    limits = {"retention_bytes": budget}
    async with fed(hosted=hosted, limits=limits, retention_bytes=budget) as (crew, routes):
        if not budget:
            dropped_all(crew)
        before = crew.sums()
        for route in ((A0, B0, C0), (A1, B1, C1), (A0, B1, C0)):
            others = [peer for peers in STAGES for peer in peers if peer not in route]
            await crew.settle(along(route))
            assert crew.sums() == before
            assert crew.held(*others) == set()
        await crew.settle(routes)
        assert crew.sums() == before


async def test_work_whose_settling_is_cancelled_while_the_device_does_it_is_told_by_the_next() -> None:
    async with fed() as (crew, routes):
        before = crew.sums()
        replica, route = crew.replicas[A1], (A1, B0, C0)
        told = [*replica.events.of(ContributionReplayed), *replica.events.of(ContributionReversed)]
        run, struck = replica.device.run, []

        async def run_and_cancel(fn: Any, *args: Any, **kwargs: Any) -> Any:
            result = await run(fn, *args, **kwargs)
            if fn.__name__ == "compute" and not struck:
                struck.append(settling.cancel())
                await asyncio.sleep(0)
            return result

        replica.device.run = run_and_cancel  # type: ignore[method-assign]
        own = {mb for mb, its in routes.items() if its[0] == A1}
        missing = set(map(microbatch, range(QUOTA))) - own
        assert missing
        settling = asyncio.ensure_future(replica.server.settle(1, works(along(route))))
        with pytest.raises(asyncio.CancelledError):
            await settling
        assert struck == [True]
        await replica.server.settle(1, works(along(route)))
        replayed = [event.microbatch for event in replica.events.of(ContributionReplayed)]
        assert not told
        assert sorted(replayed) == sorted(missing)
        await crew.settle(routes)
        assert crew.sums() == before
        reversed_too = [event.microbatch for event in replica.events.of(ContributionReversed)]
        assert sorted(reversed_too) == sorted(missing)


async def test_trainers_ends_are_settled_with_and_without_what_was_retained() -> None:
    for budget in (1 << 20, 0):
        async with fed(retention_bytes=budget) as (crew, routes):
            everything = dict(crew.side.part.held)
            fewer = {mb: routes[mb] for mb in list(routes)[:2]}
            for assigned in (fewer, {}, routes, fewer, routes):
                await crew.side.trainer.settle(1, works(assigned))
                assert set(crew.side.part.held) == set(assigned)
            assert crew.side.part.held == everything


async def test_what_no_neighbour_gives_again_is_taken_out_with_all_else() -> None:
    async with fed(limits={"retention_bytes": 0}) as (crew, routes):
        dropped_all(crew)
        mine = {mb: route for mb, route in routes.items() if route[1] == B0}
        out, refused = next(iter(mine)), list[PeerId]()
        for peer in STAGES[0]:
            recalls = crew.replicas[peer].server._recalls

            async def output(errand: Any, peer: PeerId = peer, honest: Any = recalls.output) -> Any:
                if errand.work.microbatch == out:
                    refused.append(peer)
                    raise Refused("it is not held any more")
                return await honest(errand)

            recalls.output = output  # type: ignore[method-assign]
        kept = {mb: route for mb, route in mine.items() if mb != out}
        await crew.replicas[B0].server.settle(1, works(kept))
        assert refused, "it was asked for what had been dropped"
        assert set(crew.replicas[B0].part.held) == set(kept)


@pytest.mark.parametrize("what", ["output", "input_gradient"])
async def test_neighbours_that_give_something_else_have_no_say_in_what_is_taken_out(what: str) -> None:
    async with fed(limits={"retention_bytes": 0}) as (crew, routes):
        dropped_all(crew)
        lies = list[PeerId]()
        for liar in STAGES[0] if what == "output" else STAGES[2]:

            async def lie(errand: Any, liar: PeerId = liar) -> Any:
                lies.append(liar)
                return tensor(1e6)

            setattr(crew.replicas[liar].server._recalls, what, lie)
        mine = {mb: route for mb, route in routes.items() if route[1] == B0}
        kept, out = dict(list(mine.items())[1:]), next(iter(mine))
        await crew.replicas[B0].server.settle(1, works(kept))
        assert lies, "it was asked for what had been dropped"
        assert set(crew.replicas[B0].part.held) == set(kept)
        events = crew.replicas[B0].events
        assert {event.microbatch for event in events.of(ContributionReversed)} == set(mine), "the sum was made anew"
        assert {event.microbatch for event in events.of(ContributionReplayed)} == set(mine) - {out}


async def test_trainers_ends_take_out_what_they_added_whatever_the_stages_give_again() -> None:
    async with fed(retention_bytes=0) as (crew, routes):
        lies = list[MicrobatchId]()

        async def lie(errand: Any) -> Any:
            lies.append(errand.work.microbatch)
            return tensor(1e6)

        for liar in STAGES[0]:
            crew.replicas[liar].server._recalls.input_gradient = lie  # type: ignore[method-assign]
        kept = dict(list(routes.items())[1:])
        await crew.side.trainer.settle(1, works(kept))
        assert lies
        assert set(crew.side.part.held) == set(kept)


async def test_a_broken_chain_is_named_and_the_rest_is_done() -> None:
    async with fed(limits={"retention_bytes": 0}) as (crew, routes):
        crew.kill(TRAINER)
        stranded = {mb: route for mb, route in routes.items() if route[1] == B0}
        own = dict.fromkeys(crew.replicas[B1].part.held)
        assert stranded
        with pytest.raises(Refused, match=r"cannot replay .*: b|cannot replay .*: a|cannot replay .*: c"):
            await crew.replicas[B1].server.settle(1, works({mb: (A0, B1, C0) for mb in [*stranded, *own]}))
        assert set(crew.replicas[B1].part.held) == set(own)


async def test_a_trainer_that_is_gone_is_not_needed_while_neighbours_retain() -> None:
    async with fed() as (crew, routes):
        before = crew.sums()
        crew.network.kill(TRAINER)
        middle = {mb: (route[0], B1, route[2]) for mb, route in routes.items()}
        crew.network.kill(B0)
        crew.struck.append(B0)
        await crew.settle(middle)
        assert crew.sums() == before


async def test_settling_what_is_not_open_or_not_ours_is_refused() -> None:
    async with fed() as (crew, _):
        with pytest.raises(WrongStep):
            await crew.replicas[A0].server.settle(2, {})
        with pytest.raises(WrongStep):
            await crew.side.trainer.settle(2, {})
        with pytest.raises(Refused, match="does not lead through"):
            await crew.replicas[A0].server.settle(1, works(along((A1, B0, C0))))


async def test_settling_cancelled_anywhere_leaves_each_microbatch_in_or_out() -> None:
    async with fed() as (crew, _):
        replica, wanted = crew.replicas[B0], along((A0, B0, C0))
        for turns in range(0, 60, 3):
            settling = asyncio.create_task(replica.server.settle(1, works(wanted if turns % 2 else {})))
            for _ in range(turns):
                await asyncio.sleep(0)
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
            accumulated = {p.key.microbatch for p in replica.server._table if p.accumulated}
            assert accumulated == set(replica.part.held)
        await replica.server.settle(1, works(wanted))
        assert set(replica.part.held) == set(wanted)


async def test_a_microbatch_that_cannot_be_computed_is_named_and_ends_nothing() -> None:
    async with fed() as (crew, _):
        crew.replicas[B0].part.on["forward"] = failing(RuntimeError("CUDA out of memory"))
        missing = set(along((A0, B0, C0))) - set(crew.replicas[B0].part.held)
        assert missing
        with pytest.raises(PeerError, match="CUDA out of memory"):
            await crew.replicas[B0].server.settle(1, works(along((A0, B0, C0))))


# --- real numbers ----------------------------------------------------------------------------------------------------

MODEL = GptConfig(vocab_size=300, dim=16, layers=2, heads=2, context=8, dropout=0.1)
SPLIT = SplitConfig(stages=2)


class TokenSource(FakeSource):
    """Random tokens, the same for the same position."""

    def take(self) -> FakeBatch:
        """See :class:`~swarm.pipeline.batch.BatchSource`."""
        batch = super().take()
        tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(batch.id.position))
        return FakeBatch(batch.id, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def trained_part(name: str) -> TrainedPart:
    """One of the model's parts in the reproducible mode."""
    spec = next(spec for spec in family_of(MODEL).parts(SPLIT) if spec.name == name)
    part = TrainedPart(spec, MODEL, AdamW(OptimizerConfig()), accumulator="float64")
    part.install(initial_snapshot(spec.name, part.layout, family_of(MODEL).initial_weights(0)))
    return part


@pytest.mark.parametrize("most", [0.0, 0.4])
async def test_sums_are_the_same_bits_whoever_computed_them_in_the_end(most: float) -> None:
    """Also where most of the microbatches are scaled down, and of some what comes for them."""
    activation = family_of(MODEL).boundary(2, 8)
    boundary = BoundarySpecs(activation=activation, tokens=token_spec(2, 8), codec=FLOAT32, hosted=False)
    stages = [[A0, A1], [B0, B1]]
    network = SimNetwork(LoopClock())
    (home,) = await enter(network, TRAINER)
    ends = trained_part("ends")
    side = TrainerSide(home, stages, boundary=boundary, part=ends, source=TokenSource())
    replicas = {}
    for stage, peers in enumerate(stages):
        for peer, endpoint in zip(peers, await enter(network, *peers), strict=True):
            replicas[peer] = Replica(endpoint, stage, 2, part=trained_part(f"stage-{stage}"), boundary=boundary)

    assert side.context.ends is not None
    for bounds in [side.context.ends.bounds, *(replica.compute.bounds for replica in replicas.values())]:
        if most:
            bounds.open(0, (most / 10, most), 1.0)

    def total(stage: int) -> torch.Tensor:
        first, second = (replicas[peer].part.gradient_sum() for peer in stages[stage])
        return first + second

    leader = FakeLeader(QUOTA)
    async with working(*replicas.values()), asyncio.timeout(120):
        await leader.fed_by(side.trainer)
        totals, own = [total(0), total(1)], ends.gradient_sum()
        assert all(float(found.abs().sum()) > 0 for found in [*totals, own])
        routes = {journey.key.microbatch: journey.route for journey in leader.finished}
        for route in ((A0, B1), (A1, B0)):
            for stage in range(2):
                for peer in stages[stage]:
                    mine = dict.fromkeys(routes, route) if peer in route else {}
                    await replicas[peer].server.settle(1, works(mine))
            assert [torch.equal(total(stage), totals[stage]) for stage in range(2)] == [True, True]
        await side.trainer.settle(1, {})
        assert float(ends.gradient_sum().abs().sum()) == 0.0
        await side.trainer.settle(1, works(routes))
        assert torch.equal(ends.gradient_sum(), own)
    own, came = zip(*(part.lengths(1) for part in (ends, replicas[A1].part, replicas[B0].part)), strict=True)
    assert (min(own) > most / 10 and came[-1] > most) == bool(most), f"the bounds were felt by {own}, {came}"
    assert len(replicas[A0].events.of(Accumulated)) + len(replicas[A1].events.of(Accumulated)) == QUOTA
