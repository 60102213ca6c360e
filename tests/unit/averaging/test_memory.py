"""What a round held is let go when it is over, and not when the collector comes by: vectors are as large as models."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.averaging.allreduce.exchange import ReducedVector
from swarm.averaging.allreduce.messages import CHUNK, ENTER
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.averaging.schedules.routes import Routes
from swarm.errors import Busy, RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from tests.harness.rigs.averaging import Network, make_plan, names, play, serve_members, turns, whole_numbers

P0, P1, P2 = names(3)
PLAN = make_plan([1, 1, 1], 36)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """The vectors of all that are made; the collector does not run meanwhile."""
    made: list[weakref.ref[Any]] = []

    def noted(plan: RoundPlan) -> ReducedVector:
        output = ReducedVector(plan)
        made.append(weakref.ref(output.vector))
        return output

    monkeypatch.setattr("swarm.averaging.allreduce.exchange.ReducedVector", noted)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


async def test_round_in_which_some_were_busy_leaves_nothing_behind(outputs: list[weakref.ref[Any]]) -> None:
    network, refused = Network(), 0

    async def busy_at_first(caller: PeerId, target: PeerId, method: Rpc[Any, Any], body: Any) -> None:
        nonlocal refused
        if method == ENTER and network.calls[ENTER] < 4:
            refused += 1
            raise Busy("not yet")

    network.hook = busy_at_first
    outcomes = await play(network, PLAN, whole_numbers(PLAN))
    assert refused == 3
    assert all(isinstance(outcome, RoundResult) for outcome in outcomes.values())
    outcomes.clear()
    await turns()
    assert [output() for output in outputs] == [None] * 3


async def test_round_that_failed_leaves_nothing_behind(outputs: list[weakref.ref[Any]]) -> None:
    network = Network()

    async def die(caller: PeerId, target: PeerId, method: Rpc[Any, Any], body: Any) -> None:
        if method == CHUNK and network.calls[CHUNK] == 5:
            network.kill(P2)
            await asyncio.sleep(0)

    network.hook = die
    outcomes = await play(network, PLAN, whole_numbers(PLAN))
    assert network.dead(P2), "the fault did not fire"
    assert all(isinstance(outcomes[peer], RoundFailed) for peer in (P0, P1))
    assert [output() for output in outputs] == [None] * 3


async def test_round_that_is_remembered_keeps_none_of_its_trees_and_grew_one_for_each_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Routes]] = []
    grown: list[PeerId] = []

    def noted(*args: Any) -> Routes:
        routes = Routes(*args)
        made.append(weakref.ref(routes))
        return routes

    grow = Routes._grow
    monkeypatch.setattr("swarm.averaging.allreduce.plan.Routes", noted)
    monkeypatch.setattr(Routes, "_grow", lambda self, root: grown.append(root) or grow(self, root))
    network, sums = Network(), whole_numbers(PLAN)
    services = await serve_members(network, PLAN.members)
    for service in services.values():
        service.expect(dataclasses.replace(PLAN))
    later = [services[peer].reduce(dataclasses.replace(PLAN, timeout_s=20.0), sums[peer]) for peer in PLAN.members]
    await asyncio.gather(*later)
    assert len(made) == len(PLAN.members), "what was worked out when it was expected serves for the round"
    assert sorted(grown) == sorted(PLAN.members), "nobody is below a member but in its own part's tree"
    gc.collect()
    assert [routes() for routes in made] == [None] * 3, "the services are still there"
