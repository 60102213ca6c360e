"""One group's round from the roster to the event."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.averaging.plan import RoundKey
from swarm.averaging.round import RoundCall, average, group_of, plan_round
from swarm.averaging.strategies import STRATEGIES
from swarm.errors import BugError, RoundFailed
from swarm.events import Event, RoundDone
from swarm.ids import PeerId, stage_part
from tests.unit.averaging.world import Network, in_virtual_time, names, serve_members

P0, P1 = names(2)
CALL = RoundCall(
    key=RoundKey(3, stage_part(1), 0), replicas=[P1, P0], weights={P0: 3, P1: 5}, elements=10, timeout_s=5.0
)


class Listed:
    """An EventSink that is a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_plan_round_is_the_same_at_every_member() -> None:
    plans = [plan_round(CALL, STRATEGIES["everyone"], peer) for peer in (P0, P1)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].members == (P0, P1)
    assert plans[0].total_weight == 8


def test_group_of_a_peer_in_none_is_a_bug() -> None:
    with pytest.raises(BugError):
        group_of(PeerId("x"), ((P0, P1),))


def test_average_emits_what_it_did() -> None:
    async def scene() -> list[Event]:
        services = await serve_members(Network(), (P0, P1))
        plan = plan_round(CALL, STRATEGIES["everyone"], P0)
        told = Listed()
        jobs = (average(services[peer], plan, torch.ones(10), told) for peer in plan.members)
        results = await asyncio.gather(*jobs)
        assert results[0].tensor.tolist() == [0.25] * 10
        return told.events

    events = in_virtual_time(scene())
    assert len(events) == 2
    for event in events:
        assert isinstance(event, RoundDone)
        assert (event.step, event.part, event.members, event.participating) == (3, "stage-1", 2, 2)
        assert event.bytes_sent == 40


def test_average_that_fails_emits_nothing() -> None:
    async def scene() -> list[Event]:
        network = Network()
        services = await serve_members(network, (P0, P1))
        network.kill(P1)
        told = Listed()
        with pytest.raises(RoundFailed):
            await average(services[P0], plan_round(CALL, STRATEGIES["everyone"], P0), torch.ones(10), told)
        return told.events

    assert in_virtual_time(scene()) == []
