"""A receipt is of one computing, however a microbatch came here: else honest judges would call its replica wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from blake3 import blake3

from swarm.errors import Busy, Refused
from swarm.events import HopAudited
from swarm.ids import PeerId, StepWork
from swarm.network.protocols import Payload
from swarm.pipeline.messages import Adopt, HopReport
from swarm.pipeline.recall import Errand
from swarm.pipeline.seals import NOTHING, Content
from swarm.pipeline.trainer.journey import MOST_DIFFERING
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    ME,
    PHASES,
    ROUTE,
    Crew,
    FakeLeader,
    ReplicaScene,
    failing,
    microbatch,
    quick,
    seals,
    tensor,
    turns,
    value,
    working,
)  # fmt: skip
from tests.unit.pipeline.test_auditing import audits_of

WORK = StepWork(1, microbatch(0))
HASHES = {blake3(tensor(float(one))).digest(): float(one) for one in range(20)} | {NOTHING: None}


@pytest.fixture(params=[1 << 20, 0], ids=["retained", "nothing retained"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[ReplicaScene]:
    found = ReplicaScene(retention_bytes=request.param)
    await found.open()
    async with working(found.replica):
        yield found


def neighbours_give(scene: ReplicaScene, output: float, gradient: float) -> None:
    """From now on the neighbours give this when they are asked again."""

    async def ask(peer: PeerId, errand: Errand, hop: int, what: Any) -> tuple[Payload, bytes]:
        payload = tensor(output if what == "output" else gradient)
        return payload, seals(peer).seal(errand.across(1, what), blake3(payload).digest())

    scene.server._recalls.ask = ask  # type: ignore[method-assign]


async def receipts(scene: ReplicaScene, some: int) -> list[list[float | None]]:
    """Return what the trainer's receipts are of, once there are so many: input, output, gradient, and what was sent."""

    def told() -> list[HopReport]:
        return [one for one in scene.trainer.of("hop") if one.receipt]

    await eventually(lambda: len(told()) >= some)
    return [[HASHES[hashed] for hashed in Content.from_wire(one.content)] for one in told()]


async def adopt(scene: ReplicaScene, attempt: int) -> None:
    await scene.trainer.call(ME, Adopt(**scene.fields(attempt=attempt, within_s=5.0)))


