"""No matter who dies, and when: survivors never end a round with different results, and repeating it is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.messages import AGREE
from swarm.averaging.allreduce.output import Floats, weighted_mean
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult, WireType
from swarm.errors import RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import (
    LoopClock,
    Network,
    Outcome,
    in_virtual_time,
    inline,
    make_plan,
    right_mean,
    whole_numbers,
)

QUICK = settings(max_examples=50, deadline=None, derandomize=True)
ELEMENTS = 36
KINDS = ("leaves", "returns", "reduces")
"""A call of anybody leaves; a call of anybody comes back; the victim puts a chunk of its part together."""


@dataclass
class Bomb:
    """Kills ``victim`` at the event of that number, from 1, of its kind."""

    victim: PeerId
    kind: str
    number: int
    fired: bool = False
    signing: bool = False
    seen: int = 0

    def note(self, network: Network, kind: str, who: PeerId) -> None:
        if kind != self.kind or (kind == "reduces" and who != self.victim):
            return
        self.seen += 1
        if self.seen == self.number:
            self.fired, self.signing = True, network.calls[AGREE] > 0
            network.kill(self.victim)


@dataclass
class Group:
    """Members with one all-reduce each, through all attempts at one round."""

    plan: RoundPlan
    seed: int = 0
    network: Network = field(init=False)
    services: dict[PeerId, AllReduce] = field(default_factory=dict)
    bomb: Bomb | None = None

    def __post_init__(self) -> None:
        self.network = Network(self.seed)
        self.network.hook = self._leaves

    async def gather(self) -> None:
        for peer in self.plan.members:
            endpoint = await self.network.join(peer)
            endpoint.call = self._returning(peer, endpoint.call)  # type: ignore[method-assign]
            reducer = self._reducing(peer)
            self.services[peer] = AllReduce(endpoint, LoopClock(), run=inline, reducer=reducer)
            endpoint.mount(self.services[peer])

    async def attempt(
        self, plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor], bomb: Bomb | None
    ) -> dict[PeerId, Outcome]:
        """What each member got. The victim's task is cancelled, as its process would be gone."""
        self.bomb, self.network.calls[AGREE] = bomb, 0
        jobs = {peer: asyncio.ensure_future(self.services[peer].reduce(plan, sums.get(peer))) for peer in plan.members}
        ends = [asyncio.ensure_future(self._end(peer, job)) for peer, job in jobs.items()]
        outcomes = await asyncio.gather(*jobs.values(), return_exceptions=True)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        return dict(zip(jobs, outcomes, strict=True))  # type: ignore[arg-type]

    async def _end(self, peer: PeerId, job: asyncio.Future[RoundResult]) -> None:
        await self.network.wait_dead(peer)
        job.cancel()

    def _note(self, kind: str, who: PeerId) -> None:
        if self.bomb is not None and not self.bomb.fired:
            self.bomb.note(self.network, kind, who)

    async def _leaves(self, caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        self._note("leaves", caller)
        await asyncio.sleep(0)

    def _returning(self, peer: PeerId, call: Any) -> Any:
        async def wrapped(*args: Any, **options: Any) -> Any:
            answer = await call(*args, **options)
            self._note("returns", peer)
            return answer

        return wrapped

    def _reducing(self, peer: PeerId) -> Any:
        def reducer(sums: Mapping[PeerId, Floats], order: Sequence[PeerId], divisor: int, dtype: WireType) -> Floats:
            self._note("reduces", peer)
            return weighted_mean(sums, order, divisor, dtype)

        return reducer


@dataclass(frozen=True)
class Story:
    """How a round ended: the plan that held, what was applied, and the survivors' outcomes of every attempt."""

    plan: RoundPlan
    applied: tuple[RoundResult, ...]
    attempts: tuple[tuple[Outcome, ...], ...]


async def survive(plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor], bombs: Sequence[Bomb], seed: int = 0) -> Story:
    """Repeat the round without the dead until all who live hold the same result, which is when it is applied.

    Checks on the way what must hold in each attempt.
    """
    group = Group(plan, seed)
    await group.gather()
    attempts: list[tuple[Outcome, ...]] = []
    waiting = iter(bombs)
    while True:
        bomb = next(waiting, None)
        outcomes = await group.attempt(plan, sums, bomb)
        alive = tuple(peer for peer in plan.members if not group.network.dead(peer))
        attempts.append(tuple(outcomes[peer] for peer in alive))
        check_attempt(plan, sums, attempts[-1], bomb)
        if all(isinstance(outcome, RoundResult) for outcome in attempts[-1]):
            return Story(plan, tuple(o for o in attempts[-1] if isinstance(o, RoundResult)), tuple(attempts))
        if bomb is None or not bomb.fired:
            pytest.fail(f"an attempt without a death failed: {outcomes}")
        weights = {peer: plan.weights[peer] for peer in alive}
        plan = make_plan(weights, ELEMENTS, attempt=len(attempts), chunk_elements=plan.chunk_elements)


