"""Rounds that succeed, and what they cost."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.allreduce_service import MAX_EXPECTED
from swarm.averaging.allreduce.messages import CHUNK, ENTER, ReduceRequest, RoundMessage
from swarm.averaging.allreduce.partition import CHUNK_ELEMENTS
from swarm.averaging.allreduce.plan import RoundPlan
from swarm.averaging.schedules import SCHEDULES
from swarm.errors import BugError, Busy, Refused
from tests.harness.rigs.averaging import (
    Network,
    make_plan,
    names,
    only_results,
    play,
    right_mean,
    serve_members,
    whole_numbers,
)

P0, P1, P2 = names(3)


async def test_reduce_alone_needs_no_network() -> None:
    plan = make_plan([4], 10)
    sums = whole_numbers(plan)
    network = Network()
    result = only_results(await play(network, plan, sums))[P0]
    assert torch.equal(result.tensor, sums[P0] / 4)
    assert not network.calls
    assert result.bytes_sent == 0


async def test_reduce_of_nothing_is_still_agreed_on() -> None:
    outcomes = only_results(await play(Network(), make_plan([1, 1], 0), {p: torch.empty(0) for p in (P0, P1)}))
    assert {result.tensor.shape for result in outcomes.values()} == {(0,)}
    assert len({result.digest for result in outcomes.values()}) == 1


async def test_reduce_with_an_observer_sends_nothing_of_it_and_gives_it_everything() -> None:
    plan = make_plan([2, 0, 3], 60)
    sums = whole_numbers(plan)
    network = Network()
    outcomes = only_results(await play(network, plan, sums))
    assert torch.equal(outcomes[P1].tensor, right_mean(plan, sums))
    assert outcomes[P1].bytes_sent == network.endpoints[P1].payload_sent == 0


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
async def test_mean_of_microbatches_that_are_in_two_sums_each_is_divided_by_half_the_weights(schedule: str) -> None:
    plan = make_plan([2, 4, 6], 60, divide_by=6, schedule=schedule)
    sums = whole_numbers(plan)
    outcomes = only_results(await play(Network(), plan, sums))
    assert all(torch.equal(outcomes[peer].tensor, sum(sums.values()) / 6) for peer in (P0, P1, P2))


async def test_reduce_with_float64_sums_is_rounded_once() -> None:
    plan = make_plan([1, 1], 4, dtype="float64")
    sums = {P0: torch.full((4,), 1.0, dtype=torch.float64), P1: torch.full((4,), 2.0**-30, dtype=torch.float64)}
    sums[P0] += -1.0 + 2.0**-31
    outcomes = only_results(await play(Network(), plan, sums))
    assert outcomes[P1].tensor.tolist() == [0.75 * 2.0**-30] * 4


async def test_reduce_of_a_large_vector_holds_little_besides_the_result() -> None:
    members = 4
    plan = make_plan([1] * members, 1_000_000, chunk_elements=CHUNK_ELEMENTS // 16)
    sums = whole_numbers(plan)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        only_results(await play(Network(slowest_s=0.5), plan, sums))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    per_member = (peak - before) / members
    assert per_member <= 1.3 * 4 * plan.elements


async def test_reduce_with_a_late_member_waits_for_it_without_sending_it_bytes() -> None:
    plan = make_plan([1, 1], 40)
    network, sums = Network(), whole_numbers(plan)
    services = await serve_members(network, plan.members)
    early = asyncio.ensure_future(services[P0].reduce(plan, sums[P0]))
    await asyncio.sleep(5)
    assert network.endpoints[P0].payload_sent == 0
    assert network.calls[ENTER] > 2
    late = await services[P1].reduce(plan, sums[P1])
    assert (await early).digest == late.digest
    assert network.endpoints[P0].payload_sent == 40 * 4


async def test_reduce_that_is_expected_elsewhere_delivers_before_it_runs_there() -> None:
    plan = make_plan([1, 1], 400)
    network, sums = Network(), whole_numbers(plan)
    services = await serve_members(network, plan.members)
    services[P1].expect(plan)
    services[P1].expect(plan)
    early = asyncio.ensure_future(services[P0].reduce(plan, sums[P0]))
    await asyncio.sleep(5)
    assert network.endpoints[P0].payload_sent == plan.window * 4 * 4
    late = await services[P1].reduce(plan, sums[P1])
    assert (await early).digest == late.digest


async def test_expected_round_that_does_not_start_is_forgotten_and_refuses_who_waits() -> None:
    plan = make_plan([1, 1], 8, timeout_s=10.0)
    services = await serve_members(network := Network(), plan.members)
    services[P1].expect(plan)
    request = ReduceRequest.of(plan, index=plan.chunks_of(P1)[0].index, weight=1)
    held = asyncio.ensure_future(network.endpoints[P0].call(P1, CHUNK, request, timeout_s=60, payload=bytes(16)))
    await asyncio.sleep(11)
    with pytest.raises(Busy):
        await network.endpoints[P0].call(P1, CHUNK, request, timeout_s=60, payload=bytes(16))
    with pytest.raises(Refused):
        await held


async def test_expected_rounds_are_bounded_the_oldest_goes_first() -> None:
    services = await serve_members(network := Network(), (P0, P1))
    plans = [make_plan([1, 1], 8, attempt=attempt) for attempt in range(MAX_EXPECTED + 1)]
    for plan in plans:
        services[P1].expect(plan)
    call = network.endpoints[P0].call
    await call(P1, ENTER, RoundMessage.of(plans[1]), timeout_s=60)
    with pytest.raises(Busy):
        await call(P1, ENTER, RoundMessage.of(plans[0]), timeout_s=60)


async def test_two_rounds_at_once_do_not_mix() -> None:
    plans = [make_plan([1, 2, 3], 30, attempt=attempt) for attempt in (0, 1)]
    sums = [whole_numbers(plan, seed) for seed, plan in enumerate(plans)]
    services = await serve_members(Network(), plans[0].members)
    jobs = [services[peer].reduce(plan, mine[peer]) for plan, mine in zip(plans, sums, strict=True) for peer in mine]
    results = await asyncio.gather(*jobs)
    for index, result in enumerate(results):
        assert torch.equal(result.tensor, right_mean(plans[index // 3], sums[index // 3]))


@pytest.mark.parametrize(
    "vector", [None, torch.zeros(7), torch.zeros(2, 4), torch.zeros(8, dtype=torch.float64)], ids=str
)
async def test_reduce_of_something_else_than_planned_is_a_bug(vector: torch.Tensor | None) -> None:
    plan = make_plan([1, 1], 8)
    services = await serve_members(Network(), plan.members)
    with pytest.raises(BugError):
        await services[P0].reduce(plan, vector)


async def test_reduce_of_a_round_that_ended_is_a_bug() -> None:
    plan = make_plan([1], 8)
    services = await serve_members(Network(), plan.members)
    await services[P0].reduce(plan, torch.zeros(8))
    with pytest.raises(BugError):
        await services[P0].reduce(plan, torch.zeros(8))
    with pytest.raises(BugError):
        services[P0].expect(plan)


async def test_reduce_on_threads_does_not_hold_the_loop_up() -> None:
    plan: RoundPlan = make_plan([1, 1], 1 << 20, chunk_elements=CHUNK_ELEMENTS)
    network, sums = Network(slowest_s=0.0), whole_numbers(plan)
    services = await serve_members(network, plan.members)
    threads: list[str] = []

    async def elsewhere(fn: Any, /, *args: Any) -> Any:
        threads.append(getattr(fn, "__name__", ""))
        return await asyncio.to_thread(fn, *args)

    for service in services.values():
        service._means = type(service._means)(
            endpoint=service._means.endpoint,
            clock=service._means.clock,
            run=elsewhere,
            reducer=service._means.reducer,
            signing=None,
        )
    results = await asyncio.gather(*(services[peer].reduce(plan, sums[peer]) for peer in plan.members))
    assert all(torch.equal(result.tensor, right_mean(plan, sums)) for result in results)
    assert threads.count("_reduce") == len(plan.chunks)
    assert threads.count("store") == len(plan.chunks)