async def added(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    await scene.backward(x=4.0)
    await eventually(lambda: scene.part.held)


async def taken_over(scene: ReplicaScene) -> None:
    neighbours_give(scene, 7.0, 8.0)
    await adopt(scene, 1)
    await receipts(scene, 1)


async def gradient_came_first(scene: ReplicaScene) -> None:
    neighbours_give(scene, 7.0, 8.0)
    await scene.backward(x=4.0)
    await receipts(scene, 1)


async def sent_again_from_others(scene: ReplicaScene) -> None:
    await added(scene)
    neighbours_give(scene, 7.0, 8.0)
    await scene.forward(x=3.0, attempt=1)
    await eventually(lambda: len(scene.down.of("forward")) == 2)
    for attempt in (2, 3):
        await adopt(scene, attempt)
        await eventually(lambda attempt=attempt: len(scene.up.of("backward")) == attempt)
    await receipts(scene, 3)


async def taken_out_and_given_another_input(scene: ReplicaScene) -> None:
    await added(scene)
    neighbours_give(scene, 3.0, 4.0)
    await scene.server.settle(1, {})
    assert scene.part.held == {}
    await scene.forward(x=9.0, attempt=1)
    await turns()
    await scene.backward(x=4.0, attempt=1)
    assert (await receipts(scene, 2))[-1] == [9.0, 18.0, 4.0, 5.0]


async def put_in_at_the_closing(scene: ReplicaScene) -> None:
    neighbours_give(scene, 7.0, 8.0)
    await scene.server.settle(1, {WORK: ROUTE})
    await adopt(scene, 1)
    assert await receipts(scene, 1) == [[7.0, None, 8.0, None]], "no trainer takes that for a receipt"


WAYS: list[Callable[[ReplicaScene], Awaitable[None]]] = [
    taken_over, gradient_came_first, sent_again_from_others, taken_out_and_given_another_input, put_in_at_the_closing,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_receipt_is_of_what_its_replica_computed(scene: ReplicaScene, way: Any) -> None:
    await way(scene)
    for came, output, back, sent in await receipts(scene, 1):
        assert came is not None
        assert back is not None
        if way is not put_in_at_the_closing:
            assert (output, sent) == (2 * came, 1 + back)


A, B = ([PeerId(f"{stage}{number}") for number in range(4)] for stage in "ab")


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
async def test_who_takes_a_hop_over_from_one_that_died_is_found_right(hosted: bool, phase: str, stage: int) -> None:
    crew = await Crew.of([A, B], hosted=hosted, in_flight=2, pace=quick(), gone=lambda: crew.struck)
    audits_of(crew).gone = lambda: crew.struck
    crew.strike(0 if phase == "handed on" else stage, phase, crew.kill)
    leader = await crew.feed(4)
    assert len(crew.struck) == 1, "the fault did not fire"
    assert {event.outcome for event in crew.side.events.of(HopAudited)} == {"passed"}
    assert (leader.accused, len(leader.finished)) == ([], 4)


# --- lies that no judge sees ------------------------------------------------------------------------------------------


async def settled(crew: Crew) -> FakeLeader:
    """Feed four microbatches, then settle, as at a step's closing."""
    leader = FakeLeader(4)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)
        await crew.settle(crew.assigned(leader))
    return leader


def blames_the_next(crew: Crew, liar: PeerId) -> None:
    """Says that the next stage takes nothing, and sends another one something else."""
    sender = crew.replicas[liar].server._sender
    honest = sender.send_output

    async def send_output(state: Any, output: Payload) -> None:
        was = blake3(output).digest()
        if state.hashes.output == NOTHING:
            await sender.report_blocked(state.key, state.route, 1, "forward", Refused("it does not take it"))
        else:
            await honest(state, OTHERWISE)
        state.hashes.output = was

    sender.send_output = send_output  # type: ignore[method-assign]


def leaves_the_way_back_to_others(crew: Crew, liar: PeerId) -> None:
    """Sends something else, and then forgets the microbatch."""
    replica = crew.replicas[liar]
    replica.part.scale *= 1.5
    replica.part.on["backward"] = failing(RuntimeError("a broken device"))


def answers_another_question_otherwise(crew: Crew, liar: PeerId) -> None:
    """Gives something else to who takes the next hop over."""
    crew.replicas[liar].server._recalls.output = AsyncMock(return_value=OTHERWISE)  # type: ignore[method-assign]
    crew.strike(1, "backward", crew.kill)


OTHERWISE = tensor(3.0)
"""In the place of what the first stage sends: 2.0 of each microbatch."""
LIES = [blames_the_next, leaves_the_way_back_to_others, answers_another_question_otherwise]


async def lied_to(lie: Callable[[Crew, PeerId], None], *liars: PeerId) -> tuple[Crew, list[float]]:
    """Return a crew with liars at its first stage, and what its second stage comes to compute with."""
    crew = await Crew.of([A, B[:2]], in_flight=2, pace=quick(), gone=lambda: crew.struck)
    audits_of(crew).gone = lambda: crew.struck
    for liar in liars:
        lie(crew, liar)
    came = list[float]()
    for peer in crew.stages[1]:
        forward = crew.replicas[peer].part.forward

        def noted(x: Any, *, forward: Any = forward, **how: Any) -> Any:
            came.append(float(x.flatten()[0]))
            return forward(x, **how)

        crew.replicas[peer].part.forward = noted  # type: ignore[method-assign]
    return crew, came


@pytest.mark.parametrize("lie", LIES)
async def test_who_gives_its_neighbour_something_else_than_its_judges_gains_nothing(lie: Any) -> None:
    crew, came = await lied_to(lie, *A[:2])
    leader = await settled(crew)
    assert value(OTHERWISE) in came, "it told no lie"
    assert (len(leader.finished), leader.aside, leader.accused) == (4, {}, [])
    tables = [crew.replicas[peer].server._table for peer in crew.stages[1] if peer not in crew.struck]
    states = [state for table in tables for state in table if state.accumulated]
    assert [value(state.tensors.input) for state in states] == [2.0] * 4


async def test_microbatch_about_which_some_lie_each_time_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    crew, came = await lied_to(blames_the_next, *A)
    leader = await settled(crew)
    assert value(OTHERWISE) in came, "it told no lie"
    assert caplog.text.count("is begun anew") == 4 * MOST_DIFFERING
    assert (len(leader.aside), leader.finished, leader.accused) == (4, [], [])
    assert crew.sums() == [{}, {}]


@pytest.mark.parametrize("behind", [B[:2], B[:1]], ids=["one of two", "the only one"])
async def test_who_takes_over_with_other_bits_has_the_microbatch_begin_anew_and_count(behind: list[PeerId]) -> None:
    crew = await Crew.of([A, behind], pace=quick(), gone=lambda: crew.struck)
    audits_of(crew).gone = lambda: crew.struck
    for number, peer in enumerate(A):
        crew.replicas[peer].part.scale *= 1 + number * 2e-7
    busy = list[PeerId]()
    for peer in behind:
        undo = crew.replicas[peer].server._undo

        async def busy_first(state: Any, *, peer: PeerId = peer, undo: Any = undo) -> Any:
            busy.append(peer)
            if busy.count(peer) == 1:
                raise Busy("it is just being added")
            return await undo(state)

        crew.replicas[peer].server._undo = busy_first  # type: ignore[method-assign]
    crew.strike(0, "handed on", crew.kill)
    leader = await settled(crew)
    assert len(crew.struck) == 1, "the fault did not fire"
    assert any(one.key.way for one in leader.finished)
    assert (len(leader.finished), leader.aside, leader.accused) == (4, {}, [])
