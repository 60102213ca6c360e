"""Rounds that nobody signs off: who is done leaves, and has given the others all they need from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from swarm.network.protocols import Answer, Incoming, Rpc
from swarm.schema import Empty
from tests.harness.rigs.averaging import (
    Network,
    in_virtual_time,
    make_plan,
    names,
    only_results,
    play,
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
def test_all_have_the_mean_whoever_leaves_first_and_nobody_signs(weights: list[int], seed: int) -> None:
    plan, network = unsigned(weights), Network(seed=seed, slowest_s=0.5)
    sums = whole_numbers(plan)
    results = only_results(in_virtual_time(play(network, plan, sums)))
    assert {result.digest for result in results.values()} == {results[P0].digest}
    assert all(torch.equal(result.tensor, right_mean(plan, sums)) for result in results.values())
    assert not network.calls[AGREE]


def kill_at(network: Network, victim: PeerId, method: Rpc[Any, Any], number: int) -> Callable[..., Awaitable[None]]:
    """Kills the victim just before the call of that number is delivered."""
    seen = 0

    async def hook(caller: PeerId, target: PeerId, name: Any, body: Any) -> None:
        nonlocal seen
        seen += name == method
        if name == method and seen == number:
            network.kill(victim)
            await asyncio.sleep(0)

    return hook


@pytest.mark.parametrize("victim", names(3))
@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 0, 1]])
@pytest.mark.parametrize("method", [ENTER, CHUNK])
def test_member_dead_at_any_call_leaves_the_others_with_the_mean_or_its_name(
    victim: PeerId, weights: list[int], method: Rpc[Any, Any]
) -> None:
    plan, fired, void = unsigned(weights), 0, 0
    sums = whole_numbers(plan)
    for number in range(1, 19):
        network = Network(seed=number)
        network.hook = kill_at(network, victim, method, number)
        outcomes = in_virtual_time(play(network, plan, sums))
        fired += network.dead(victim)
        for outcome in (outcomes[peer] for peer in plan.members if network.dead(victim) and peer != victim):
            void += isinstance(outcome, RoundFailed)
            if isinstance(outcome, RoundResult):
                assert torch.equal(outcome.tensor, right_mean(plan, sums))
            else:
                assert victim in str(outcome)
    assert fired >= 4
    assert void >= 4


def test_reducer_that_answers_one_with_other_bits_leaves_it_with_another_digest() -> None:
    plan = unsigned([1, 1, 1])

    async def scene() -> list[Any]:
        network, sums = Network(), whole_numbers(plan)
        services = await serve_members(network, plan.members)
        honest = network.endpoints[P2].handler(CHUNK)

        async def forked(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
            answer = await honest(caller, body, incoming)
            forged = bytearray(answer.payload)
            forged[0] ^= caller == P0
            return Answer(Empty(), forged)

        network.endpoints[P2].replace_handler(CHUNK, forked)
        return await asyncio.gather(*(services[peer].reduce(plan, sums[peer]) for peer in plan.members))

    mine, *others = (result.digest for result in in_virtual_time(scene()))
    assert len(set(others)) == 1
    assert mine not in others


def test_member_that_adds_nothing_and_never_asks_is_waited_for_until_the_deadline() -> None:
    plan = unsigned([1, 1, 0])

    async def scene() -> None:
        network, sums = Network(), whole_numbers(plan)
        services = await serve_members(network, plan.members)
        services[P2].expect(plan)
        jobs = (services[peer].reduce(plan, sums[peer]) for peer in (P0, P1))
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(outcome, RoundFailed) and "p2" in str(outcome) for outcome in outcomes), outcomes
        assert asyncio.get_running_loop().time() >= plan.timeout_s

    in_virtual_time(scene())


def test_signature_under_a_round_that_nobody_signs_is_a_violation() -> None:
    plan = unsigned([1, 1])

    async def scene() -> None:
        network = Network()
        services = await serve_members(network, plan.members)
        services[P0].expect(plan)
        with pytest.raises(Violation, match="not signed off"):
            await network.endpoints[P1].call(P0, AGREE, Agreement.of(plan, result="0" * 64), timeout_s=5)

    in_virtual_time(scene())


def test_round_whose_results_others_pass_on_must_be_signed() -> None:
    with pytest.raises(BugError, match="signed"):
        make_plan([1, 1, 1], 36, signed=False, schedule="ring")
    with pytest.raises(BugError, match="signed"):
        make_plan([1, 1, 1], 36, signed=False, shares={P0: 1}, outgoing=frozenset({P1}))
    assert unsigned([1, 1]).digest != replace(unsigned([1, 1]), signed=True).digest
