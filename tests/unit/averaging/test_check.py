"""A reducer that gives all members the same wrong mean is seen by who reduces again; nobody else is named for it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce import check
from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.check import Commitment, RoundCheck
from swarm.averaging.allreduce.messages import AGREE, CHECKED, CHUNK, ENTER, SUM, Checked, SumRequest
from swarm.averaging.allreduce.output import Floats, weighted_mean
from swarm.averaging.allreduce.partition import BLOCKS, ReduceChunk
from swarm.averaging.allreduce.plan import RoundPlan, RoundResult
from swarm.errors import Busy, Refused, RoundFailed
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Incoming
from swarm.schema import Empty
from swarm.security.signing import Signing
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

    def all_of(plan: RoundPlan, me: PeerId, everything: bool) -> tuple[list[ReduceChunk], list[Any]]:
        return [c for c in plan.chunks if me in drawing and plan.reducer(c) != me], []

    monkeypatch.setattr(check, "drawn", all_of)


def draws_a_block(monkeypatch: pytest.MonkeyPatch, drawing: PeerId, of: PeerId) -> None:
    """Only this one draws anything: a block of what another reduces."""

    def one(plan: RoundPlan, me: PeerId, everything: bool) -> tuple[list[Any], list[tuple[ReduceChunk, int]]]:
        chunk = next(chunk for chunk in plan.chunks if plan.reducer(chunk) == of)
        return [], [(chunk, BLOCKS - 1)] if me == drawing else []

    monkeypatch.setattr(check, "drawn", one)


def named(outcomes: list[Any]) -> list[str]:
    """Whom each honest member names."""
    honest = outcomes[1:]
    assert all(isinstance(one, RoundFailed) for one in honest), honest
    return [one.peer for one in honest]


@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("fields", [{}, {"guarded": True}, {"codec": "int8"}, {"dtype": "float64"}])
async def test_honest_round_gives_the_same_bits_checked_or_not(fields: dict[str, Any], last: int) -> None:
    results = []
    for checked in (1.0, 0.0):
        plan = make_plan([3, 1, 2, last], 40, checked=checked, **fields)
        nothing = torch.zeros(plan.elements, dtype=getattr(torch, plan.dtype))
        network, sums = Network(), dict.fromkeys(plan.members, nothing) | whole_numbers(plan)
        found = await reduce_at(await serve_members(network, plan.members), plan, sums)
        assert all(isinstance(one, RoundResult) for one in found), found
        results.append(found[0])
        asked = network.calls[SUM]
        assert bool(asked) == bool(plan.checked)
    assert results[0].digest == results[1].digest
    if fields.get("codec") != "int8" and not any(one.left_out for one in found):
        assert torch.equal(results[0].tensor, right_mean(plan, sums))


@pytest.mark.parametrize("drawing", [HONEST[:1], HONEST])
@pytest.mark.parametrize("weights", [[3, 1, 2, 2], [3, 1, 2]])
async def test_reducer_of_a_wrong_mean_is_named_by_all_whoever_draws(
    monkeypatch: pytest.MonkeyPatch, drawing: list[PeerId], weights: list[int]
) -> None:
    plan = make_plan(weights, 40, checked=1.0)
    services = await serve_members(Network(), plan.members)
    wrong_means(services)
    draws(monkeypatch, *drawing)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    assert set(named(outcomes)) == {LIAR}
    assert proven(outcomes) == [LIAR] * len(outcomes[1:]), "each of them has reduced it itself"
    monkeypatch.undo()
    again = make_plan(weights, 40, checked=1e-9, attempt=1)
    assert set(named(await reduce_at(services, again, whole_numbers(again)))) == {LIAR}, "from now on all is checked"


async def test_reducer_of_a_wrong_mean_is_proven_wrong_by_who_draws_one_block_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, network = make_plan([3, 1, 2, 2], 128, checked=1.0, chunk_elements=32), Network()
    services = await serve_members(network, plan.members)
    wrong_means(services)
    draws_a_block(monkeypatch, HONEST[0], LIAR)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    assert (named(outcomes), proven(outcomes)) == ([LIAR] * 3, [LIAR] * 3)


@pytest.mark.parametrize("fields", [{}, {"guarded": True}, {"dtype": "float64"}])
async def test_honest_block_takes_its_own_bytes_and_one_that_left_a_sum_out_those_of_its_chunk(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    plan, network = make_plan([3, 1, 2, 2], 128, checked=1.0, chunk_elements=32, **fields), Network()
    services, sums, asked = await serve_members(network, plan.members), whole_numbers(plan), list[int | None]()

    async def hears(caller: PeerId, target: PeerId, rpc: Any, body: Any) -> None:
        if rpc is SUM:
            asked.append(body.block)

    network.hook = hears
    draws_a_block(monkeypatch, HONEST[0], LIAR)
    if plan.guarded:
        sums[LIAR] *= 1000
    found = await reduce_at(services, plan, sums)
    assert all(isinstance(one, RoundResult) for one in found), found
    assert bool(found[0].left_out) is plan.guarded
    assert asked == [BLOCKS - 1] * 3 + [None] * 3 * plan.guarded


def test_so_much_is_drawn_as_the_plan_says_of_long_vectors_and_of_short_ones() -> None:
    for elements, guarded in itertools.product((4 << 16, 40), (False, True)):
        plan = make_plan([1, 1, 1], elements, checked=0.1, chunk_elements=1 << 16, guarded=guarded)
        others = sum(chunk.elements for chunk in plan.chunks if plan.reducer(chunk) != LIAR)
        took = 0
        for _ in range(times := 2000):
            chunks, blocks = check.drawn(plan, LIAR, everything=False)
            assert all(plan.reducer(chunk) != LIAR for chunk in (*chunks, *(chunk for chunk, _ in blocks)))
            took += sum(chunk.elements for chunk in chunks)
            took += sum(len(range(chunk.elements)[chunk.block(number)]) for chunk, number in blocks)
        assert took / (times * others) == pytest.approx(0.1, abs=0.02)
        chunks, blocks = check.drawn(plan, LIAR, everything=True)
        assert (sum(chunk.elements for chunk in chunks), blocks) == (others, [])


async def test_reducer_that_gives_up_when_called_wrong_is_named_by_who_saw_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)
    wrong_means(services)
    draws(monkeypatch, HONEST[0])

    async def gives_up(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        await services[LIAR]._tell(plan, RoundFailed("no reason"))
        services[LIAR]._leave(services[LIAR]._running[plan.key], "", RoundFailed("no reason"))
        return Answer(Empty())

    network.endpoints[LIAR].replace_handler(CHECKED, gives_up)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    drew, *others = named(outcomes)
    assert drew == LIAR
    assert set(proven(outcomes)) == {LIAR}
    assert set(others) <= {LIAR, ""}, "they have not seen it themselves"


@pytest.mark.parametrize("weights", [[3, 1, 2, 2], [3, 1, 2]])
async def test_reducer_that_first_calls_those_wrong_that_draw_its_mean_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, weights: list[int]
) -> None:
    plan, network = make_plan(weights, 40, checked=1.0), Network()
    services = await serve_members(network, plan.members)
    wrong_means(services)
    draws(monkeypatch, LIAR, HONEST[0])
    honest, called, others = RoundCheck._found, set[PeerId](), {*plan.members} - {LIAR, HONEST[0]}
    everybody = asyncio.Event()

    async def late(self: RoundCheck, output: Any, chunks: Any) -> Any:
        """The liar's lie is out before the one that draws its mean has looked at it."""
        chunks = list(chunks)
        if self._me == LIAR:
            return {next(chunk for chunk in chunks if plan.reducer(chunk) == HONEST[0]): False}
        if self._me == HONEST[0] and not called >= others:
            await everybody.wait()
        return await honest(self, output, chunks)

    async def tells(caller: PeerId, target: PeerId, rpc: Any, body: Any) -> None:
        if caller in others and rpc is SUM and target == HONEST[0]:
            called.add(caller)
            if called >= others:
                everybody.set()

    monkeypatch.setattr(RoundCheck, "_found", late)
    network.hook = tells
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    assert called == others, "they reduce again what the liar calls wrong, and wait for whom it names"
    assert proven(outcomes) == [LIAR] * len(outcomes[1:])


