"""A part's averaging from the roster to the event, in as many rounds as its strategy takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.messages import CHUNK
from swarm.averaging.allreduce.plan import RoundKey, RoundResult
from swarm.averaging.allreduce.round import RoundCall, average, group_of, plan_rounds
from swarm.averaging.strategies import STRATEGIES, Group, Strategy
from swarm.averaging.strategies.exact import Hierarchy
from swarm.averaging.strategies.swapping import ButterflyGroups, Grid
from swarm.errors import BugError, RoundFailed
from swarm.events import Event, RoundDone, RoundVoid
from swarm.ids import PeerId, stage_part
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import EventList, Network, in_virtual_time, names, serve_members

P0, P1 = names(2)
CALL = RoundCall(
    key=RoundKey(3, stage_part(1), 0), replicas=[P1, P0], weights={P0: 3, P1: 5}, elements=10, timeout_s=5.0
)


def test_plan_round_is_the_same_at_every_member() -> None:
    plans = [plan_rounds(CALL, STRATEGIES["everyone"], peer)[0] for peer in (P0, P1)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].members == (P0, P1)
    assert plans[0].total_weight == 8


def test_each_turn_gives_members_other_duties() -> None:
    reduces = []
    for turn in range(2):
        plan = plan_rounds(replace(CALL, turn=turn), STRATEGIES["everyone"], P0)[0]
        reduces.append(plan.reducer(plan.chunks[0]))
    assert set(reduces) == {P0, P1}


def test_group_of_a_peer_in_none_is_a_bug() -> None:
    with pytest.raises(BugError):
        group_of(PeerId("x"), (Group((P0, P1)),))


async def test_average_emits_what_it_did() -> None:
    services = await serve_members(Network(), (P0, P1))
    plans = plan_rounds(CALL, STRATEGIES["everyone"], P0)
    told = EventList()
    jobs = (average(services[peer], plans, torch.ones(10), told) for peer in (P0, P1))
    results = await asyncio.gather(*jobs)
    assert results[0].tensor.tolist() == [0.25] * 10
    assert len(told.events) == 2
    for event in told.events:
        assert isinstance(event, RoundDone)
        assert (event.step, event.part, event.members, event.participating) == (3, "stage-1", 2, 2)
        assert event.bytes_sent == 40


async def test_round_that_nobody_fed_gives_nothing_and_asks_nobody() -> None:
    network, told = Network(), EventList()
    services = await serve_members(network, (P0, P1))
    idle = replace(CALL, weights={}, codec="int4h")
    jobs = (average(services[p], plan_rounds(idle, STRATEGIES["everyone"], p), torch.ones(10), told) for p in (P0, P1))
    results = await asyncio.gather(*jobs)
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert not result.tensor.any()
        assert (result.contributors, result.squared_norm, result.bytes_sent) == ((), 0.0, 0)
        assert result.left is not None
        assert result.left.tolist() == [1.0] * 10, "what is owed still is"
    assert not network.calls
    assert [event.participating for event in told.events if isinstance(event, RoundDone)] == [0, 0]


async def test_group_has_formed_a_round_trip_after_its_last_member_came() -> None:
    late_s = 3.0
    services = await serve_members(Network(slowest_s=0.02), (P0, P1))

    async def enter(peer: PeerId, after_s: float) -> float:
        await asyncio.sleep(after_s)
        plans, told = plan_rounds(CALL, STRATEGIES["everyone"], peer), EventList()
        await average(services[peer], plans, torch.ones(10), told)
        [done] = told.events
        assert isinstance(done, RoundDone)
        return done.formed_s

    first, last = await asyncio.gather(enter(P0, 0.0), enter(P1, late_s))
    assert late_s <= first <= late_s + 0.06, "its own question, then ours and its answer"
    assert last <= 0.04


async def test_average_that_fails_says_on_whom_it_broke() -> None:
    network = Network()
    services = await serve_members(network, (P0, P1))
    network.kill(P1)
    told = EventList()
    with pytest.raises(RoundFailed):
        await average(services[P0], plan_rounds(CALL, STRATEGIES["everyone"], P0), torch.ones(10), told)
    [event] = told.events
    assert isinstance(event, RoundVoid)
    assert (event.step, event.part, event.round, event.attempt, event.members) == (3, "stage-1", 0, 0, 2)
    assert event.culprit == P1
    assert event.reason


# --- several rounds --------------------------------------------------------------------------------------------------

SEVERAL = [Grid(), Grid(3), ButterflyGroups(), ButterflyGroups(2), Hierarchy({peer: peer[-1] for peer in names(17)})]


def run_all(
    strategy: Strategy, sums: list[torch.Tensor], weights: list[int], kill: PeerId | None = None, *, dead: bool = False
) -> list[RoundResult | BaseException]:
    """Every replica's averaging; ``kill`` is ``dead`` before it begins, or dies with its first round's result."""

    async def scene() -> list[RoundResult | BaseException]:
        network, peers = Network(), names(len(sums))
        services = await serve_members(network, peers)
        dtype = "float64" if sums[0].dtype == torch.float64 else "float32"
        call = RoundCall(
            key=RoundKey(3, stage_part(1), 0),
            replicas=peers,
            weights=dict(zip(peers, weights, strict=True)),
            elements=sums[0].numel(),
            timeout_s=5.0,
            dtype=dtype,
        )

        class Killing(EventList):
            def emit(self, event: Event) -> None:
                super().emit(event)
                if len(self.events) == 1 and kill is not None:
                    network.kill(kill)

        if dead and kill is not None:
            network.kill(kill)
        jobs = (
            average(
                services[peer],
                plan_rounds(call, strategy, peer),
                one if weight else None,
                Killing() if peer == kill else EventList(),
            )
            for peer, one, weight in zip(peers, sums, weights, strict=True)
        )
        return await asyncio.gather(*jobs, return_exceptions=True)

    return in_virtual_time(scene())


def noise(count: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[int]]:
    generator = torch.Generator().manual_seed(count)
    weights = [3 * (number % 4) for number in range(count - 1)] + [5]  # some have nothing to say
    return [torch.randn(67, generator=generator, dtype=dtype) for _ in range(count)], weights


def results(outcomes: list[RoundResult | BaseException]) -> list[RoundResult]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]


@pytest.mark.parametrize("strategy", SEVERAL, ids=repr)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 9, 16])
def test_every_replica_holds_the_same_bits_of_the_exact_mean(strategy: Strategy, count: int) -> None:
    sums, weights = noise(count, torch.float32)
    everywhere = results(run_all(strategy, sums, weights))
    mean = sum(one.double() * bool(weight) for one, weight in zip(sums, weights, strict=True)) / sum(weights)
    assert len({(result.digest, result.squared_norm, result.tensor.numpy().tobytes()) for result in everywhere}) == 1
    assert torch.allclose(everywhere[0].tensor.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", SEVERAL, ids=repr)
@pytest.mark.parametrize("count", [4, 9])
def test_sums_that_add_up_exactly_give_the_bits_that_one_round_of_all_gives(strategy: Strategy, count: int) -> None:
    sums, weights = noise(count, torch.float64)
    sums = [(one * 2**20).round() / 2**20 for one in sums]  # as reproducible runs have them
    several, one = (results(run_all(by, sums, weights)) for by in (strategy, STRATEGIES["everyone"]))
    assert torch.equal(several[0].tensor, one[0].tensor)
    assert several[0].tensor.dtype == torch.float32


@pytest.mark.parametrize("strategy", [Grid(), ButterflyGroups()], ids=repr)
def test_replica_that_dies_between_two_rounds_leaves_nobody_it_met_with_a_result(strategy: Strategy) -> None:
    sums, _ = noise(4, torch.float32)
    dead = names(4)[0]
    outcomes = run_all(strategy, sums, [1] * 4, kill=dead)
    met = {peer for peer in names(4) if dead in plan_rounds(_four(), strategy, peer)[1].members}
    for peer, outcome in zip(names(4), outcomes, strict=True):
        if peer in met:
            assert isinstance(outcome, RoundFailed)


def test_round_that_fails_in_one_group_is_known_at_once_to_those_who_wait_for_its_members_in_the_next() -> None:
    sums, _ = noise(9, torch.float32)
    outcomes = run_all(Grid(), sums, [1] * 9, kill=names(9)[0], dead=True)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, RoundFailed)
        assert "5 s" not in outcome.reason, "nobody waits for the deadline"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hung", names(4))
async def test_member_that_hangs_in_the_first_of_two_rounds_is_the_only_one_blamed(seed: int, hung: PeerId) -> None:
    network = Network(seed=seed)
    services = await serve_members(network, names(4))

    async def hang(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: object) -> None:
        if caller == hung and name == CHUNK:
            await asyncio.sleep(1e6)

    network.hook = hang
    call = replace(_four(), elements=2 << 16, timeout_s=30.0)  # a chunk for each
    jobs = (
        average(services[peer], plan_rounds(call, Grid(), peer), torch.ones(2 << 16), EventList()) for peer in names(4)
    )
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert asyncio.get_running_loop().time() < 30
    blamed = {outcome.peer for outcome in outcomes if isinstance(outcome, RoundFailed)}
    assert len([outcome for outcome in outcomes if isinstance(outcome, RoundFailed)]) == 4
    assert blamed - {""} == {hung}, "who waited for it in the second round is not to blame"


def _four() -> RoundCall:
    return RoundCall(
        key=RoundKey(3, stage_part(1), 0),
        replicas=names(4),
        weights=dict.fromkeys(names(4), 1),
        elements=67,
        timeout_s=5.0,
    )


def test_bytes_and_seconds_of_all_rounds_are_added() -> None:
    sums, _ = noise(4, torch.float32)
    everywhere = results(run_all(Grid(), sums, [1] * 4))
    assert all(result.bytes_sent == 2 * 67 * 4 for result in everywhere), "67 elements in one chunk, each round"


def test_rate_that_one_round_measured_outlives_a_later_round_that_could_not() -> None:
    """In the last round of a hierarchy only one of a region sends sums, to those it measured in the first."""
    sums = [torch.ones(1 << 17) for _ in range(4)]
    everywhere = results(run_all(Hierarchy(dict(zip(names(4), "aabb", strict=True))), sums, [1] * 4))
    for near, result in zip((1, 0, 3, 2), everywhere, strict=True):
        assert result.heard[names(4)[near]].bytes_per_s > 0
