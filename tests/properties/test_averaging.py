"""What must hold for every group, vector, cut and order of arrival."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.averaging.allreduce.messages import CHUNK
from swarm.averaging.allreduce.partition import cut, part_bounds
from swarm.averaging.allreduce.plan import RoundResult
from swarm.errors import RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import (
    Network,
    TappedEndpoint,
    in_virtual_time,
    make_plan,
    play,
    right_mean,
    whole_numbers,
)

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
weights_of_members = st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any)
shares_of_reducers = st.lists(st.integers(0, 10**6), min_size=1, max_size=9).filter(any)


@QUICK
@given(elements=st.integers(0, 10**9), shares=shares_of_reducers)
def test_part_bounds_of_any_shares_cover_the_vector_in_proportion(elements: int, shares: list[int]) -> None:
    bounds = part_bounds(elements, shares)
    assert len(bounds) == len(shares)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == elements
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:], strict=False))
    for (start, stop), share in zip(bounds, shares, strict=True):
        assert abs((stop - start) * sum(shares) - elements * share) < sum(shares)


@QUICK
@given(elements=st.integers(0, 5000), shares=shares_of_reducers, size=st.integers(1, 700))
def test_cut_of_any_vector_covers_it_exactly_once_in_order(elements: int, shares: list[int], size: int) -> None:
    chunks = cut(elements, shares, size)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [at for chunk in chunks for at in range(chunk.start, chunk.stop)] == list(range(elements))
    assert all(0 < chunk.elements <= size for chunk in chunks)
    bounds = part_bounds(elements, shares)
    assert all(bounds[chunk.rank][0] <= chunk.start < chunk.stop <= bounds[chunk.rank][1] for chunk in chunks)


@QUICK
@given(
    weights=weights_of_members,
    elements=st.integers(0, 60),
    chunk_elements=st.integers(1, 20),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 1000),
)
def test_reduce_of_whole_numbers_gives_the_exact_mean_at_every_member(
    weights: list[int], elements: int, chunk_elements: int, dtype: str, seed: int
) -> None:
    plan = make_plan(weights, elements, chunk_elements=chunk_elements, dtype=dtype)
    sums = whole_numbers(plan, seed)
    outcomes = in_virtual_time(play(Network(seed), plan, sums))
    results = [outcome for outcome in outcomes.values() if isinstance(outcome, RoundResult)]
    assert len(results) == len(weights), outcomes
    for result in results:
        assert torch.equal(result.tensor, right_mean(plan, sums))
        assert result.tensor.dtype == torch.float32
        assert result.contributors == plan.contributors
    assert len({(result.digest, result.squared_norm) for result in results}) == 1


@QUICK
@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=5), liar=st.integers(0, 4), data=st.data())
def test_member_whose_weights_are_not_the_ledgers_leaves_nobody_with_a_result(
    weights: list[int], liar: int, data: st.DataObject
) -> None:
    """Whether their sum is the ledger's or not, no matter who says so."""
    others = data.draw(
        st.permutations(weights) | st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights))
    )
    assume(others != weights)
    plan, other = make_plan(weights, 60), make_plan(others, 60)
    peer = plan.members[liar % len(weights)]
    network = Network()
    outcomes = in_virtual_time(play(network, plan, whole_numbers(plan), {peer: other}))
    assert all(isinstance(outcome, RoundFailed) for outcome in outcomes.values()), outcomes
    assert not network.endpoints[peer].payload_sent, "somebody took its sums"


@QUICK
@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(lambda each: sum(map(bool, each)) > 1),
    liar=st.integers(0, 4),
    claim=st.integers(0, 2**40),
    number=st.integers(1, 4),
)
def test_member_that_claims_another_weight_than_the_ledgers_with_any_chunk_fails_the_round_for_all(
    weights: list[int], liar: int, claim: int, number: int
) -> None:
    plan = make_plan(weights, 60)
    peer = plan.contributors[liar % len(plan.contributors)]
    assume(claim != plan.weights[peer])
    network = Claiming(peer, claim, number)
    sums = whole_numbers(plan)
    before = {peer: values.clone() for peer, values in sums.items()}
    outcomes = in_virtual_time(play(network, plan, sums))
    assert network.claimed, "the claim was not made"
    assert all(isinstance(outcome, RoundFailed) for outcome in outcomes.values()), outcomes
    assert any("the ledger says" in str(outcome) for outcome in outcomes.values())
    assert all(torch.equal(sums[peer], before[peer]) for peer in sums)


class Claiming(Network):
    """A network in which ``liar`` claims another weight with its chunk of that number."""

    def __init__(self, liar: PeerId, claim: int, number: int) -> None:
        super().__init__()
        self._liar, self._claim, self._left = liar, claim, number

    @property
    def claimed(self) -> bool:
        return self._left <= 0

    async def join(self, peer: PeerId) -> TappedEndpoint:
        endpoint = await super().join(peer)
        if peer == self._liar:
            endpoint.call = self._lying(endpoint.call)  # type: ignore[method-assign]
        return endpoint

    def _lying(self, call: Any) -> Any:
        async def lying(target: PeerId, rpc: Rpc[Any, Any], body: Any, *args: Any, **options: Any) -> Any:
            if rpc == CHUNK:
                self._left -= 1
                if self._left == 0:
                    body = body.model_copy(update={"weight": self._claim})
            return await call(target, rpc, body, *args, **options)

        return lying


@QUICK
@given(members=st.integers(2, 6), elements=st.integers(1, 40), orders=st.tuples(st.integers(), st.integers()))
def test_reduce_in_another_order_of_arrival_gives_the_same_bits(
    members: int, elements: int, orders: tuple[int, int]
) -> None:
    plan = make_plan([1 + member for member in range(members)], elements)
    rng = torch.Generator().manual_seed(elements)
    sums = {peer: torch.randn(elements, generator=rng) * 10.0 ** (3 * rank) for rank, peer in enumerate(plan.members)}
    results: list[RoundResult] = []
    for seed in orders:
        for outcome in in_virtual_time(play(Network(seed), plan, sums)).values():
            assert isinstance(outcome, RoundResult)
            results.append(outcome)
    assert len({result.tensor.numpy().tobytes() for result in results}) == 1
    assert len({(result.digest, result.squared_norm) for result in results}) == 1
