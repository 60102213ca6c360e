"""Which sums are left out of a mean because they are far from the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.guard import distances, far_out
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.averaging.allreduce.round import average
from swarm.errors import BugError
from swarm.ids import PeerId
from tests.harness.rigs.averaging import EventList, Network, make_plan, names, serve_members

Values = NDArray[np.float32]


def honest(weights: Mapping[PeerId, int], elements: int = 4096, seed: int = 0) -> dict[PeerId, Values]:
    """Sums of a common gradient with each token's noise: by member, over as many tokens as its weight says."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(elements)
    return {
        peer: (weight * common + np.sqrt(weight) * 8 * rng.standard_normal(elements)).astype(np.float32)
        for peer, weight in weights.items()
    }


async def averaged(
    plan: RoundPlan,
    services: Mapping[PeerId, AllReduce],
    sums: Mapping[PeerId, torch.Tensor],
    told: Mapping[PeerId, EventList],
) -> list[RoundResult]:
    """What each member got."""
    return await asyncio.gather(*(average(services[peer], [plan], sums[peer], told[peer]) for peer in plan.members))


@pytest.mark.parametrize("weights", [(64, 64, 64), (100, 20, 50), (64, 64, 64, 64), (8, 64, 64, 8, 64, 64, 64)])
def test_honest_sums_are_left_in_however_their_weights_differ(weights: tuple[int, ...]) -> None:
    by_peer = dict(zip(names(len(weights)), weights, strict=True))
    for seed in range(20):
        assert far_out(honest(by_peer, seed=seed), by_peer) == []


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda values: values * -10,
        lambda values: values * 1e30,
        lambda values: values * 0 + 1e3,
        lambda values: values * 60,
    ],
)
@pytest.mark.parametrize("count", [3, 4, 5])
def test_loud_sum_is_left_out_and_no_other(count: int, corrupt: Callable[[Values], Values]) -> None:
    by_peer = dict.fromkeys(names(count), 64)
    sums = honest(by_peer)
    bad = names(count)[1]
    sums[bad] = corrupt(sums[bad])
    assert far_out(sums, by_peer) == [bad]


@pytest.mark.parametrize("apart", [0.1, 0.01, 0.001])
def test_distances_of_sums_that_are_nearly_alike_are_no_rounding(apart: float) -> None:
    """Who reduces a mean, and who does so again, may have other machines."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(1 << 15)
    sums = {
        peer: (common + apart * (1 + number) * rng.standard_normal(1 << 15)).astype(np.float32)
        for number, peer in enumerate(names(3))
    }
    exact = {peer: values.astype(np.float64) for peer, values in sums.items()}
    assert distances(sums, dict.fromkeys(sums, 1)) == pytest.approx(distances(exact, dict.fromkeys(sums, 1)), rel=1e-5)


def test_of_two_nobody_is_left_out_nor_of_three_that_are_alike() -> None:
    two = dict.fromkeys(names(2), 64)
    sums = honest(two)
    sums[names(2)[1]] *= -100
    assert far_out(sums, two) == []
    alike = {peer: np.ones(8, np.float32) for peer in names(3)}
    for change in (np.float32(1e-7), np.float32(9e-4)):
        alike[names(3)[0]] = np.ones(8, np.float32) + change
        assert far_out(alike, dict.fromkeys(names(3), 64)) == []


def test_member_that_saw_tokens_which_others_did_not_is_left_in() -> None:
    weights = dict.fromkeys(names(5), 64)
    sums = honest(weights, 256)
    for peer in names(5)[2:]:
        sums[peer][:] = 0
    assert far_out(sums, weights) == []
    three = dict.fromkeys(names(3), 64)
    assert far_out({peer: sums[peer] for peer in three}, three) == []


def test_sum_that_is_not_finite_is_left_to_the_mean_which_names_its_sender() -> None:
    by_peer = dict.fromkeys(names(3), 64)
    sums = honest(by_peer)
    sums[names(3)[2]][7] = np.nan
    assert far_out(sums, by_peer) == []


@pytest.mark.parametrize(("codec", "error"), [("float32", 1e-6), ("int8", 0.05)])
async def test_guarded_round_gives_all_the_mean_of_the_others_and_tells_whom_it_left_out(
    codec: str, error: float
) -> None:
    weights = dict(zip(names(4), (64, 64, 32, 64), strict=True))
    plan: RoundPlan = make_plan(weights, 4096, chunk_elements=256, signed=False, guarded=True, codec=codec)
    network = Network()
    services = await serve_members(network, plan.members)
    sums = {peer: torch.from_numpy(values) for peer, values in honest(weights).items()}
    liar = plan.members[1]
    sums[liar] *= -10
    told = {peer: EventList() for peer in plan.members}
    results = await averaged(plan, services, sums, told)
    others = [peer for peer in plan.members if peer != liar]
    mean = torch.stack([sums[peer].double() for peer in others]).sum(0) / sum(weights[peer] for peer in others)
    assert len({result.digest for result in results}) == 1
    assert (results[0].tensor - mean).norm() < error * mean.norm()
    for peer in plan.members:  # the liar, too, computes its chunks as all do
        assert results[plan.members.index(peer)].left_out == {liar: sum(c.elements for c in plan.chunks_of(peer))}


async def test_guarded_round_of_honest_members_gives_the_bits_of_one_that_is_not() -> None:
    plan = make_plan([64, 64, 64], 256, chunk_elements=64, signed=False)
    guarded = replace(plan, guarded=True)
    sums = {peer: torch.from_numpy(values) for peer, values in honest(plan.weights, 256).items()}
    digests = set()
    for one in (plan, guarded):
        services = await serve_members(Network(), one.members)
        results = await averaged(one, services, sums, {peer: EventList() for peer in one.members})
        digests |= {result.digest for result in results}
    assert len(digests) == 1
    assert plan.digest != guarded.digest, "members that guard, and that do not, do not exchange anything"


def test_round_whose_sums_are_several_members_cannot_be_guarded() -> None:
    for change in ({"schedule": "ring"}, {"gives": "sum"}, {"codec": "int4h"}):
        with pytest.raises(BugError, match="left out"):
            make_plan([1, 1, 1], 8, guarded=True, **change)
