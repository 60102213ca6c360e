"""A reducer that gives all members the same wrong mean is seen by who reduces again; nobody else is named for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce import check
from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.check import Commitment, RoundCheck
from swarm.averaging.allreduce.messages import CHECKED, ENTER, SUM
from swarm.averaging.allreduce.output import Floats, weighted_mean
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.errors import RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Incoming
from swarm.schema import Empty
from tests.harness.rigs.averaging import Network, make_plan, names, reduce_at, right_mean, serve_members, whole_numbers
from tests.harness.rigs.common import sign

LIAR, *HONEST = names(4)
Services = dict[PeerId, AllReduce]


def plan_of(**fields: Any) -> RoundPlan:
    return make_plan([3, 1, 2, 2], 40, **{"checked": 1.0, **fields})


def wrong_means(services: Services) -> None:
    """Have the liar give everybody its means with the other sign."""
    struck = services[LIAR]

    def negated(*args: Any) -> Floats:
        result: Floats = -weighted_mean(*args)
        return result

    struck._means = dataclasses.replace(struck._means, reducer=negated)


def draws(monkeypatch: pytest.MonkeyPatch, *drawing: PeerId) -> None:
    """Only these draw anything: all chunks."""
    monkeypatch.setattr(
        check, "drawn", lambda plan, me, everything: [c for c in plan.chunks if me in drawing and plan.reducer(c) != me]
    )


def named(outcomes: list[Any]) -> list[str]:
    """Whom each honest member names."""
    honest = outcomes[1:]
    assert all(isinstance(one, RoundFailed) for one in honest), honest
    return [one.peer for one in honest]


@pytest.mark.parametrize("fields", [{}, {"guarded": True}, {"codec": "int8"}, {"dtype": "float64"}])
async def test_honest_round_gives_the_same_bits_checked_or_not(fields: dict[str, Any]) -> None:
    results = []
    for plan in (plan_of(**fields), plan_of(**fields | {"checked": 0.0})):
        network, sums = Network(), whole_numbers(plan)
        found = await reduce_at(await serve_members(network, plan.members), plan, sums)
        assert all(isinstance(one, RoundResult) for one in found), found
        results.append(found[0])
        asked = network.calls[SUM]
        assert bool(asked) == bool(plan.checked)
    assert results[0].digest == results[1].digest
    if fields.get("codec") != "int8":
        assert torch.equal(results[0].tensor, right_mean(plan, sums))


@pytest.mark.parametrize("drawing", [HONEST[:1], HONEST])
async def test_reducer_of_a_wrong_mean_is_named_by_all_whoever_draws(
    monkeypatch: pytest.MonkeyPatch, drawing: list[PeerId]
) -> None:
    plan = plan_of()
    services = await serve_members(Network(), plan.members)
    wrong_means(services)
    draws(monkeypatch, *drawing)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    assert named(outcomes) == [LIAR] * 3
    monkeypatch.undo()
    again = plan_of(checked=1e-9, attempt=1)
    assert named(await reduce_at(services, again, whole_numbers(again))) == [LIAR] * 3, "from now on all is checked"


async def test_reducer_that_gives_up_when_it_is_called_wrong_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)
    wrong_means(services)
    draws(monkeypatch, HONEST[0])

    async def gives_up(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        await services[LIAR]._tell(plan, RoundFailed("no reason"))
        services[LIAR]._leave(services[LIAR]._running[plan.key], "", RoundFailed("no reason"))
        return Answer(Empty())

    network.endpoints[LIAR].replace_handler(CHECKED, gives_up)
    assert named(await reduce_at(services, plan, whole_numbers(plan))) == [LIAR] * 3


async def test_member_that_calls_a_right_mean_wrong_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, honest = plan_of(), RoundCheck._wrong

    async def lies(self: RoundCheck, output: Any, chunks: Any) -> Any:
        return list(chunks)[:1] if self._me == LIAR else await honest(self, output, chunks)

    monkeypatch.setattr(RoundCheck, "_wrong", lies)
    services = await serve_members(Network(), plan.members)
    accused, *others = named(await reduce_at(services, plan, whole_numbers(plan)))
    assert plan.reducer(plan.chunks[0]) == LIAR or accused in (LIAR, ""), "nobody waits for one that may be wrong"
    assert others == [LIAR] * 2


async def test_member_that_gives_who_checks_another_sum_has_no_reducer_named() -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)
    told: list[PeerId] = []

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        told.append(caller)
        return Answer(Empty(), bytes(plan.sums.wire_bytes(plan.chunks[body.index].elements)))

    network.endpoints[LIAR].replace_handler(SUM, forge)
    found = named(await reduce_at(services, plan, whole_numbers(plan)))
    assert told
    assert set(found) <= {LIAR, ""}
    assert LIAR in found


@pytest.mark.parametrize("deceived", [HONEST[:1], HONEST[1:], HONEST])
async def test_member_that_commits_to_two_sums_is_named_by_all(deceived: list[PeerId]) -> None:
    plan, network = plan_of(checked=1e-9), Network()
    services = await serve_members(network, plan.members)
    await _commits_otherwise(network, plan, lambda caller: caller in deceived)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    found = named(outcomes)
    assert set(found) <= {LIAR, ""}, "who got what it committed to there may hear of it before"
    assert LIAR in found


async def _commits_otherwise(network: Network, plan: RoundPlan, whom: Callable[[PeerId], bool]) -> None:
    from swarm.security.signing import Signing

    honest, other = network.endpoints[LIAR].handler(ENTER), [bytes(16)] * len(plan.chunks)
    forged = Commitment.of(plan, other, Signing(lambda data: sign(LIAR, data))).to_bytes()

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        answer = await honest(caller, body, incoming)
        return Answer(Empty(), forged) if whom(caller) else answer

    network.endpoints[LIAR].replace_handler(ENTER, forge)


@pytest.mark.parametrize("told", [b"", bytes(64), bytes(64 + 32 * 10), bytes(64 + 32 * 10 + 1)])
async def test_commitment_that_is_none_is_refused(told: bytes) -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        return Answer(Empty(), told)

    network.endpoints[LIAR].replace_handler(ENTER, forge)
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert LIAR in named(found)
    assert set(named(found)) <= {LIAR, ""}
