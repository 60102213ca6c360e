"""Rounds that nobody signs off: who is done leaves, and has given the others all they need from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.messages import AGREE, CHUNK, ENTER, Agreement
from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, RoundResult
from swarm.averaging.allreduce.round import RoundCall, plan_rounds
from swarm.averaging.schedules import ScheduleName
from swarm.averaging.strategies import STRATEGIES, Strategy
from swarm.averaging.strategies.exact import Hierarchy, Plain, Server
from swarm.errors import BugError, RoundFailed, Violation
from swarm.ids import PeerId, stage_part
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import (
    Network,
    flip_a_bit,
    kill_at,
    make_plan,
    names,
    only_results,
    play,
    reduce_at,
    right_mean,
    serve_members,
    whole_numbers,
)

P0, P1, P2 = names(3)


def unsigned(weights: Sequence[int]) -> RoundPlan:
    return make_plan(weights, 36, signed=False)


@pytest.mark.parametrize(
    ("strategy", "schedule", "signed"),
    [
        (STRATEGIES["everyone"], "direct", False),
        (STRATEGIES["everyone"], "ring", True),
        (STRATEGIES["grid"], "direct", True),
        (Hierarchy({P0: "here", P1: "here", P2: "there"}), "direct", True),
        (Server(), "direct", True),
        (Plain(0), "direct", True),
    ],
    ids=["everyone", "tree", "grid", "hierarchy", "server", "plain"],
)
def test_only_one_round_straight_to_who_reduces_is_not_signed(
    strategy: Strategy, schedule: ScheduleName, signed: bool
) -> None:
    replicas = names(3 if isinstance(strategy, Hierarchy) else 4)
    key = RoundKey(3, stage_part(1), 0)
    call = RoundCall(
        key=key, replicas=replicas, weights=dict.fromkeys(replicas, 1), elements=10, timeout_s=5.0, schedule=schedule
    )
    assert {plan.signed for plan in plan_rounds(call, strategy, P0)} == {signed}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 2], [1, 0], [1, 0, 0], [2, 0, 1, 0]])
async def test_all_have_the_mean_whoever_leaves_first_and_nobody_signs(weights: list[int], seed: int) -> None:
    plan, network = unsigned(weights), Network(seed=seed, slowest_s=0.5)
    sums = whole_numbers(plan)
    results = only_results(await play(network, plan, sums))
    assert {result.digest for result in results.values()} == {results[P0].digest}
    assert all(torch.equal(result.tensor, right_mean(plan, sums)) for result in results.values())
    assert not network.calls[AGREE]


@pytest.mark.parametrize("victim", names(3))
@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 0, 1]])
@pytest.mark.parametrize("method", [ENTER, CHUNK])
async def test_member_dead_at_any_call_leaves_the_others_with_the_mean_or_its_name(
    victim: PeerId, weights: list[int], method: Rpc[Any, Any]
) -> None:
    plan, fired, void = unsigned(weights), 0, 0
    sums = whole_numbers(plan)
    for number in range(1, 13):
        network = Network(seed=number)
        kill_at(network, victim, method, number)
        outcomes = await play(network, plan, sums)
        fired += network.dead(victim)
        for outcome in (outcomes[peer] for peer in plan.members if network.dead(victim) and peer != victim):
            void += isinstance(outcome, RoundFailed)
            if isinstance(outcome, RoundResult):
                assert torch.equal(outcome.tensor, right_mean(plan, sums))
            else:
                assert victim in str(outcome)
    assert fired >= 4
    assert void >= 4


async def test_reducer_that_answers_one_with_other_bits_leaves_it_with_another_digest() -> None:
    plan, network = unsigned([1, 1, 1]), Network()
    services = await serve_members(network, plan.members)
    flip_a_bit(network.endpoints[P2], P0)
    mine, *others = (result.digest for result in await reduce_at(services, plan, whole_numbers(plan)))
    assert len(set(others)) == 1
    assert mine not in others


async def test_member_that_adds_nothing_and_never_asks_is_waited_for_until_the_deadline() -> None:
    plan = unsigned([1, 1, 0])
    services = await serve_members(Network(), plan.members)
    services[P2].expect(plan)
    outcomes = await reduce_at(services, plan, whole_numbers(plan), P0, P1)
    assert all(isinstance(outcome, RoundFailed) and "p2" in str(outcome) for outcome in outcomes), outcomes
    assert asyncio.get_running_loop().time() >= plan.timeout_s


async def test_signature_under_a_round_that_nobody_signs_is_a_violation() -> None:
    plan = unsigned([1, 1])
    network = Network()
    services = await serve_members(network, plan.members)
    services[P0].expect(plan)
    with pytest.raises(Violation, match="not signed off"):
        await network.endpoints[P1].call(P0, AGREE, Agreement.of(plan, result="0" * 64), timeout_s=5)


def test_round_whose_results_others_pass_on_must_be_signed() -> None:
    with pytest.raises(BugError, match="signed"):
        make_plan([1, 1, 1], 36, signed=False, schedule="ring")
    with pytest.raises(BugError, match="signed"):
        make_plan([1, 1, 1], 36, signed=False, shares={P0: 1}, outgoing=frozenset({P1}))
    assert unsigned([1, 1]).digest != replace(unsigned([1, 1]), signed=True).digest