def proven(outcomes: list[Any]) -> list[str]:
    """Whom each honest member has proven wrong that has."""
    return [one.peer for one in outcomes[1:] if isinstance(one, RoundFailed) and one.proven]


def accuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the liar call the first mean wrong that it did not give."""
    honest = RoundCheck._found

    async def lies(self: RoundCheck, output: Any, chunks: Any) -> Any:
        return {next(iter(chunks)): False} if self._me == LIAR else await honest(self, output, chunks)

    monkeypatch.setattr(RoundCheck, "_found", lies)


@pytest.mark.parametrize("silent_to", [(), (HONEST[1],), HONEST[:2], HONEST[1:]])
async def test_mean_that_is_called_wrong_and_is_right_stays(
    monkeypatch: pytest.MonkeyPatch, silent_to: Sequence[PeerId]
) -> None:
    plan, network, told = plan_of(), Network(), list[PeerId]()
    accuses(monkeypatch)

    async def equivocates(caller: PeerId, target: PeerId, rpc: Any, body: Any) -> None:
        if caller == LIAR and rpc is CHECKED and body.turn == 0:
            told.append(target)
            if target in silent_to:
                body.__dict__["wrong"] = {}

    network.hook = equivocates
    services = await serve_members(network, plan.members)
    liar, *honest = await reduce_at(services, plan, whole_numbers(plan))
    assert set(told) == set(HONEST)
    assert all(isinstance(one, RoundResult) for one in honest), honest
    assert isinstance(liar, RoundFailed), "it believes itself"


async def test_words_of_a_check_count_from_who_has_agreed_alone() -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)
    accused = plan.reducer(plan.chunks[-1])
    struck: list[str] = []

    async def early(caller: PeerId, target: PeerId, rpc: Any, body: Any) -> None:
        if caller != LIAR or rpc is not CHUNK or struck or target == accused:
            return
        struck.append(target)
        words = Checked.of(plan, turn=0, wrong={LIAR: (plan.chunks[-1].index, bytes(64))})
        with pytest.raises(Busy):
            await network.endpoints[LIAR].call(target, CHECKED, words, timeout_s=1.0)

    network.hook = early
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert struck
    assert all(isinstance(one, RoundResult) for one in found), found


async def test_nobody_is_given_the_sums_of_others_before_it_has_committed_to_its_own() -> None:
    """Of three, one that hands in another's sum has the third one's left out as far from both."""
    plan, network, peeked = plan_of(guarded=True), Network(), set[PeerId]()
    services = await serve_members(network, plan.members)
    honest, most = network.endpoints[LIAR].handler(ENTER), plan.sums.wire_bytes(plan.chunks[0].elements)

    async def peeks(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        if caller not in peeked:
            peeked.add(caller)
            with pytest.raises(Busy, match="once all have committed"):
                await network.endpoints[LIAR].call(
                    caller, SUM, SumRequest.of(plan, index=0), timeout_s=1.0, max_reply_bytes=most
                )
        return await honest(caller, body, incoming)

    network.endpoints[LIAR].replace_handler(ENTER, peeks)
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert peeked == {*HONEST}
    assert all(isinstance(one, RoundResult) for one in found), found


async def test_member_that_gives_who_checks_another_sum_has_no_reducer_named() -> None:
    plan, network = plan_of(), Network()
    services = await serve_members(network, plan.members)
    told: list[PeerId] = []

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        told.append(caller)
        return Answer(Empty(), bytes(plan.sums.wire_bytes(plan.chunks[body.index].elements)))

    network.endpoints[LIAR].replace_handler(SUM, forge)
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert told
    assert {one.peer for one in found[1:] if isinstance(one, RoundFailed)} <= {LIAR, ""}
    assert not proven(found)


async def test_reducer_that_gives_no_sum_is_named_and_not_proven_wrong() -> None:
    plan, network, kept_back = plan_of(), Network(), list[PeerId]()
    services = await serve_members(network, plan.members)
    wrong_means(services)

    async def refuse(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        kept_back.append(caller)
        raise Refused("it is mine")

    network.endpoints[LIAR].replace_handler(SUM, refuse)
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert {*kept_back} == {*HONEST}
    assert set(named(found)) == {LIAR}
    assert not proven(found)


@pytest.mark.parametrize("deceived", [HONEST[:1], HONEST[1:], HONEST])
async def test_member_that_commits_to_two_sums_is_named_by_all(deceived: list[PeerId]) -> None:
    plan, network = plan_of(checked=1e-9), Network()
    services = await serve_members(network, plan.members)
    await _commits_otherwise(network, plan, lambda caller: caller in deceived)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    found = named(outcomes)
    assert set(found) <= {LIAR, ""}, "who got what it committed to there may hear of it before"
    assert LIAR in found


@pytest.mark.parametrize("deceived", [HONEST[:1], HONEST[1:]])
@pytest.mark.parametrize("checked", [1e-9, 1.0])
async def test_reducer_that_got_another_sum_than_others_is_not_named_for_its_mean(
    monkeypatch: pytest.MonkeyPatch, deceived: list[PeerId], checked: float
) -> None:
    plan, network, sent = plan_of(checked=checked), Network(), set[PeerId]()
    services = await serve_members(network, plan.members)
    other = {chunk.index: bytes(plan.sums.wire_bytes(chunk.elements)) for chunk in plan.chunks}
    await _commits_otherwise(network, plan, lambda caller: caller in deceived, list(other.values()))
    honest = network.endpoints[LIAR].call

    async def call(target: PeerId, rpc: Any, body: Any, *, payload: Any = b"", **more: Any) -> Any:
        if rpc is CHUNK and target in deceived:
            sent.add(target)
            payload = other[body.index]
        return await honest(target, rpc, body, payload=payload, **more)

    monkeypatch.setattr(network.endpoints[LIAR], "call", call)
    outcomes = await reduce_at(services, plan, whole_numbers(plan))
    assert sent == {*deceived}
    assert proven(outcomes) == [LIAR] * len(HONEST), "its two signatures show it to each of them"


async def test_second_sum_that_a_member_shows_of_itself_to_one_alone_names_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, network, told = plan_of(), Network(), list[PeerId]()
    services = await serve_members(network, plan.members)
    other = Commitment.of(plan, [bytes(16)] * len(plan.chunks), Signing(lambda data: sign(LIAR, data)))
    honest = network.endpoints[LIAR].call

    async def call(target: PeerId, rpc: Any, body: Any, **more: Any) -> Any:
        if rpc is AGREE and target == HONEST[0]:
            told.append(target)
            body = body.model_copy(update={"sums": {**body.sums, LIAR: (other.root + other.signature).hex()}})
        return await honest(target, rpc, body, **more)

    monkeypatch.setattr(network.endpoints[LIAR], "call", call)
    found = await reduce_at(services, plan, whole_numbers(plan))
    assert told
    assert all(isinstance(one, RoundResult) for one in found), "else who is shown it names it alone"


async def _commits_otherwise(
    network: Network, plan: RoundPlan, whom: Callable[[PeerId], bool], other: Sequence[bytes] = ()
) -> None:
    honest, other = network.endpoints[LIAR].handler(ENTER), other or [bytes(16)] * len(plan.chunks)
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
