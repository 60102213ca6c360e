"""Rounds whose sums travel along trees: the right mean, the same bits, the bytes that were planned, and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.messages import CHUNK, STAY, ReduceRequest
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.averaging.schedules import SCHEDULES, ScheduleName
from swarm.averaging.schedules.costs import Vector, load
from swarm.errors import BugError, RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Incoming, Rpc
from tests.harness.rigs.averaging import (
    Network,
    in_virtual_time,
    kill_at,
    make_plan,
    names,
    only_results,
    play,
    right_mean,
    serve_members,
    whole_numbers,
)

EACH = pytest.mark.parametrize("schedule", list(SCHEDULES))
TREES: list[ScheduleName] = ["ring", "tree", "halving", "butterfly"]
P0, P1, P2, P3 = names(4)


def planned(schedule: ScheduleName, weights: list[int], elements: int = 40, **fields: Any) -> RoundPlan:
    return make_plan(weights, elements, schedule=schedule, **fields)


@EACH
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
async def test_every_member_gets_the_bits_of_the_exact_mean(schedule: ScheduleName, count: int) -> None:
    weights = [(rank + 1) % 4 for rank in range(count - 1)] + [5]  # some have nothing to say
    plan = planned(schedule, weights, 40)
    sums = whole_numbers(plan, count)
    held = list(only_results(await play(Network(count), plan, sums)).values())
    assert all(torch.equal(result.tensor, right_mean(plan, sums)) for result in held)
    assert len({(result.digest, result.squared_norm) for result in held}) == 1


@EACH
@pytest.mark.parametrize("count", [3, 6])
def test_noise_gives_the_same_bits_in_any_order_of_arrival(schedule: ScheduleName, count: int) -> None:
    plan = planned(schedule, [1] * count)
    rng = torch.Generator().manual_seed(count)
    sums = {peer: torch.randn(40, generator=rng) * 10.0 ** (2 * rank) for rank, peer in enumerate(plan.members)}
    held = [
        result for seed in (1, 2) for result in only_results(in_virtual_time(play(Network(seed), plan, sums))).values()
    ]
    assert len({(result.digest, result.squared_norm) for result in held}) == 1
    assert torch.allclose(held[0].tensor.double(), sum(sums.values()).double() / count, rtol=1e-5)  # type: ignore[union-attr]


@EACH
@pytest.mark.parametrize("count", [2, 5, 8])
async def test_bytes_sent_are_those_that_the_costs_foresee(schedule: ScheduleName, count: int) -> None:
    plan = planned(schedule, [1] * count, 64)
    network = Network()
    held = await play(network, plan, whole_numbers(plan))
    only_results(held)
    foreseen = load(plan.routes, Vector(elements=64, chunk_elements=plan.chunk_elements))
    for peer, result in held.items():
        assert isinstance(result, RoundResult)
        assert result.bytes_sent == network.endpoints[peer].payload_sent == foreseen.bytes_of(peer)[0]
    assert network.calls[CHUNK] == sum(foreseen.calls.values())
    assert network.calls[STAY] == count


@EACH
@pytest.mark.parametrize("shares", [[1, 1, 0, 1, 0], [0, 0, 3, 0, 0], [2, 1, 1, 1, 1], [0, 1, 1, 1, 5]])
def test_members_without_a_share_ask_and_are_never_asked_for_a_sum(schedule: ScheduleName, shares: list[int]) -> None:
    members = names(5)
    plan = planned(schedule, [1, 0, 2, 3, 4], shares=dict(zip(members, shares, strict=True)))
    network, asked = Network(), set()

    async def note(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        if name == CHUNK:
            asked.add(target)

    network.hook = note
    sums = whole_numbers(plan)
    for result in only_results(in_virtual_time(play(network, plan, sums))).values():
        assert torch.equal(result.tensor, right_mean(plan, sums))
    assert asked <= {peer for peer, share in zip(members, shares, strict=True) if share}


@pytest.mark.parametrize("schedule", TREES)
async def test_long_vector_passes_through_narrow_windows_without_locking_up(schedule: ScheduleName) -> None:
    plan = planned(schedule, [1] * 6, 6 * 4 * 8, timeout_s=600.0)
    assert plan.window == 2
    assert only_results(await play(Network(7, slowest_s=0.3), plan, whole_numbers(plan)))


def test_int8_along_a_tree_is_a_bug() -> None:
    with pytest.raises(BugError, match="rounded again"):
        planned("ring", [1, 1, 1], codec="int8")


def test_plans_of_two_schedules_differ() -> None:
    assert len({planned(schedule, [1, 1, 1]).digest for schedule in SCHEDULES}) == len(SCHEDULES)


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", TREES)
@pytest.mark.parametrize("victim", names(4))
@pytest.mark.parametrize("number", [1, 4, 9])
async def test_member_dead_at_a_chunk_fails_the_round_for_all_others_at_once(
    schedule: ScheduleName, victim: PeerId, number: int
) -> None:
    plan, network = planned(schedule, [1, 1, 1, 1], 48), Network(seed=number)
    kill_at(network, victim, CHUNK, number)
    outcomes = await play(network, plan, whole_numbers(plan))
    assert network.dead(victim), "the fault did not fire"
    told = [outcomes[peer] for peer in plan.members if peer != victim]
    assert all(isinstance(outcome, RoundFailed) and victim in str(outcome) for outcome in told), outcomes
    assert asyncio.get_running_loop().time() < 5, "nobody waits for the deadline"


@EACH
async def test_member_that_hangs_until_the_deadline_is_blamed_and_nobody_that_waits_for_it(
    schedule: ScheduleName,
) -> None:
    """It lives and answers, but passes nothing on: who is below it waits with a whole window of chunks."""
    plan = planned(schedule, [1] * 6, 480, timeout_s=10.0)
    network, stuck, fired = Network(), plan.members[3], 0

    async def hang(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        nonlocal fired
        if caller == stuck and name == CHUNK:
            fired += 1
            await asyncio.sleep(60)

    network.hook = hang
    outcomes = await play(network, plan, whole_numbers(plan))
    assert fired, "the fault did not fire"
    failed = [outcome for peer, outcome in outcomes.items() if peer != stuck]
    assert all(isinstance(outcome, RoundFailed) for outcome in failed), outcomes
    assert {outcome.peer for outcome in failed if outcome.peer} <= {stuck}


@pytest.mark.parametrize("schedule", ["direct", *TREES])
async def test_silent_death_of_who_only_sends_is_known_at_once(schedule: ScheduleName) -> None:
    """P3 has no share: nobody asks it for anything, and it dies between two calls."""
    plan = planned(schedule, [1, 1, 1, 1], 48, shares={P0: 1, P1: 1, P2: 1})
    network, seen = Network(), 0

    async def hang_then_die(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        nonlocal seen
        if caller == P3 and name == CHUNK:
            seen += 1
            await asyncio.sleep(1)
            network.kill(P3)
            await asyncio.sleep(60)

    network.hook = hang_then_die

    outcomes = await play(network, plan, whole_numbers(plan))
    assert seen
    assert network.dead(P3)
    assert all(isinstance(outcomes[peer], RoundFailed) for peer in (P0, P1, P2)), outcomes
    assert asyncio.get_running_loop().time() < 5


@pytest.mark.parametrize("schedule", TREES)
def test_result_changed_on_its_way_down_is_found_before_anybody_returns(schedule: ScheduleName) -> None:
    async def scene() -> list[Any]:
        plan, network = planned(schedule, [1] * 8), Network()
        services = await serve_members(network, plan.members)
        forged = 0
        for liar in plan.members:
            honest = network.endpoints[liar].handler(CHUNK)

            async def forge(caller: PeerId, body: Any, incoming: Incoming, honest: Any = honest) -> Answer[Any]:
                nonlocal forged
                answer: Answer[Any] = await honest(caller, body, incoming)
                if len(answer.payload) and not forged:
                    forged += 1
                    return Answer(answer.body, bytes(len(answer.payload)))
                if body.level and not forged:
                    forged += 1
                    incoming.payload[:] = bytes(len(incoming.payload))
                return answer

            network.endpoints[liar].replace_handler(CHUNK, forge)
        sums = whole_numbers(plan)
        jobs = (services[peer].reduce(plan, sums[peer]) for peer in plan.members)
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert forged == 1
        return outcomes

    assert all(isinstance(outcome, RoundFailed) for outcome in in_virtual_time(scene()))


@EACH
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_sum_that_is_not_finite_is_blamed_on_its_sender(schedule: ScheduleName, value: float) -> None:
    plan = planned(schedule, [1, 1, 1, 1])
    sums = whole_numbers(plan)
    sums[P2][:] = value
    outcomes: Any = await play(Network(), plan, sums)
    assert all(isinstance(outcome, RoundFailed) for outcome in outcomes.values())
    assert any(outcome.peer == P2 and "not finite" in str(outcome) for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("schedule", "caller", "changes", "size"),
    [
        ("ring", P0, {"index": 0, "weight": 2}, 16),  # p0 is not the head of that chain: it carries p3's as well
        ("ring", P3, {"index": 0, "weight": 8}, 16),  # p3's next is p0
        ("ring", P0, {"index": 0, "weight": 2, "level": 1}, 16),
        ("tree", P0, {"index": 0, "weight": 99}, 16),
        ("butterfly", P0, {"index": 0, "weight": 2, "level": 0}, 16),
        ("butterfly", P0, {"index": 0, "weight": 3, "level": 1}, 16),
        ("butterfly", P0, {"index": 0, "weight": 2, "level": 2}, 16),
        ("butterfly", P0, {"index": 0, "weight": 2, "level": 1}, 12),
        ("butterfly", P0, {"index": 10**9, "weight": 2, "level": 1}, 16),
    ],
)
async def test_sum_of_a_wrong_subtree_is_refused_before_allocation(
    schedule: ScheduleName, caller: PeerId, changes: dict[str, int], size: int
) -> None:
    plan = planned(schedule, [2, 3, 4, 8])
    services = await serve_members(Network(), plan.members)
    services[P1].expect(plan)
    method = next(method for method in services[P1].methods() if method.rpc == CHUNK)
    assert method.admit is not None
    if schedule == "butterfly":
        method.admit(P0, ReduceRequest.of(plan, index=0, weight=2, level=1), 16)
    with pytest.raises(Violation):
        method.admit(caller, ReduceRequest.of(plan, **changes), size)
