"""A replica in the middle of a route of three, asked for everything an honest neighbour would not ask."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest
from blake3 import blake3

from swarm.consensus.roster import Roster
from swarm.errors import BugError, Busy, PeerError, Refused, Violation, WrongStep
from swarm.events import Accumulated
from swarm.ids import JourneyKey, StepWork, stage_part
from swarm.membership.roles import _participants
from swarm.pipeline.messages import BACKWARD, EVALUATE, FORWARD, Backward, Drop, Evaluate, Forward
from swarm.pipeline.seals import Content, hash_of, told_digest
from swarm.pipeline.stage import sender
from swarm.pipeline.stage.admission import Participants
from swarm.pipeline.stage.microbatch_state import Phase
from swarm.pipeline.stage.table import STAY_CEILING_S, STAY_FLOOR_S
from swarm.security.borders import Borders
from swarm.security.signing import receipt_bytes
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    ALIEN,
    DOWN,
    ME,
    RUN,
    THIEF,
    TRAINER,
    UP,
    ReplicaScene,
    failing,
    microbatch,
    places,
    sealed,
    tensor,
    token_ids,
    turns,
    verify,
    working,
)
from tests.harness.rigs.step import listed

NAN = float("nan")
SEND_S = 30.0
"""How long the payload of what was admitted may take."""


async def test_server_computes_passes_on_and_signs(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    assert scene.down.payloads("forward") == [6.0]
    assert scene.down.of("forward")[0].hop == 2
    await scene.backward(x=4.0)
    await eventually(lambda: scene.up.of("backward") and len(scene.trainer.of("hop")) == 2)
    assert scene.up.payloads("backward") == [5.0]
    assert scene.part.held == {microbatch(0): 32.0}
    out, back = scene.trainer.of("hop")
    assert (out.direction, out.receipt) == ("forward", b"")
    assert verify(
        ME, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 1, told_digest(back.content, back.seals)), back.receipt
    )
    assert [event.part for event in scene.replica.events.of(Accumulated)] == ["stage-1"]


@pytest.mark.parametrize("deferred_bytes", [0, 1 << 20], ids=["in one piece", "weights later"])
async def test_device_goes_on_while_what_is_handed_back_is_hashed(
    deferred_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = ReplicaScene(deferred_bytes=deferred_bytes)
    await scene.open()
    hashing, go = [], asyncio.Event()

    async def slow(payload: Any) -> bytes:
        if bytes(payload) == tensor(5.0):  # the gradient that goes back
            hashing.append(payload)
            await go.wait()
        return await hash_of(payload)

    monkeypatch.setattr(sender, "hash_of", slow)
    async with working(scene.replica):
        await scene.there(0, x=3.0)
        await scene.backward(0, x=4.0)
        await eventually(lambda: hashing and scene.replica.events.of(Accumulated))
        await scene.there(1)
        assert not any(report.receipt for report in scene.trainer.of("hop"))
        go.set()
        await eventually(lambda: scene.up.of("backward") and any(report.receipt for report in scene.trainer.of("hop")))
    (told,) = [report for report in scene.trainer.of("hop") if report.receipt]
    assert Content.from_wire(told.content).sent == blake3(tensor(5.0)).digest()


# --- admission ---------------------------------------------------------------------------------------------------

FORWARD_LIES: list[tuple[str, dict[str, Any], type[PeerError]]] = [
    ("by the wrong neighbour", {"by": DOWN}, Refused),
    ("by its trainer", {"by": TRAINER}, Refused),
    ("for another hop", {"hop": 2}, Refused),
    ("along a route without us", {"route": (UP, DOWN, ME)}, Refused),
    ("along a short route", {"route": (UP, ME)}, Refused),
    ("along a route with a stranger", {"route": (UP, ME, THIEF)}, Refused),
    ("of one who is no trainer", {"microbatch": microbatch(0, ALIEN)}, Refused),
    ("of a step far ahead", {"step": 3}, WrongStep),
    ("of the step before", {"step": 0}, WrongStep),
    ("too short", {"x": tensor(1.0)[:-1]}, Violation),
    ("too long", {"x": tensor(1.0) + b"\0"}, Violation),
    ("empty", {"x": b""}, Violation),
]


@pytest.mark.parametrize("changes", [lie[1:] for lie in FORWARD_LIES], ids=[lie[0] for lie in FORWARD_LIES])
async def test_server_refuses_a_forward(scene: ReplicaScene, changes: tuple[dict[str, Any], type[PeerError]]) -> None:
    with pytest.raises(changes[1]):
        await scene.forward(**changes[0])
    assert len(scene.server._table) == 0


async def test_server_computes_nothing_of_an_activation_that_its_sender_did_not_sign(scene: ReplicaScene) -> None:
    for attempt, seal in enumerate((bytes(64), sealed(Forward, UP, tensor(2.0), **scene.fields()).seal)):
        with pytest.raises(Violation, match="not of what was sent"):
            await scene.forward(0, x=1.0, attempt=attempt, seal=seal)
    await scene.there(0, x=1.0, attempt=2)
    assert scene.down.payloads("forward") == [2.0]


BACKWARD_LIES = [
    ("by the wrong neighbour", {"by": UP}, Refused),
    ("by its trainer", {"by": TRAINER}, Refused),
    ("for another hop", {"hop": 2}, Refused),
    ("by another way than there", {"route": (ALIEN, ME, DOWN)}, Refused),
    ("of another step", {"step": 3}, WrongStep),
    ("too long", {"x": tensor(1.0) + b"\0"}, Violation),
    ("with nobody's signature", {"seal": bytes(64)}, Violation),
]


@pytest.mark.parametrize("changes", [lie[1:] for lie in BACKWARD_LIES], ids=[lie[0] for lie in BACKWARD_LIES])
async def test_server_refuses_a_backward(scene: ReplicaScene, changes: tuple[dict[str, Any], type[PeerError]]) -> None:
    await scene.there()
    with pytest.raises(changes[1]):
        await scene.backward(**changes[0])
    assert scene.part.held == {}
    await scene.backward()
    await eventually(lambda: scene.part.held)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"by": UP}, Refused),
        ({"microbatch": microbatch(0, ALIEN)}, Refused),
        ({"hop": 2}, Refused),
        ({"step": 0}, WrongStep),
        ({"after": "beef"}, WrongStep),
        ({"step": 2}, Busy),
        ({"x": tensor(3.0)[:-1]}, Violation),
    ],
)
async def test_server_evaluates_rows_of_a_trainer_and_keeps_nothing(
    scene: ReplicaScene, changes: dict[str, Any], refusal: type[PeerError]
) -> None:
    asked: dict[str, Any] = {"step": 1, "microbatch": microbatch(0), "hop": 1, "after": ""}
    caller, x = changes.pop("by", TRAINER), changes.pop("x", tensor(3.0))

    async def evaluate(body: dict[str, Any], by: Any, payload: bytes) -> bytes:
        how = {"timeout_s": SEND_S, "payload": payload, "max_reply_bytes": len(tensor(0.0))}
        endpoint = {UP: scene.up, TRAINER: scene.trainer}[by].endpoint
        return bytes((await endpoint.call(ME, EVALUATE, Evaluate(**body), **how))[1])

    with pytest.raises(refusal):
        await evaluate(asked | changes, caller, x)
    assert await evaluate(asked, TRAINER, tensor(3.0)) == tensor(6.0)
    assert (len(scene.server._table), scene.server._rules._evaluated, scene.part.held) == (0, 0, {})


async def test_server_brought_what_it_has_had_counts_it_once(scene: ReplicaScene) -> None:
    await scene.there()
    for attempt in (0, 1):
        await scene.forward(attempt=attempt)
    await scene.backward(attempt=2)
    await eventually(lambda: scene.up.of("backward"))
    scene.part.on = {name: failing(BugError("computed twice")) for name in ("accumulate",)}
    await scene.forward(attempt=3)
    await scene.backward(attempt=3)
    await turns()
    assert len(scene.part.held) == len(scene.replica.events.of(Accumulated)) == 1


async def test_server_asked_for_a_forward_anew_tells_and_hands_on_again(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    await scene.forward(attempt=1, x=3.0)
    await eventually(lambda: len(scene.down.of("forward")) == 2)
    assert scene.down.payloads("forward") == [6.0, 6.0]
    assert [report.again for report in scene.trainer.of("hop")] == [False, True]


async def test_server_refuses_an_attempt_that_was_superseded(scene: ReplicaScene) -> None:
    await scene.there(attempt=2)
    for stale in (scene.forward(attempt=1), scene.backward(attempt=1), scene.resend(attempt=1)):
        with pytest.raises(Refused, match="superseded by 2"):
            await stale


async def test_server_goes_no_way_that_its_trainer_did_not_choose(scene: ReplicaScene) -> None:
    signed = scene.fields()["chosen"]
    made_up: tuple[dict[str, Any], ...] = (
        {"attempt": 5, "chosen": bytes(64)},
        {"attempt": 5, "chosen": signed},
        {"route": (UP, ME, ALIEN), "chosen": signed},
        {"microbatch": microbatch(1), "chosen": signed},
    )
    for lie in made_up:
        with pytest.raises(Refused, match="its trainer did not choose this way"):
            await scene.forward(**lie)
    with pytest.raises(Refused, match="its trainer did not choose this way"):
        await scene.backward(attempt=5, chosen=signed)
    assert len(scene.server._table) == 0
    await scene.there()
    for lie in made_up:
        with pytest.raises(Refused, match="its trainer did not choose this way"):
            await scene.forward(**lie)
    await scene.backward()
    await eventually(lambda: scene.up.of("backward"))
    assert {one.chosen for one in (*scene.down.of("forward"), *scene.up.of("backward"))} == {signed}


async def test_server_brought_a_backward_before_its_forward_is_computed_waits_for_it(scene: ReplicaScene) -> None:
    scene.replica.device.gate = asyncio.Event()
    await scene.forward()
    await turns()
    await scene.backward(x=4.0)
    scene.replica.device.gate.set()
    await eventually(lambda: scene.up.of("backward"))
    assert scene.part.held == {microbatch(0): 32.0}
    assert scene.down.mail == []


async def test_server_with_two_backwards_on_their_way_takes_one(scene: ReplicaScene) -> None:
    await scene.there()
    first, second = (
        scene.arrive("backward", sealed(Backward, DOWN, tensor(x), **scene.fields()), tensor(x), DOWN)
        for x in (1.0, 2.0)
    )
    await first()
    await second()
    await eventually(lambda: scene.up.of("backward"))
    assert scene.part.held == {microbatch(0): 8.0}


async def test_server_whose_step_closed_while_a_payload_came_refuses_it(scene: ReplicaScene) -> None:
    await scene.there(0)
    late = [
        scene.arrive("forward", sealed(Forward, UP, tensor(1.0), **scene.fields(1)), tensor(1.0), UP),
        scene.arrive("backward", sealed(Backward, DOWN, tensor(1.0), **scene.fields(0)), tensor(1.0), DOWN),
    ]
    scene.replica.open_step(2)
    for arrive in late:
        with pytest.raises(WrongStep):
            await arrive()
    assert len(scene.server._table) == 0
    await scene.there(2, step=2)


async def test_server_takes_a_higher_attempt_for_a_forward_that_never_came(scene: ReplicaScene) -> None:
    late = scene.arrive("forward", sealed(Forward, UP, tensor(9.0), **scene.fields(attempt=0)), tensor(9.0), UP)
    await scene.there(attempt=1, x=1.0)
    with pytest.raises(Refused):
        await late()
    assert scene.down.payloads("forward") == [2.0]


# --- limits --------------------------------------------------------------------------------------------------------


async def test_server_with_a_full_queue_is_busy() -> None:
    scene = ReplicaScene(max_queue=2)
    await scene.open()
    for position in (0, 1):
        await scene.forward(position)
    with pytest.raises(Busy):
        await scene.forward(2)
    async with working(scene.replica):
        await eventually(lambda: len(scene.down.of("forward")) == 2)
        await scene.there(2)


async def test_server_with_too_much_under_way_is_busy_until_something_came_back() -> None:
    scene = ReplicaScene(max_under_way=2)
    await scene.open()
    async with working(scene.replica):
        await scene.there(0)
        await scene.there(1)
        with pytest.raises(Busy, match="2 microbatches under way"):
            await scene.forward(2)
        await scene.backward(0)
        await eventually(lambda: scene.part.held)
        await scene.there(2)


async def test_server_keeps_half_of_its_places_from_a_trainer_that_would_fill_them_all() -> None:
    scene = ReplicaScene(max_under_way=4)
    await scene.open()
    two, anybody = frozenset([TRAINER, ALIEN]), places(3).stages
    homes = Borders({ME: "ours", TRAINER: "ours", ALIEN: "theirs"})
    assert not Participants(two, anybody, homes).shared(ME, TRAINER), "those of another organisation get nothing here"
    rested = _participants(Roster([listed(one, "trainer", None) for one in two], unfed={ALIEN: 9}), stage_part(1))
    assert [rested.shared(ME, trainer) for trainer in (TRAINER, ALIEN)] == [False, True], "nothing counts of that one"
    scene.replica.open_step(1, Participants(two, anybody))
    async with working(scene.replica):
        for position in range(2):
            await scene.there(position)
        with pytest.raises(Busy, match="2 microbatches of its trainer under way"):
            await scene.forward(2)
        for position in range(2):
            await scene.there(0, microbatch=microbatch(position, ALIEN))


async def test_server_whose_own_numbers_overflow_says_so_itself(scene: ReplicaScene) -> None:
    scene.part.scale = NAN
    await scene.forward()
    blocked = await scene.blocked()
    assert (blocked.hop, blocked.code, blocked.reason) == (1, "violation", "the output is not finite")
    assert scene.down.of("forward") == []


async def test_server_frees_the_place_of_a_payload_that_never_came() -> None:
    scene = ReplicaScene(max_under_way=1, send_timeout_s=7.0)
    await scene.open()
    scene.arrive("forward", sealed(Forward, UP, tensor(1.0), **scene.fields(0)), tensor(1.0), UP)
    async with working(scene.replica):
        scene.replica.clock.now = 6.9
        with pytest.raises(Busy):
            await scene.forward(1)
        scene.replica.clock.now = 7.0
        await scene.there(1)


async def test_server_whose_places_are_taken_by_what_nobody_continues_gives_them_to_others() -> None:
    scene = ReplicaScene(max_under_way=2)
    await scene.open()
    async with working(scene.replica):
        await scene.there(0)
        scene.replica.clock.now = 5.0
        await scene.backward(0)
        await eventually(lambda: scene.part.held)  # this one waited 5 s for its gradient
        for position in (1, 2):
            await scene.there(position)
        scene.replica.clock.now = 5.0 + STAY_FLOOR_S + SEND_S
        with pytest.raises(Busy, match="2 microbatches under way"):
            await scene.forward(3)
        scene.replica.clock.now += 0.1
        await scene.there(3)
        await scene.backward(2)  # only one had to make room
        await eventually(lambda: set(scene.part.held) == {microbatch(0), microbatch(2)})


async def test_server_that_gave_a_place_away_computes_the_microbatch_when_its_gradient_comes() -> None:
    scene = ReplicaScene(max_under_way=1)
    await scene.open()
    async with working(scene.replica):
        await scene.there(0)
        scene.replica.clock.now = STAY_CEILING_S + SEND_S + 0.1
        await scene.there(1)
        await scene.backward(1)
        await eventually(lambda: scene.part.held)
        await scene.backward(0)
        blocked = await scene.blocked()  # a neighbour that only takes notes has no input to give again
        assert (blocked.hop, blocked.direction) == (0, "backward")


async def test_server_full_of_the_next_steps_work_takes_the_open_ones() -> None:
    scene = ReplicaScene(max_under_way=2, max_queue=2)
    await scene.open()
    async with working(scene.replica):
        await scene.forward(7, step=2)
        with pytest.raises(Busy, match="1 microbatches under way"):
            await scene.forward(8, step=2)
        await scene.there(0)
        await scene.there(1)


async def test_server_places_are_not_taken_by_what_was_taken_out_of_the_sum() -> None:
    scene = ReplicaScene(max_under_way=2)
    await scene.open()
    async with working(scene.replica):
        for position in range(2):
            await scene.there(position)
            await scene.backward(position)
        await eventually(lambda: len(scene.part.held) == 2)
        await scene.server.settle(1, {})
        assert scene.part.held == {}
        await scene.there(2)
        await scene.there(3)


async def test_server_places_are_freed_by_microbatches_that_fail() -> None:
    scene = ReplicaScene(max_under_way=1)
    await scene.open()
    async with working(scene.replica):
        for position in range(3):
            await scene.forward(position, x=NAN)
            await eventually(lambda position=position: len(scene.trainer.of("blocked")) == position + 1)
        await scene.there(4)


# --- steps ---------------------------------------------------------------------------------------------------------


async def test_server_holds_the_next_steps_forward_until_it_opens(scene: ReplicaScene) -> None:
    await scene.forward(0, step=2)
    await turns()
    assert scene.down.mail == []
    scene.replica.open_step(2)
    await eventually(lambda: scene.down.of("forward"))
    assert scene.down.of("forward")[0].step == 2


async def test_server_refuses_trainers_that_the_new_roster_left_out(scene: ReplicaScene) -> None:
    scene.replica.open_step(2, places(3, ALIEN))
    with pytest.raises(Refused, match="not a trainer"):
        await scene.forward(step=2)


# --- another route -----------------------------------------------------------------------------------------------


async def test_server_sends_its_output_again_along_another_route(scene: ReplicaScene) -> None:
    await scene.there()
    await scene.resend(attempt=1, route=(UP, ME, ALIEN))
    await eventually(lambda: scene.boxes[ALIEN].of("forward"))
    (again,) = scene.boxes[ALIEN].of("forward")
    assert (again.attempt, again.route) == (1, (UP, ME, ALIEN))
    with pytest.raises(Refused, match="must come from stranger"):
        await scene.backward(attempt=1, route=(UP, ME, ALIEN))
    await scene.backward(by=ALIEN, attempt=1, route=(UP, ME, ALIEN))
    await eventually(lambda: scene.up.of("backward"))


RESEND_LIES = [
    ("by a neighbour", {"by": DOWN, "attempt": 1}, "only its trainer"),
    ("of another trainer", {"by": ALIEN, "attempt": 1}, "only its trainer"),
    ("as the same attempt", {"attempt": 0}, "sent already"),
    ("of what is not here", {"position": 5, "attempt": 1}, "not held here"),
    ("along a route without us", {"attempt": 1, "route": (UP, DOWN, ME)}, "does not lead through"),
]


@pytest.mark.parametrize("changes", [lie[1:] for lie in RESEND_LIES], ids=[lie[0] for lie in RESEND_LIES])
async def test_server_refuses_to_send_again(scene: ReplicaScene, changes: tuple[dict[str, Any], str]) -> None:
    await scene.there()
    with pytest.raises(Refused, match=changes[1]):
        await scene.resend(**changes[0])
    assert len(scene.down.of("forward")) == 1


async def test_server_tells_the_trainer_which_attempt_its_neighbour_refused(scene: ReplicaScene) -> None:
    scene.down.errors[FORWARD] = Busy("full")
    await scene.forward()
    blocked = await scene.blocked()
    assert (blocked.code, blocked.hop, blocked.peer, blocked.attempt) == ("busy", 2, DOWN, 0)


async def test_server_whose_upstream_is_gone_tells_the_trainer(scene: ReplicaScene) -> None:
    await scene.there()
    scene.network.kill(UP)
    await scene.backward()
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction, blocked.hop, blocked.peer) == ("unreachable", "backward", 0, UP)


async def test_server_whose_trainer_is_gone_goes_on_working(scene: ReplicaScene) -> None:
    scene.network.kill(TRAINER)
    await scene.there(0)
    scene.down.errors[FORWARD] = Busy("full")
    await scene.forward(1)
    await turns()
    del scene.down.errors[FORWARD]
    await scene.there(2)


# --- poison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
async def test_server_given_an_activation_that_is_no_number_says_so_and_goes_on(
    scene: ReplicaScene, poison: float
) -> None:
    await scene.forward(0, x=poison)
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction, blocked.hop, blocked.peer) == ("violation", "forward", 1, ME)
    assert scene.down.mail == []
    await scene.there(1)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
async def test_server_given_a_gradient_that_is_no_number_adds_nothing_and_goes_on(
    scene: ReplicaScene, poison: float
) -> None:
    await scene.there(0)
    await scene.backward(0, x=poison)
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction) == ("violation", "backward")
    assert (scene.part.held, scene.up.mail) == ({}, [])
    await scene.there(1)
    await scene.backward(1)
    await eventually(lambda: scene.part.held)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError(), ValueError("shape")])
async def test_server_whose_part_fails_on_one_microbatch_tells_why_and_goes_on(
    scene: ReplicaScene, where: str, error: Exception
) -> None:
    scene.part.on[where] = failing(error)
    if where == "forward":
        await scene.forward()
    else:
        await scene.there()
        await scene.backward()
    blocked = await scene.blocked()
    assert (blocked.code, blocked.direction, blocked.peer) == ("failed", where, ME)
    assert type(error).__name__ in blocked.reason
    assert (scene.part.held, len(scene.server._table)) == ({}, 0)
    scene.part.on.clear()
    await scene.there(attempt=1)
    await scene.backward(attempt=1)
    await eventually(lambda: scene.part.held)


@pytest.mark.parametrize(
    ("where", "error"),
    [("forward", BugError("no weights yet")), ("backward", BugError("spent")), ("accumulate", MemoryError("half"))],
)
async def test_server_whose_state_is_broken_ends_with_the_reason(where: str, error: Exception) -> None:
    scene = ReplicaScene()
    await scene.open()
    async with working(scene.replica) as (task,):
        if where != "forward":
            await scene.there()
        scene.part.on[where] = failing(error)
        await (scene.forward() if where == "forward" else scene.backward())
        with pytest.raises(ExceptionGroup) as caught:
            await task
    assert caught.group_contains(BugError, match=str(error))


# --- memory --------------------------------------------------------------------------------------------------------


def kept(scene: ReplicaScene) -> list[Any]:
    """Everything large that the replica still holds."""
    names = ("input", "targets", "output", "graph", "gradient")
    return [name for p in scene.server._table for name in names if getattr(p.tensors, name) is not None]


async def test_server_holds_graph_and_output_until_the_backward_and_what_it_received_after(scene: ReplicaScene) -> None:
    graphs: list[weakref.ref[Any]] = []
    usual = scene.part.forward

    def forward(x: Any, **options: Any) -> Any:
        output, graph = usual(x, **options)
        graphs.append(weakref.ref(graph))
        return output, graph

    scene.part.forward = forward  # type: ignore[method-assign]
    await scene.there()
    assert kept(scene) == ["input", "output", "graph"]
    await scene.backward()
    await eventually(lambda: scene.up.of("backward"))
    assert kept(scene) == ["input", "gradient"]
    await turns()
    gc.collect()
    assert [graph() for graph in graphs] == [None]


async def test_server_forgets_graphs_of_a_closed_step(scene: ReplicaScene) -> None:
    await scene.there()
    graph = weakref.ref(next(iter(scene.server._table)).tensors.graph)
    scene.replica.open_step(2)
    await turns()
    gc.collect()
    assert graph() is None


# --- hosted ends -----------------------------------------------------------------------------------------------------


async def hosted(**settings: Any) -> ReplicaScene:
    scene = ReplicaScene(stage=1, route=(UP, ME), hosted=True, **settings)
    await scene.open()
    return scene


@pytest.mark.parametrize("order", ["forward first", "targets first"])
async def test_server_with_the_loss_waits_for_both_halves(order: str) -> None:
    scene = await hosted()
    async with working(scene.replica):
        halves = [scene.forward(), scene.targets()]
        for half in halves if order == "forward first" else reversed(halves):
            assert scene.part.held == {}
            await half
        await eventually(lambda: scene.trainer.of("hop") and scene.up.of("backward"))
    (report,) = scene.trainer.of("hop")
    assert (report.direction, report.loss_sum, report.tokens) == ("backward", 3.0, 2)
    assert kept(scene) == ["input", "targets"]


async def test_server_with_the_loss_brought_its_targets_again_works_with_them_once() -> None:
    scene = await hosted()
    async with working(scene.replica):
        for attempt in (0, 0, 1):
            await scene.targets(attempt=attempt)
        scene.replica.device.gate = asyncio.Event()
        await scene.forward(attempt=1)
        await scene.targets(attempt=2)
        scene.replica.device.gate.set()
        await eventually(lambda: scene.part.held)
        await scene.targets(attempt=2)
        await turns()
        assert kept(scene) == ["input", "targets"]
        with pytest.raises(Refused, match="superseded"):
            await scene.targets(attempt=1)
        with pytest.raises(Refused, match="from their trainer"):
            await scene.targets(1, by=UP)
    assert len(scene.trainer.of("hop")) == 1


async def test_server_with_the_loss_is_not_made_busy_by_targets_alone() -> None:
    scene = await hosted(max_under_way=1)
    async with working(scene.replica):
        for position in range(3):
            await scene.targets(position)
        await scene.forward(2)
        await eventually(lambda: scene.part.held)


async def test_server_with_the_loss_bounds_the_targets_it_keeps() -> None:
    scene = await hosted(max_under_way=1)
    for position in range(4):
        await scene.targets(position)
    with pytest.raises(Busy, match="4 targets"):
        await scene.targets(5)


async def test_server_with_the_loss_does_not_count_what_is_computed_among_targets_that_wait() -> None:
    scene = await hosted(max_under_way=1)
    async with working(scene.replica):
        for position in range(4):
            state = scene.server._table.place(StepWork(1, microbatch(position)), scene.route)
            state.tensors.targets, state.phase = token_ids(), Phase.ACCUMULATED  # replayed here: nobody sent a forward
        await scene.targets(9)


async def test_server_whose_loss_is_no_number_adds_nothing() -> None:
    scene = await hosted()
    scene.part.loss_value = NAN
    async with working(scene.replica):
        await scene.targets()
        await scene.forward()
        blocked = await scene.blocked()
    assert (blocked.code, blocked.reason) == ("violation", "the loss is nan")
    assert scene.part.held == {}


async def test_server_says_once_a_step_that_a_trainer_cannot_be_told(
    scene: ReplicaScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swarm.pipeline.stage.sender")
    scene.network.kill(TRAINER)
    for position in range(5):
        await scene.there(position)
    await eventually(lambda: "cannot tell trainer" in caplog.text)
    await turns()
    assert caplog.text.count("cannot tell trainer") == 1
    scene.replica.open_step(2)
    for position in range(5, 8):
        await scene.there(position, step=2)
    await turns()
    assert caplog.text.count("cannot tell trainer") == 2


# --- what a lineage that was given up leaves behind --------------------------------------------------------------

COUNTS, GIVEN_UP = "a" * 16, "b" * 16


def rewind(scene: ReplicaScene) -> None:
    """Step 13 comes a second time, after another record."""
    scene.server.rewound()
    scene.replica.open_step(13, after=COUNTS)


async def test_replica_that_rewound_takes_nothing_late_of_the_step_of_the_same_number(scene: ReplicaScene) -> None:
    scene.replica.open_step(13, after=GIVEN_UP)
    late = sealed(Forward, UP, tensor(3.0), **scene.fields(step=13, after=GIVEN_UP))
    arrives = scene.arrive("forward", late, tensor(3.0), UP)
    rewind(scene)
    for send in (scene.forward, scene.backward, scene.resend):
        with pytest.raises(WrongStep, match="follows another record"):
            await send(step=13, after=GIVEN_UP)
    scene.arrive("forward", sealed(Forward, UP, tensor(10.0), **scene.fields(step=13, after=COUNTS)), tensor(10.0), UP)
    with pytest.raises(WrongStep, match="follows another record"):
        await arrives()
    await scene.there(step=13, x=10.0, attempt=1, after=COUNTS)
    dropped = Drop(step=13, microbatch=microbatch(0), attempt=9, hop=1, after=GIVEN_UP)
    await scene.trainer.call(ME, dropped)
    await scene.backward(step=13, x=1.0, attempt=1, after=COUNTS)
    await eventually(lambda: scene.up.of("backward") and len(scene.trainer.of("hop")) == 2)
    assert scene.down.payloads("forward") == [20.0]
    sent = (*scene.down.of("forward"), *scene.up.of("backward"), *scene.trainer.of("hop"))
    assert {body.after for body in sent} == {COUNTS}


async def test_replica_that_opens_a_step_forgets_what_came_ahead_of_it_and_follows_another_record(
    scene: ReplicaScene,
) -> None:
    scene.replica.open_step(12, after="c" * 16)
    await scene.forward(step=13, x=3.0, after=GIVEN_UP)
    with pytest.raises(Busy, match="not open yet"):
        await scene.forward(step=13, x=10.0, after=COUNTS)
    await scene.forward(1, step=13, x=5.0, after=COUNTS)
    scene.replica.open_step(13, after=COUNTS)
    await scene.there(step=13, x=10.0, after=COUNTS)
    await turns()
    assert sorted(scene.down.payloads("forward")) == [10.0, 20.0]


async def test_replica_that_rewinds_while_it_computes_tells_nothing_of_that(scene: ReplicaScene) -> None:
    scene.replica.open_step(13, after=GIVEN_UP)
    await scene.there(step=13, after=GIVEN_UP)
    scene.replica.device.gate = gate = asyncio.Event()
    await scene.backward(step=13, after=GIVEN_UP)
    await turns()
    scene.server.rewound()
    gate.set()
    await turns()
    assert scene.part.held, "it was computed to its end"
    assert not scene.replica.events.of(Accumulated)
    assert not scene.up.of("backward")
    assert [report.direction for report in scene.trainer.of("hop")] == ["forward"]


async def test_replica_that_rewinds_does_not_go_on_sending(scene: ReplicaScene) -> None:
    paused = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await paused.wait()

    scene.replica.clock.sleep = sleep  # type: ignore[method-assign]
    scene.replica.open_step(13, after=GIVEN_UP)
    await scene.there(step=13, after=GIVEN_UP)
    scene.up.errors[BACKWARD] = Busy("full")
    await scene.backward(step=13, after=GIVEN_UP)
    await eventually(lambda: len(scene.trainer.of("hop")) == 2)
    await turns()
    scene.server.rewound()
    scene.up.errors.clear()
    paused.set()
    await turns()
    assert not scene.up.of("backward")
