"""Journeys whose replicas die or fall silent, in every phase: nothing is lost and nothing counts twice."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from swarm.errors import StateError
from swarm.events import HopMoved, JourneyCompleted, JourneySetAside
from swarm.ids import PeerId
from swarm.models.dropout import dropout_seed
from swarm.pipeline.messages import Blocked
from swarm.pipeline.trainer.hops import EXTRA_TURNS, JourneyPhase, SuspectReplica
from swarm.pipeline.trainer.journey_state import JourneyState
from swarm.pipeline.trainer.pace import JourneyDeadlines, ReplicaChoice
from swarm.pipeline.trainer.trainer import OWN_FAILURES
from swarm.pipeline.wiring import Wiring
from swarm.waiting import LATER_S
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import PHASES, Crew, FakeLeader, failing, microbatch, quick, stop, turns

A, B, C = ([PeerId(f"{stage}{number}") for number in range(2)] for stage in "abc")
STAGES = [A, B, C]
QUOTA = 4


UNBROKEN: dict[bool, list[dict[Any, float]]] = {}


async def expected(*, hosted: bool = False) -> list[dict[Any, float]]:
    """What every stage holds together when nothing fails, computed once."""
    if hosted not in UNBROKEN:
        crew = await Crew.of(STAGES, hosted=hosted)
        await crew.feed(QUOTA)
        UNBROKEN[hosted] = crew.sums()
    return UNBROKEN[hosted]


async def run_with(crew: Crew) -> FakeLeader:
    """Feed the quota, then settle, as at a step's closing."""
    leader = FakeLeader(QUOTA)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)
        await crew.settle(crew.assigned(leader))
    return leader


@pytest.mark.parametrize("how", ["kill", "silence"])
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
async def test_replica_struck_in_any_phase_costs_nothing(hosted: bool, phase: str, stage: int, how: str) -> None:
    if phase == "handed on" and stage == 2:
        stage = 1  # the last stage hands on to its trainer
    crew = await Crew.of(STAGES, hosted=hosted, in_flight=2, pace=quick())
    crew.strike(stage, phase, getattr(crew, how))
    leader = await run_with(crew)
    assert len(crew.struck) == 1, "the fault did not fire"
    assert how == "silence" or asyncio.get_running_loop().time() < 0.1, "whose connection broke is not waited for"
    assert {journey.key.microbatch for journey in leader.finished} == {microbatch(i) for i in range(QUOTA)}
    assert crew.sums() == await expected(hosted=hosted)
    assert len(crew.side.events.of(JourneyCompleted)) == QUOTA
    if not hosted:
        assert set(crew.side.part.held) == {microbatch(i) for i in range(QUOTA)}


# --- false suspicion, and stages with nobody left -------------------------------------------------------


@pytest.mark.parametrize("alive", [True, False])
def test_late_replica_of_a_run_that_has_only_begun_gets_another_turn_if_it_is_alive(alive: bool) -> None:
    replicas = ReplicaChoice(wiring=Wiring([A[:1], B[:1]], seed=1))
    replicas.pace.observe(B[0], "forward", 0.1)
    state = JourneyState(replicas, 2, hosted=False)
    state.begin(0.0)
    state.embedded(0.0)
    state.sent(0, 0.0)
    state.forwarded(0, A[0], 0.0)  # from now on it is the turn of the second stage
    now = replicas.pace.seconds(B[0], "forward") + 0.1
    if alive:
        replicas.silence.heard(B[0], now - 0.05)

    def suspected() -> list[PeerId]:
        actions = [directive.action for directive in state.look(now)]
        return [action.peer for action in actions if isinstance(action, SuspectReplica)]

    assert suspected() == ([] if alive else [B[0]])
    assert (state.way.next_due() is not None) == alive
    if alive:
        for turn in range(EXTRA_TURNS):
            due = state.way.next_due()
            assert due is not None
            assert due - now == pytest.approx(2.0 ** (turn + 1))
            now = due + 0.01
            replicas.silence.heard(B[0], now)
            found = suspected()
            assert found == [] or turn == EXTRA_TURNS - 1
        assert found == [B[0]], "in the end it is replaced all the same"


