"""Rounds that break: everyone hears of it, by name, and nobody has a result."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.messages import ABORT, AGREE, CHUNK, Abort, Agreement, ReduceRequest
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.averaging.schedules import SCHEDULES, ScheduleName
from swarm.averaging.strategies.exact import Plain
from swarm.errors import Busy, Refused, RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Incoming, Rpc
from swarm.schema import Empty
from tests.harness.rigs.averaging import (
    Network,
    flip_a_bit,
    make_plan,
    names,
    play,
    reduce_at,
    serve_members,
    whole_numbers,
)

P0, P1, P2 = names(3)
PLAN = make_plan([1, 1, 1], 36)


def all_failed(outcomes: dict[PeerId, Any], *alive: PeerId) -> dict[PeerId, RoundFailed]:
    assert all(isinstance(outcomes[peer], RoundFailed) for peer in alive), outcomes
    return outcomes


async def four(schedule: ScheduleName = "direct") -> tuple[Network, RoundPlan, dict[PeerId, AllReduce]]:
    """Four members on one network, with a round for them."""
    network, plan = Network(), make_plan([1] * 4, 64, schedule=schedule)
    return network, plan, await serve_members(network, plan.members)


@pytest.mark.parametrize("pair", list(itertools.combinations(names(4), 2)), ids="-".join)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
async def test_two_members_that_do_not_hear_each_other_blame_each_other_whatever_the_schedule(
    schedule: ScheduleName, pair: tuple[PeerId, PeerId]
) -> None:
    network, plan, services = await four(schedule)
    network.cut(*pair)
    outcomes = dict(zip(names(4), await reduce_at(services, plan, whole_numbers(plan)), strict=True))
    all_failed(outcomes, *names(4))
    assert outcomes[pair[0]].peer == pair[1]
    assert outcomes[pair[1]].peer == pair[0]
    assert {outcome.peer for outcome in outcomes.values()} - {""} == set(pair)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
async def test_member_that_is_busy_to_the_end_is_blamed_by_all(schedule: ScheduleName) -> None:
    _, plan, services = await four(schedule)
    outcomes = await reduce_at(services, plan, whole_numbers(plan), *plan.members[:3])
    assert [outcome.peer for outcome in outcomes] == [names(4)[3]] * 3
    assert 30 <= asyncio.get_running_loop().time() < 32


@pytest.mark.parametrize("schedule", list(SCHEDULES))
async def test_member_that_is_expected_and_never_comes_is_the_only_one_blamed(schedule: ScheduleName) -> None:
    _, plan, services = await four(schedule)
    services[plan.members[3]].expect(plan)
    outcomes = await reduce_at(services, plan, whole_numbers(plan), *plan.members[:3])
    blamed = {outcome.peer for outcome in outcomes} - {""}
    if schedule == "tree":  # its leaf is another: who is in the middle is seen by nobody; the leader goes on `direct`
        assert not blamed
    else:
        assert blamed == {names(4)[3]}


async def test_members_that_hear_of_a_deadline_before_their_own_blame_whom_they_miss_too() -> None:
    _, plan, services = await four()
    sums = whole_numbers(plan)

    async def reduce(peer: PeerId, after_s: float) -> RoundResult:
        await asyncio.sleep(after_s)
        return await services[peer].reduce(plan, sums[peer])

    jobs = [reduce(peer, after_s) for peer, after_s in zip(names(4), (0.0, 5.0, 10.0), strict=False)]
    outcomes: list[Any] = await asyncio.gather(*jobs, return_exceptions=True)
    assert [outcome.peer for outcome in outcomes] == ["p3"] * 3
    assert [bool(outcome.aborted_by) for outcome in outcomes] == [False, True, True]


async def test_member_that_gives_up_at_once_is_told_and_frames_nobody() -> None:
    network, plan, services = await four()
    *others, liar = plan.members
    services[liar].expect(plan)
    reducing = asyncio.create_task(reduce_at(services, plan, whole_numbers(plan), *others))
    await asyncio.sleep(0.005)
    for peer in others:
        said = Abort.of(plan, reason="it was p1", culprit=P1)
        await network.endpoints[liar].call(peer, ABORT, said, timeout_s=1)
    outcomes = await reducing
    assert [outcome.peer for outcome in outcomes] == [""] * 3
    assert all(outcome.aborted_by for outcome in outcomes)


@pytest.mark.parametrize(("gives", "value"), [("mean", 1e40), ("mean", 1e200), ("sum", 1e200)])
async def test_finite_sum_that_makes_the_result_overflow_is_held_against_its_sender(gives: str, value: float) -> None:
    plan = make_plan([1] * 3, 36, dtype="float64", gives=gives)
    sums = whole_numbers(plan)
    sums[P1][:] = value
    outcomes = all_failed(await play(Network(), plan, sums), *plan.members)
    assert {outcome.peer for outcome in outcomes.values()} - {""} == {P1}


async def test_member_that_sends_what_is_no_sum_breaks_the_round_here_at_once() -> None:
    network = Network()
    services = await serve_members(network, PLAN.members)
    services[P1].expect(PLAN)
    reducing = asyncio.create_task(reduce_at(services, PLAN, whole_numbers(PLAN), P0, P2))
    await asyncio.sleep(1)
    request = ReduceRequest.of(PLAN, index=PLAN.chunks_of(P0)[0].index, weight=2)
    with pytest.raises(Violation):
        await network.endpoints[P1].call(P0, CHUNK, request, timeout_s=5, payload=bytes(16))
    violated, told = await reducing
    assert asyncio.get_running_loop().time() < 2, "it waited for its deadline"
    assert (violated.peer, violated.aborted_by) == (P1, "")
    assert told.aborted_by == P0


async def with_wrong_bits(network: Network, plan: RoundPlan, *wrong: PeerId) -> list[Any]:
    """All members' outcomes where some take in other bits than they were sent."""
    services = await serve_members(network, plan.members)
    for endpoint in network.endpoints.values():
        flip_a_bit(endpoint, *wrong)
    return await reduce_at(services, plan, whole_numbers(plan))


