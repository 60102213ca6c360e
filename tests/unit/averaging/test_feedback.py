"""Rounds whose numbers travel as 4 bits: what is rounded off is at one member, and nothing is lost between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.averaging.allreduce.round import RoundCall, plan_rounds
from swarm.averaging.strategies import STRATEGIES
from swarm.compression.names import FED_BACK
from swarm.errors import BugError, RoundFailed
from swarm.ids import PeerId
from tests.harness.rigs.averaging import Network, in_virtual_time, make_plan, names, only_results, play

P0, P1, P2 = names(3)
CHUNK_ELEMENTS = 512


def int4h_plan(weights: list[int], elements: int = 5000, **more: object) -> RoundPlan:
    return make_plan(weights, elements, codec="int4h", chunk_elements=CHUNK_ELEMENTS, **more)


def noise(plan: RoundPlan) -> dict[PeerId, torch.Tensor]:
    generator = torch.Generator().manual_seed(plan.elements)
    return {peer: torch.randn(plan.elements, generator=generator) for peer in plan.members}


def averaged(plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor]) -> dict[PeerId, RoundResult]:
    return only_results(in_virtual_time(play(Network(), plan, sums)))


def left(result: RoundResult) -> torch.Tensor:
    assert result.left is not None
    return result.left


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 0, 2], [1, 2, 3, 4]])
def test_mean_and_what_is_left_are_together_what_was_sent(weights: list[int]) -> None:
    plan = int4h_plan(weights)
    sums = noise(plan)
    results = averaged(plan, sums)
    assert len({(each.digest, each.squared_norm, each.tensor.numpy().tobytes()) for each in results.values()}) == 1
    mean = results[P0].tensor.double()
    brought = sum((sums[peer].double() - left(results[peer]).double() for peer in plan.members), torch.zeros(()))
    assert torch.allclose(brought, mean * plan.total_weight, atol=1e-5 * plan.total_weight)
    right = sum((sums[peer].double() for peer in plan.contributors), torch.zeros(())) / plan.total_weight
    assert 0.05 < float((mean - right).norm() / right.norm()) < 0.3, "it was not rounded to 4 bits"


def test_member_that_contributes_nothing_is_left_all_that_it_has() -> None:
    plan = int4h_plan([1, 0, 1])
    sums = noise(plan)
    assert torch.equal(left(averaged(plan, sums)[P1]), sums[P1])
    without = {peer: values for peer, values in sums.items() if peer != P1}
    assert not left(averaged(plan, without)[P1]).any()


def test_member_that_only_reduces_is_left_what_its_means_lost_beside_it() -> None:
    plan = int4h_plan([1, 0, 1], shares={P1: 1})
    sums = noise(plan)
    results = averaged(plan, sums)
    assert not torch.equal(left(results[P1]), sums[P1])
    brought = sum((sums[peer].double() - left(results[peer]).double() for peer in plan.members), torch.zeros(()))
    assert torch.allclose(brought, results[P0].tensor.double() * 2, atol=1e-5)


def test_attempt_that_is_repeated_gives_the_same_bits_and_leaves_inputs_as_they_are() -> None:
    plan = int4h_plan([2, 1])
    sums = noise(plan)
    copies = {peer: values.clone() for peer, values in sums.items()}
    first, again = (averaged(dataclasses.replace(plan, key=plan.key._replace(attempt=n)), sums) for n in (0, 7))
    assert all(torch.equal(sums[peer], copies[peer]) for peer in sums)
    assert all(first[peer].digest == again[peer].digest for peer in sums)
    assert all(torch.equal(left(first[peer]), left(again[peer])) for peer in sums)


def test_an_eighth_of_the_bytes_travels() -> None:
    plan = int4h_plan([1] * 4, 64 * CHUNK_ELEMENTS)
    for result in averaged(plan, noise(plan)).values():
        assert result.bytes_sent == 2 * 3 / 4 * plan.elements * (0.5 + 2 / 64)


def test_what_is_fed_back_is_in_the_sum_of_the_means_of_many_rounds() -> None:
    plan, steps = int4h_plan([1, 1], 1024), 24
    sums = noise(plan)
    true, fed, without = (torch.zeros(1024, dtype=torch.float64) for _ in range(3))
    residuals = {peer: torch.zeros(1024) for peer in plan.members}
    for _ in range(steps):
        true += sum(sums.values(), torch.zeros(())).double() / 2
        results = averaged(plan, {peer: sums[peer] + residuals[peer] for peer in sums})
        residuals = {peer: left(result) for peer, result in results.items()}
        fed += results[P0].tensor.double()
        without += averaged(plan, sums)[P0].tensor.double()
    assert float((fed - true).norm() / true.norm()) < 0.02
    assert float((without - true).norm() / true.norm()) > 0.08


@pytest.mark.parametrize("culprit", [P0, P1])
async def test_sum_that_is_not_finite_fails_the_round_and_names_its_sender(culprit: PeerId) -> None:
    plan = int4h_plan([1, 1, 1])
    sums = noise(plan)
    sums[culprit][plan.chunks_of(P1)[0].start] = float("nan")
    outcomes = await play(Network(), plan, sums)
    assert all(isinstance(outcome, RoundFailed) and culprit in str(outcome) for outcome in outcomes.values()), outcomes


def test_other_codecs_leave_nothing() -> None:
    assert frozenset({"int4h"}) == FED_BACK
    for codec in ("float32", "int8"):
        plan = dataclasses.replace(int4h_plan([1, 1]), codec=codec)
        assert all(result.left is None for result in averaged(plan, noise(plan)).values())


def test_sums_of_several_members_are_not_rounded_so() -> None:
    call = RoundCall(
        key=int4h_plan([1]).key,
        replicas=names(4),
        weights=dict.fromkeys(names(4), 1),
        elements=1000,
        timeout_s=9.0,
        codec="int4h",
    )
    with pytest.raises(BugError, match="nobody's"):
        plan_rounds(call, STRATEGIES["grid"], P0)