def test_late_replica_of_a_run_that_has_only_begun_gets_no_turn_beyond_what_the_others_let_anybody_wait() -> None:
    replicas = ReplicaChoice(wiring=Wiring([A[:1], B[:2]], seed=1))
    for peer, seconds in ((A[0], 0.1), (B[1], 0.1), (B[0], 4.0)):
        replicas.pace.observe(peer, "forward", seconds)
    state = JourneyState(replicas, 2, hosted=False)
    state.begin(0.0)
    state.embedded(0.0)
    state.sent(0, 0.0)
    state.forwarded(0, A[0], 0.0)
    now = 0.1 + LATER_S + 0.01
    replicas.silence.heard(B[0], now)
    late = {d.action.peer for d in state.look(now) if isinstance(d.action, SuspectReplica)}
    assert late == {state.way.hops[1].replica} == {B[0]}


async def test_late_answer_of_a_suspected_replica_is_welcome() -> None:
    crew = await Crew.of([A, B], in_flight=1, pace=quick())
    for peer in B:
        crew.replicas[peer].device.gate = asyncio.Event()
    leader = FakeLeader(1)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: crew.side.events.of(HopMoved))
        suspected = crew.side.events.of(HopMoved)[0].old
        gate = crew.replicas[suspected].device.gate
        assert gate is not None
        gate.set()
        await feeding
        assert leader.finished[0].route[1] == suspected
        assert not crew.side.wiring.statistics()[1][suspected].on_probation


async def test_only_replica_of_a_stage_that_stalls_is_waited_for() -> None:
    crew = await Crew.of([[A[0]], [B[0]]], in_flight=2, pace=quick())
    crew.replicas[B[0]].device.gate = asyncio.Event()
    leader = FakeLeader(3)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: crew.side.suspected)
        assert leader.finished == []
        crew.replicas[B[0]].device.gate.set()
        await feeding
    assert len(leader.finished) == len(crew.replicas[B[0]].part.held) == 3


async def test_stage_of_which_everybody_is_believed_gone_is_waited_for() -> None:
    gone: set[PeerId] = set(B)
    crew = await Crew.of([A, B], in_flight=2, pace=quick(), gone=lambda: gone)
    leader = FakeLeader(3)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await turns(200)
        assert crew.held(*B) == set()
        gone.remove(B[1])
        await feeding
    assert len(leader.finished) == 3
    assert (crew.held(B[0]), len(crew.held(B[1]))) == (set(), 3)


async def test_trainer_without_a_way_leases_nothing_and_still_tells_a_new_leader_what_it_has_begun() -> None:
    crew = await Crew.of([A, B], in_flight=2, gone=lambda: B)
    leader = FakeLeader(3)
    feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
    await eventually(lambda: leader.asked)  # the one who leads hears it with any question
    assert leader.leased == 0
    await stop(feeding)


async def test_trainer_whose_journeys_are_all_under_way_tells_a_new_leader_at_once_what_it_has_begun() -> None:
    crew = await Crew.of([A, B], in_flight=1)
    for peer in B:
        crew.replicas[peer].device.gate = asyncio.Event()
    leader = FakeLeader(2)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: any(len(crew.replicas[peer].server._table) for peer in B))
        before = leader.asked
        leader.again.set()
        await eventually(lambda: leader.asked > before)
        assert leader.leased == 1
        for peer in B:
            crew.replicas[peer].device.gate.set()
        await feeding
    assert (leader.leased, len(leader.finished)) == (2, 2)


async def test_replica_believed_gone_while_it_holds_work_is_replaced_without_a_deadline() -> None:
    gone: set[PeerId] = set()
    crew = await Crew.of([A, B], in_flight=1, gone=lambda: gone, pace=JourneyDeadlines(floor_s=60.0))
    for peer in B:
        crew.replicas[peer].device.gate = asyncio.Event()
    leader = FakeLeader(1)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: any(len(crew.replicas[peer].server._table) for peer in B))
        held_up = next(peer for peer in B if len(crew.replicas[peer].server._table))
        gone.add(held_up)
        for peer in set(B) - {held_up}:
            crew.replicas[peer].device.gate.set()
        await feeding
    assert [move.old for move in crew.side.events.of(HopMoved)] == [held_up]


@pytest.mark.parametrize("stage", range(2))
async def test_replica_lost_when_its_work_has_come_home_counts_all_the_same(stage: int) -> None:
    crew = await Crew.of([A, B], in_flight=1)
    finish, lost = crew.side.part.embed_backward, list[PeerId]()

    def lose(*args: Any) -> Any:
        (journey,) = crew.side.trainer._under_way()
        lost.append(journey.route[stage])
        crew.side.trainer.lost(lost[-1], "its connection broke")
        return finish(*args)

    crew.side.part.embed_backward = lose  # type: ignore[method-assign]
    leader = await crew.feed(1)
    assert [journey.route[stage] for journey in leader.finished] == lost
    assert len(leader.finished[0].receipts) == 2