async def test_member_that_holds_another_result_than_most_is_named_by_itself_and_others() -> None:
    plan, by = make_plan([1] * 4, 64), set[PeerId]()
    for seed in range(3):  # as many attempts as the leader makes
        outcomes = await with_wrong_bits(Network(seed=seed), plan, P1)
        assert {outcome.peer for outcome in outcomes} - {""} == {P1}
        by |= {peer for peer, outcome in zip(plan.members, outcomes, strict=True) if outcome.peer}
    assert len(by - {P1}) > 1


async def test_nobody_is_named_where_no_result_is_that_of_most() -> None:
    outcomes = await with_wrong_bits(Network(), make_plan([1] * 4, 64), P0, P1)
    assert all(isinstance(outcome, RoundFailed) and not outcome.peer for outcome in outcomes), outcomes
    assert any("different results" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("forged", [b"", bytes([0, 0, 0xC0, 0x7F] * 4)], ids=["too little", "not finite"])
async def test_reducer_that_answers_what_is_no_mean_is_named(forged: bytes) -> None:
    network, plan = Network(), make_plan([1, 1], 8)
    services = await serve_members(network, plan.members)

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        return Answer(Empty(), forged)

    network.endpoints[P1].replace_handler(CHUNK, forge)
    services[P1].expect(plan)
    with pytest.raises(RoundFailed) as caught:
        await services[P0].reduce(plan, torch.zeros(8))
    assert caught.value.peer == P1


CHUNK_OF_P1 = PLAN.chunks_of(P1)[0].index


@pytest.mark.parametrize(
    ("caller", "changes", "payload_bytes", "error"),
    [
        ("stranger", {}, 16, Violation),
        (P0, {"weight": 2}, 16, Violation),
        (P0, {"index": PLAN.chunks_of(P0)[0].index}, 16, Violation),
        (P0, {"index": 10**6}, 16, Violation),
        (P0, {}, 12, Violation),
        (P0, {}, 0, Violation),
        (P0, {}, 1 << 40, Violation),
        (P0, {"plan": "0" * 64}, 16, Refused),
        (P0, {"attempt": 1}, 16, Busy),
    ],
)
async def test_chunk_that_is_not_right_is_refused_before_allocation(
    caller: str, changes: dict[str, Any], payload_bytes: int, error: type[Exception]
) -> None:
    services = await serve_members(Network(), PLAN.members)
    services[P1].expect(PLAN)
    method = next(method for method in services[P1].methods() if method.rpc == CHUNK)
    request = ReduceRequest.of(PLAN, index=CHUNK_OF_P1, weight=1).model_copy(update=changes)
    assert method.admit is not None
    with pytest.raises(error):
        method.admit(PeerId(caller), request, payload_bytes)


async def test_observer_that_sends_a_sum_is_refused() -> None:
    plan = make_plan([1, 1, 0], 36)
    services = await serve_members(Network(), plan.members)
    services[P1].expect(plan)
    method = next(method for method in services[P1].methods() if method.rpc == CHUNK)
    request = ReduceRequest.of(plan, index=plan.chunks_of(P1)[0].index, weight=0)
    assert method.admit is not None
    method.admit(P2, request, 0)
    with pytest.raises(Violation):
        method.admit(P2, request, 16)


async def test_sum_that_is_on_its_way_counts_a_repeat_is_busy_and_a_broken_call_gives_its_place_back() -> None:
    plan = make_plan([1, 1], 80)
    network = Network()
    services = await serve_members(network, plan.members)
    services[P1].expect(plan)
    method = next(method for method in services[P1].methods() if method.rpc == CHUNK)
    assert method.admit is not None
    assert method.over is not None
    first, *more, beyond = (
        ReduceRequest.of(plan, index=chunk.index, weight=1) for chunk in plan.chunks_of(P1)[: plan.window + 1]
    )
    for request in (first, *more):
        method.admit(P0, request, 16)
    for request in (first, beyond):
        with pytest.raises(Busy):
            method.admit(P0, request, 16)
    method.over(P0, first)
    method.admit(P0, beyond, 16)
    with pytest.raises(Busy):
        method.admit(P0, first, 16)


async def test_sum_whose_call_broke_after_it_arrived_is_kept_and_may_be_asked_for_again() -> None:
    plan, network = make_plan([1, 1], 8), Network()
    services = await serve_members(network, plan.members)
    services[P1].expect(plan)
    request = ReduceRequest.of(plan, index=plan.chunks_of(P1)[0].index, weight=1)

    async def ask(payload: bytes) -> bytes:
        call = network.endpoints[P0].call
        _, mean = await call(P1, CHUNK, request, timeout_s=5, payload=payload, max_reply_bytes=16)
        return bytes(mean)

    broken = asyncio.ensure_future(ask(bytes(16)))
    await asyncio.sleep(1)
    broken.cancel()
    await asyncio.sleep(1)
    again = asyncio.ensure_future(ask(torch.full((4,), 8.0).numpy().tobytes()))
    reducing = asyncio.ensure_future(services[P1].reduce(plan, torch.ones(8)))
    assert await again == torch.full((4,), 0.5).numpy().tobytes(), "the first counts"
    reducing.cancel()
    await asyncio.gather(reducing, return_exceptions=True)


async def test_late_message_of_a_dead_round_is_refused() -> None:
    network = Network()
    services = await serve_members(network, (P0, P1))
    plan = make_plan([1, 1], 8, timeout_s=1.0)
    with pytest.raises(RoundFailed):
        await services[P0].reduce(plan, torch.zeros(8))
    call = network.endpoints[P1].call
    request = ReduceRequest.of(plan, index=plan.chunks_of(P0)[0].index, weight=1)
    with pytest.raises(Refused):
        await call(P0, CHUNK, request, timeout_s=5, payload=bytes(16))
    with pytest.raises(Refused):
        await call(P0, AGREE, Agreement.of(plan, result="0" * 64), timeout_s=5)
    await call(P0, ABORT, Abort.of(plan), timeout_s=5)


async def test_agreement_repeated_after_the_round_is_acknowledged_another_is_refused() -> None:
    network, plan = Network(), make_plan([1, 1], 8)
    services = await serve_members(network, (P0, P1))
    jobs = (services[peer].reduce(plan, torch.ones(8)) for peer in plan.members)
    result, _ = await asyncio.gather(*jobs)
    call = network.endpoints[P1].call
    await call(P0, AGREE, Agreement.of(plan, result=result.digest), timeout_s=5)
    with pytest.raises(Refused):
        await call(P0, AGREE, Agreement.of(plan, result="0" * 64), timeout_s=5)


async def test_abort_from_a_stranger_changes_nothing() -> None:
    network, plan = Network(), make_plan([1, 1], 8)
    services = await serve_members(network, (P0, P1, P2))
    services[P0].expect(plan)
    with pytest.raises(Violation):
        await network.endpoints[P2].call(P0, ABORT, Abort.of(plan), timeout_s=5)
    results = await asyncio.gather(*(services[peer].reduce(plan, torch.ones(8)) for peer in plan.members))
    assert len({result.digest for result in results}) == 1


async def test_abort_before_the_round_starts_here_fails_it_when_it_does() -> None:
    network, plan = Network(), make_plan([1, 1], 8)
    services = await serve_members(network, (P0, P1))
    services[P0].expect(plan)
    await network.endpoints[P1].call(P0, ABORT, Abort.of(plan, reason="no disk"), timeout_s=5)
    with pytest.raises(RoundFailed, match="no disk"):
        await services[P0].reduce(plan, torch.ones(8))
    assert asyncio.get_running_loop().time() < 1


@pytest.mark.parametrize("turns", range(0, 120, 4))
async def test_reduce_cancelled_at_any_moment_leaves_no_task_and_voids_the_round(turns: int) -> None:
    network, sums = Network(slowest_s=0.0), whole_numbers(PLAN)
    services = await serve_members(network, PLAN.members)
    jobs = [asyncio.ensure_future(services[peer].reduce(PLAN, sums[peer])) for peer in PLAN.members]
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = jobs[1].cancel()
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    if cancelled and isinstance(outcomes[1], asyncio.CancelledError):
        others = [outcomes[0], outcomes[2]]
        assert all(isinstance(outcome, RoundFailed | RoundResult) for outcome in others), others
    else:
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes


async def test_member_dead_after_it_took_all_signatures_and_gave_none_is_known_at_once() -> None:
    network, sums = Network(), whole_numbers(PLAN)
    services = await serve_members(network, PLAN.members)
    honest, takers, taken = network.endpoints[P2].handler(AGREE), {P0, P1}, asyncio.Event()

    async def take(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        answer = await honest(caller, body, incoming)
        takers.discard(caller)
        if not takers:
            taken.set()
        return answer

    async def die_before_signing(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        if caller == P2 and name == AGREE:
            await taken.wait()
            await asyncio.sleep(1)
            network.kill(P2)

    network.endpoints[P2].replace_handler(AGREE, take)
    network.hook = die_before_signing
    jobs = [asyncio.ensure_future(services[peer].reduce(PLAN, sums[peer])) for peer in PLAN.members]
    await network.wait_dead(P2)
    jobs[2].cancel()
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert asyncio.get_running_loop().time() < 5, "the dead member was waited for until the deadline"
    assert len({type(outcome) for outcome in outcomes[:2]}) == 1, outcomes


@pytest.mark.parametrize("turn", range(4))
async def test_reducer_that_answers_one_with_other_bits_breaks_all_plain_rounds_but_its_idle_one(turn: int) -> None:
    victim, *_, liar = names(4)
    (group,) = Plain(turn).groups(names(4), 1, 0, 1)
    plan = replace(make_plan([1] * 4, 64), shares=dict.fromkeys(group.reducers, 1))
    network = Network(seed=turn)
    services = await serve_members(network, plan.members)
    flip_a_bit(network.endpoints[liar], victim)
    outcomes = dict(zip(names(4), await reduce_at(services, plan, whole_numbers(plan)), strict=True))
    if turn == names(4).index(liar):
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes.values())
        return
    assert all(isinstance(outcome, RoundFailed) for outcome in outcomes.values())
    assert any(outcome.differs for outcome in outcomes.values())
    assert outcomes[victim].peer == ""  # never oneself
    assert all(outcomes[peer].peer in ("", victim) for peer in names(4))