def check_attempt(
    plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor], outcomes: Sequence[Outcome], bomb: Bomb | None
) -> None:
    """All results of one attempt are the exact mean; some have one and some not only after signing had begun, and a
    death before that leaves nobody with one."""
    assert all(isinstance(outcome, RoundResult | RoundFailed) for outcome in outcomes), outcomes
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    for result in results:
        assert torch.equal(result.tensor, right_mean(plan, sums))
        assert result.contributors == plan.contributors
    assert len({result.digest for result in results}) <= 1
    if bomb is not None and bomb.fired and not bomb.signing:
        assert not results, "a result of a round that lost a member before anybody signed"
    if results and len(results) < len(outcomes):
        assert bomb is not None
        assert bomb.signing, "a split before anybody signed"


def check_story(story: Story, sums: Mapping[PeerId, torch.Tensor], before: Mapping[PeerId, torch.Tensor]) -> None:
    """Everybody applied the same bits: the exact mean of the contributors it lists; the inputs are as they were."""
    assert len(story.applied) == len(story.attempts[-1])
    assert len({result.digest for result in story.applied}) == 1
    for result in story.applied:
        assert torch.equal(result.tensor, right_mean(story.plan, sums))
    assert all(torch.equal(sums[peer], before[peer]) for peer in sums)


def copies(sums: Mapping[PeerId, torch.Tensor]) -> dict[PeerId, torch.Tensor]:
    return {peer: values.clone() for peer, values in sums.items()}


def each_moment(plan: RoundPlan, victim: PeerId, kind: str) -> Iterator[Story]:
    """One story for every event of a kind, until a round has no more of them."""
    number = 0
    while True:
        number += 1
        sums, bomb = whole_numbers(plan), Bomb(victim, kind, number)
        before = copies(sums)
        story = in_virtual_time(survive(plan, sums, [bomb]))
        check_story(story, sums, before)
        if not bomb.fired:
            assert len(story.attempts) == 1
            return
        yield story


@pytest.mark.promise("all or none of an averaging")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "chunk_elements"), [([1, 1, 1], 6), pytest.param([3, 1, 2, 0], 9, marks=pytest.mark.long)]
)
def test_member_killed_at_every_event_of_a_round_leaves_survivors_with_one_exact_result(
    weights: list[int], chunk_elements: int, kind: str
) -> None:
    plan = make_plan(weights, ELEMENTS, chunk_elements=chunk_elements)
    calls = in_virtual_time(_calls_of_a_round(plan))
    splits = 0
    for victim in plan.members:
        stories = list(each_moment(plan, victim, kind))
        expected = len(plan.chunks_of(victim)) if kind == "reduces" else calls
        assert len(stories) == expected, "not every event was reached"
        assert all(len(story.attempts) <= 2 for story in stories)
        assert all(story.plan.members == plan.members or victim not in story.plan.members for story in stories)
        repeated = sum(len(story.attempts) == 2 for story in stories)
        assert repeated or not stories, "no kill made a round void"
        splits += sum(len(set(map(type, story.attempts[0]))) == 2 for story in stories)
    assert splits or kind != "returns", "no death fell between two signatures, which splits the first attempt"


async def _calls_of_a_round(plan: RoundPlan) -> int:
    group = Group(plan)
    await group.gather()
    await group.attempt(plan, whole_numbers(plan), None)
    return sum(group.network.calls.values())


bombs_of_a_round = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(KINDS), st.integers(1, 80)), max_size=3)


@QUICK
@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any),
    chunk_elements=st.integers(1, 20),
    bombs=bombs_of_a_round,
    seed=st.integers(0, 1000),
)
def test_members_dying_one_after_the_other_leave_the_rest_with_one_exact_result(
    weights: list[int], chunk_elements: int, bombs: list[tuple[int, str, int]], seed: int
) -> None:
    plan = make_plan(weights, ELEMENTS, chunk_elements=chunk_elements)
    members = plan.members
    victims = [members[place % len(members)] for place, _, _ in bombs]
    assume(any(plan.weights[peer] for peer in members if peer not in victims))
    placed = [Bomb(victim, kind, number) for victim, (_, kind, number) in zip(victims, bombs, strict=True)]
    assume(len(set(victims)) == len(victims))
    sums = whole_numbers(plan, seed)
    before = copies(sums)
    story = in_virtual_time(survive(plan, sums, placed, seed))
    check_story(story, sums, before)
    assert len(story.attempts) <= 1 + sum(bomb.fired for bomb in placed)