async def test_late_answer_while_the_ends_finish_changes_no_route() -> None:
    gone: set[PeerId] = set()
    crew = await Crew.of([A, B], in_flight=1, gone=lambda: gone)
    usual = crew.side.context.device.run

    async def run(fn: Any, /, *args: Any) -> Any:
        (journey,) = crew.side.trainer._under_way()
        if journey._state.phase is JourneyPhase.ADDING:  # meanwhile somebody is believed gone, and says it has no place
            gone.add(journey.route[1])
            journey.lost(journey.route[1], "it is gone")
            journey.deliver_blocked(journey.route[1], blocked(1, journey.route[1], "busy"))
            await turns()
        return await usual(fn, *args)

    crew.side.context.device.run = run  # type: ignore[method-assign]
    leader = await crew.feed(1)
    assert gone == {leader.finished[0].route[1]}
    assert set(crew.side.part.held) == {microbatch(0)}
    assert crew.side.events.of(HopMoved) == []


def blocked(hop: int, peer: PeerId, code: str) -> Blocked:
    """What a replica says that does not go on with a microbatch on its way back."""
    return Blocked(
        step=1,
        microbatch=microbatch(0),
        attempt=0,
        hop=hop,
        peer=peer,
        direction="backward",
        code=code,
        reason="not yet",
    )


async def test_replica_that_says_the_same_again_and_again_takes_no_memory() -> None:
    crew = await Crew.of([A, B], in_flight=1)
    gate = crew.replicas[B[0]].device.gate = crew.replicas[B[1]].device.gate = asyncio.Event()
    leader = FakeLeader(1)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: crew.side.trainer._under_way())
        (journey,) = crew.side.trainer._under_way()
        for _ in range(100):
            journey.deliver_blocked(journey.route[0], blocked(0, journey.route[0], "refused"))
        assert len(journey._state._blocked) == 1
        gate.set()
        await feeding
    assert len(leader.finished) == 1


# --- poison ---------------------------------------------------------------------------------------------


def refuses(crew: Crew, peers: list[PeerId], where: str, positions: set[int]) -> list[PeerId]:
    """Have these replicas fail on some microbatches. Returns the list of who did."""
    failed: list[PeerId] = []
    for peer in peers:
        replica = crew.replicas[peer]
        name = "forward" if where == "forward" else "contribute"
        usual = getattr(replica.server._worker._context.compute, name)

        def fails(*about: Any, peer: PeerId = peer, usual: Any = usual, **options: Any) -> Any:
            result = usual(*about, **options) if where == "forward" else None
            seed = about[1] if where == "forward" else about[0].seed
            if seed in {dropout_seed(0, microbatch(position)) for position in positions}:
                failed.append(peer)
                raise RuntimeError("index out of range")
            return result if where == "forward" else usual(*about, **options)

        setattr(replica.server._worker._context.compute, name, fails)
    return failed


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_microbatch_that_fails_everywhere_is_set_aside_and_nobody_is_punished(where: str, replicas: int) -> None:
    stages = [A, B[:replicas], C]
    crew = await Crew.of(stages, in_flight=2, pace=quick())
    failed = refuses(crew, stages[1], where, {1})
    leader = await run_with(crew)
    assert set(failed) == set(stages[1]), "the fault did not fire"
    assert list(leader.aside) == [microbatch(1)]
    assert "index out of range" in leader.aside[microbatch(1)]
    assert [event.microbatch for event in crew.side.events.of(JourneySetAside)] == [microbatch(1)]
    assert {journey.key.microbatch for journey in leader.finished} == {microbatch(i) for i in (0, 2, 3)}
    assert [set(together) for together in crew.sums()] == [{microbatch(i) for i in (0, 2, 3)}] * 3
    assert not any(s.on_probation for stage in crew.side.wiring.statistics() for s in stage.values())
    assert crew.side.trainer.started(1) == tuple(microbatch(i) for i in range(4))
    assert crew.side.trainer.cursor_after(1, {microbatch(i) for i in (0, 2, 3)}) == (0, 4)


