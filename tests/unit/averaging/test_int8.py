"""Rounds whose numbers travel as 8 bits: the same bits everywhere, near the mean, for a quarter of the bytes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from swarm.averaging.allreduce.messages import CHUNK
from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, RoundResult
from swarm.averaging.allreduce.round import RoundCall, average, plan_rounds
from swarm.averaging.strategies import STRATEGIES
from swarm.compression.blockwise import BLOCK
from swarm.errors import BugError, RoundFailed
from swarm.ids import PeerId, stage_part
from swarm.network.protocols import Answer, Incoming
from swarm.schema import Empty
from tests.harness.rigs.averaging import (
    EventList,
    Network,
    in_virtual_time,
    make_plan,
    names,
    only_results,
    play,
    right_mean,
    serve_members,
)

P0, P1, P2 = names(3)
CHUNK_ELEMENTS = 2 * BLOCK


def int8_plan(weights: list[int], elements: int) -> RoundPlan:
    return make_plan(weights, elements, codec="int8", chunk_elements=CHUNK_ELEMENTS)


def noise(plan: RoundPlan) -> dict[PeerId, torch.Tensor]:
    generator = torch.Generator().manual_seed(plan.elements)
    return {peer: torch.randn(plan.elements, generator=generator) for peer in plan.contributors}


@pytest.mark.parametrize("weights", [[1, 1], [3, 0, 2], [1, 2, 3, 4]])
async def test_every_member_holds_the_same_bits_within_the_bound(weights: list[int]) -> None:
    plan = int8_plan(weights, 5000)
    sums = noise(plan)
    results = list(only_results(await play(Network(), plan, sums)).values())
    assert len({(result.digest, result.squared_norm, result.tensor.numpy().tobytes()) for result in results}) == 1
    largest = max(float(values.abs().max()) for values in sums.values())
    rounded_sums = len(plan.contributors) * largest / 254 / plan.total_weight
    rounded_mean = float(right_mean(plan, sums).abs().max()) / 250
    off = (results[0].tensor - right_mean(plan, sums)).abs().max()
    assert 0 < off <= rounded_sums + rounded_mean
    assert results[0].squared_norm == pytest.approx(float(results[0].tensor.double().square().sum()))


def test_who_reduces_changes_no_bit() -> None:
    plan = int8_plan([1, 1, 1], 4096)
    other = dataclasses.replace(plan, shares={P2: 1})
    sums = noise(plan)
    aligned = [dataclasses.replace(each, aligned=True) for each in (plan, other)]
    results = [only_results(in_virtual_time(play(Network(), each, sums)))[P0] for each in aligned]
    assert torch.equal(results[0].tensor, results[1].tensor)
    assert results[0].digest == results[1].digest


async def test_a_quarter_of_the_bytes_travels() -> None:
    plan = int8_plan([1] * 4, 64 * CHUNK_ELEMENTS)
    network = Network()
    results = list(only_results(await play(network, plan, noise(plan))).values())
    for result in results:
        assert result.bytes_sent == pytest.approx(2 * 3 / 4 * plan.elements * (1 + 4 / BLOCK))
        assert result.bytes_sent == network.endpoints[P0].payload_sent


@pytest.mark.parametrize("culprit", [P0, P1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_sum_that_is_not_finite_fails_the_round_and_names_its_sender(value: float, culprit: PeerId) -> None:
    plan = int8_plan([1, 1, 1], 3000)
    sums = noise(plan)
    sums[culprit][plan.chunks_of(P1)[0].start] = value
    outcomes = await play(Network(), plan, sums)
    assert all(isinstance(outcome, RoundFailed) and culprit in str(outcome) for outcome in outcomes.values()), outcomes


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
async def test_reducer_that_answers_a_hostile_scale_is_named(scale: float) -> None:
    network, plan = Network(), int8_plan([1, 1], 2 * BLOCK)
    services = await serve_members(network, plan.members)

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        return Answer(Empty(), np.array([scale], "<f4").tobytes() + bytes(BLOCK))

    network.endpoints[P1].replace_handler(CHUNK, forge)
    services[P1].expect(plan)
    with pytest.raises(RoundFailed, match="scale") as caught:
        await services[P0].reduce(plan, torch.zeros(2 * BLOCK))
    assert caught.value.peer == P1


def test_float64_sums_do_not_travel_as_int8() -> None:
    with pytest.raises(BugError, match="int8"):
        make_plan([1, 1], 8, codec="int8", dtype="float64")


@pytest.mark.parametrize("strategy", ["grid", "butterfly-groups"])
@pytest.mark.parametrize("count", [4, 6, 8])
async def test_rounds_of_groups_that_swap_give_all_the_same_bits(strategy: str, count: int) -> None:
    """Where there are several rounds, sums travel rounded as means do: twice the error, and the same at everybody."""

    async def scene() -> list[RoundResult]:
        peers = names(count)
        services = await serve_members(Network(), peers)
        call = RoundCall(
            key=RoundKey(3, stage_part(1), 0),
            replicas=peers,
            weights={peer: number for number, peer in enumerate(peers)},
            elements=3 * 65536 + 7,
            timeout_s=60.0,
            codec="int8",
        )
        jobs = (
            average(services[peer], plan_rounds(call, STRATEGIES[strategy], peer), vectors[peer], EventList())
            for peer in peers
        )
        return await asyncio.gather(*jobs)

    generator = torch.Generator().manual_seed(count)
    vectors = {peer: torch.randn(3 * 65536 + 7, generator=generator) for peer in names(count)}
    results = await scene()
    assert len({(result.digest, result.squared_norm) for result in results}) == 1
    total = torch.stack([vectors[peer] for peer in names(count)[1:]]).double().sum(0)
    mean = (total / sum(range(count))).float()
    assert float((results[0].tensor - mean).abs().max()) < 0.1 * float(mean.abs().max())
