"""Members that only call others: nobody calls them, and they hear of every end all the same."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce.messages import AGREE, CHUNK, ENTER, Agreement
from swarm.averaging.allreduce.plan import RoundResult
from swarm.errors import BugError, RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import Network, make_plan, names, play, right_mean, whole_numbers

P0, P1, P2, P3, P4 = names(5)
OUTGOING = frozenset({P0, P3, P4})
PLAN = make_plan([3, 1, 0, 5, 0], 19, shares={P1: 1}, outgoing=OUTGOING)
"""P1 reduces; P2 and P4 only listen."""


class Watched(Network):
    """Says who was called."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.called: set[tuple[PeerId, PeerId]] = set()
        self.hook = self._look

    async def _look(self, caller: PeerId, target: PeerId, method: Rpc[Any, Any], body: Any) -> None:
        self.called.add((caller, target))
        await self.then(caller, target, method, body)

    async def then(self, caller: PeerId, target: PeerId, method: Rpc[Any, Any], body: Any) -> None:
        """What the test does at a call."""


@pytest.mark.parametrize("seed", range(8))
async def test_everybody_has_the_mean_and_nobody_called_those_who_only_call(seed: int) -> None:
    network, sums = Watched(seed), whole_numbers(PLAN)
    outcomes = await play(network, PLAN, sums)
    for outcome in outcomes.values():
        assert isinstance(outcome, RoundResult)
        assert torch.equal(outcome.tensor, right_mean(PLAN, sums))
    assert network.called == {(a, b) for a in PLAN.members for b in (P1, P2) if a != b}


@pytest.mark.parametrize(
    ("victim", "method"),
    [(peer, method) for peer in (P0, P3, P4) for method in (ENTER, CHUNK, AGREE)] + [(P1, ENTER), (P1, AGREE)],
)
async def test_member_that_dies_fails_the_round_for_all_others(victim: PeerId, method: Rpc[Any, Any]) -> None:
    class Deadly(Watched):
        async def then(self, caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
            if name == method and caller == victim and not self.dead(victim):
                self.kill(victim)
                await asyncio.sleep(0)

    network = Deadly()
    outcomes = await play(network, PLAN, whole_numbers(PLAN))
    assert network.dead(victim), "the fault did not fire"
    for peer in set(PLAN.members) - {victim}:
        assert isinstance(outcomes[peer], RoundFailed)
    assert not {target for _, target in network.called} & OUTGOING


async def test_one_that_only_calls_and_holds_another_result_voids_the_round_for_the_others_like_it() -> None:
    class Lying(Watched):
        async def then(self, caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
            if name == AGREE and caller == P3:
                assert isinstance(body, Agreement)
                object.__setattr__(body, "result", "0" * 64)

    outcomes = await play(Lying(), PLAN, whole_numbers(PLAN))
    assert all(isinstance(outcome, RoundFailed) for outcome in outcomes.values()), outcomes


async def test_one_that_is_cancelled_tells_those_it_calls() -> None:
    """The others end long before the deadline."""
    bodies = []

    class Cancelling(Watched):
        async def then(self, caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
            if name == CHUNK and caller == P3:
                bodies.append(body)
                raise RoundFailed("it gives up")

    outcomes = await play(Cancelling(), PLAN, whole_numbers(PLAN))
    assert bodies
    assert all(isinstance(outcome, RoundFailed) and " s are over" not in str(outcome) for outcome in outcomes.values())


def test_plan_in_which_those_reduce_whom_nobody_calls_is_a_bug() -> None:
    with pytest.raises(BugError, match="nobody can call"):
        make_plan([1, 1], 8, outgoing=frozenset({P1}))
    assert make_plan([1], 8, outgoing=frozenset({P0})).chunks
    assert PLAN.digest != dataclasses.replace(PLAN, outgoing=frozenset({P0})).digest