async def test_replica_that_fails_where_another_does_not_is_left_out_for_a_while() -> None:
    crew = await Crew.of([A, B, C], in_flight=1, pace=quick())
    failed = refuses(crew, B[:1], "forward", {0, 1, 2, 3})
    leader = await run_with(crew)
    assert failed, "the fault did not fire"
    assert leader.aside == {}
    assert len(leader.finished) == QUOTA
    assert crew.side.wiring.statistics()[1][B[0]].on_probation


async def test_microbatch_whose_loss_is_more_than_any_model_has_is_set_aside_and_says_so() -> None:
    crew = await Crew.of([A, B])
    crew.side.part.loss_value = 1e6
    assert crew.side.context.ends is not None
    crew.side.context.ends.most_loss = 88.7
    leader = await crew.feed(2)
    assert set(leader.aside) == {microbatch(0), microbatch(1)}
    assert all("nats a token, and 88.7 is the most" in reason for reason in leader.aside.values())


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
async def test_microbatch_whose_loss_is_no_number_is_set_aside(loss: float) -> None:
    crew = await Crew.of([A, B])
    crew.side.part.loss_value = loss
    leader = await crew.feed(2)
    assert set(leader.aside) == {microbatch(0), microbatch(1)}
    assert all(f"the loss is {loss}" in reason for reason in leader.aside.values())
    assert crew.side.part.held == {}


async def test_replica_that_computes_no_numbers_is_blamed_and_not_who_gets_them() -> None:
    crew = await Crew.of([A, B, C], in_flight=1, pace=quick())
    crew.replicas[A[0]].part.scale = float("nan")
    leader = await run_with(crew)
    assert (leader.aside, len(leader.finished)) == ({}, QUOTA)
    probation = {peer for stage in crew.side.wiring.statistics() for peer, s in stage.items() if s.on_probation}
    assert probation == {A[0]}


@pytest.mark.parametrize("what", ["its loss", "its embedding"])
async def test_trainer_whose_own_part_fails_again_and_again_ends_before_its_shard_is_set_aside(what: str) -> None:
    crew, leader = await Crew.of([A, B], in_flight=2), FakeLeader(50)
    if what == "its loss":
        crew.side.part.on["loss"] = failing(RuntimeError("out of memory"))
    else:
        crew.side.part.embedded = float("nan")
    async with crew.working():
        with pytest.raises(StateError, match="out of memory" if what == "its loss" else "finite"):
            await leader.fed_by(crew.side.trainer)
    assert len(leader.aside) < OWN_FAILURES


async def test_trainer_whose_own_part_fails_now_and_then_goes_on() -> None:
    crew = await Crew.of([A, B], in_flight=1)
    count = itertools.count()

    def fail() -> None:
        if next(count) % OWN_FAILURES != 0:
            raise RuntimeError("index out of range")

    crew.side.part.on["loss"] = fail
    leader = await crew.feed(9)
    assert (len(leader.aside), len(leader.finished)) == (6, 3)


# --- a trainer's steps ----------------------------------------------------------------------------------


async def test_opening_a_step_cancels_what_is_under_way_and_goes_back_to_the_cursor() -> None:
    crew = await Crew.of([A, B], in_flight=3)
    for peer in B:
        crew.replicas[peer].device.gate = asyncio.Event()
    trainer, leader = crew.side.trainer, FakeLeader(9)
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(trainer))
        await eventually(lambda: len(trainer._under_way()) == 3)
        assert trainer.started(1) == tuple(microbatch(i) for i in range(3))
        assert trainer.cursor_after(1, {microbatch(0)}) == (0, 1)
        trainer.open_step(2, [A, B], 1, (0, 1))
        await turns()
        assert (trainer._under_way(), trainer.started(1), trainer.cursor) == ([], (), (0, 1))
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def test_nothing_is_left_behind_when_feeding_ends() -> None:
    crew = await Crew.of([A, B, C], in_flight=3, pace=quick())
    before = asyncio.all_tasks()
    crew.strike(1, "forward", crew.silence)
    async with crew.working():
        feeding = asyncio.create_task(crew.side.trainer.feed(1, FakeLeader(20)))
        await eventually(lambda: crew.struck)
        await stop(feeding)
        assert crew.side.trainer._under_way() == []
    await turns(100)
    assert {
        task for task in asyncio.all_tasks() - before if "_attend" in repr(task) or "_attempt" in repr(task)
    } == set()
