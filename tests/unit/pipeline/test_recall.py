"""A replica asked to give again, to take over, or to drop: by those who may, and by those who may not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.errors import Busy, PeerError, Refused, WrongStep
from swarm.events import Accumulated
from swarm.ids import JourneyKey, PeerId
from swarm.pipeline import recall
from swarm.pipeline.messages import RECALL, TRAINER_RECALL, Adopt, Drop, Recall, TrainerRecall
from swarm.pipeline.seals import told_digest
from swarm.security.signing import receipt_bytes
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    ACTIVATION_BYTES,
    ALIEN,
    DOWN,
    ME,
    ROUTE,
    RUN,
    TRAINER,
    UP,
    Crew,
    FakeLeader,
    ReplicaScene,
    microbatch,
    turns,
    value,
    verify,
    working,
)


async def ask(scene: ReplicaScene, by: PeerId, **changes: Any) -> float:
    """The first element of what the replica answers."""
    fields: dict[str, Any] = {"step": 1, "microbatch": microbatch(0), "route": ROUTE, "hop": 1, "what": "output"}
    body = Recall(**(fields | changes))
    endpoint = scene.boxes[by].endpoint
    _, payload = await endpoint.call(ME, RECALL, body, timeout_s=5, max_reply_bytes=ACTIVATION_BYTES)
    return value(payload)


async def adopt(scene: ReplicaScene, *, by: PeerId = TRAINER, attempt: int = 1, **changes: Any) -> None:
    await scene.boxes[by].call(ME, Adopt(**scene.fields(attempt=attempt, within_s=5.0, **changes)))


async def test_recall_gives_what_was_sent_before_and_after_the_contribution(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    assert await ask(scene, DOWN) == 6.0
    await scene.backward(x=4.0)
    await eventually(lambda: scene.part.held)
    for by in (DOWN, TRAINER):
        assert await ask(scene, by) == 6.0
    for by in (UP, TRAINER):
        assert await ask(scene, by, what="gradient") == 5.0
    assert scene.part.held == {microbatch(0): 32.0}
    assert len(scene.replica.events.of(Accumulated)) == 1


async def test_recall_of_a_step_that_follows_another_record_is_refused(scene: ReplicaScene) -> None:
    scene.replica.open_step(13, after="a" * 16)
    await scene.there(step=13, x=3.0, after="a" * 16)
    assert await ask(scene, DOWN, step=13, after="a" * 16) == 6.0
    with pytest.raises(WrongStep, match="follows another record"):
        await ask(scene, DOWN, step=13, after="b" * 16)


async def test_recall_by_who_adopts_says_which_record_its_step_follows(scene: ReplicaScene) -> None:
    scene.replica.open_step(13, after="a" * 16)
    await adopt(scene, step=13, after="a" * 16)
    await eventually(lambda: scene.up.of("recall") and scene.down.of("recall"))
    assert {body.after for body in (*scene.up.of("recall"), *scene.down.of("recall"))} == {"a" * 16}


async def test_recall_by_a_replica_that_works_no_more_is_refused_each_time() -> None:
    scene = ReplicaScene()
    await scene.open()
    async with working(scene.replica):
        await scene.there(x=3.0)
        await scene.backward(x=4.0)
        await eventually(lambda: scene.part.held)
    for _ in range(2):
        with pytest.raises(Refused, match="does not work now"):
            await ask(scene, DOWN)


LIES: list[tuple[str, PeerId, dict[str, Any], type[PeerError]]] = [
    ("output by the stage before", UP, {}, Refused),
    ("gradient by the stage after", DOWN, {"what": "gradient"}, Refused),
    ("by a stranger", ALIEN, {}, Refused),
    ("along a route without us", DOWN, {"route": (UP, DOWN, ME)}, Refused),
    ("along a short route", DOWN, {"route": (UP, ME)}, Refused),
    ("of another stage", DOWN, {"hop": 2}, WrongStep),
    ("of a closed step", DOWN, {"step": 0}, WrongStep),
    ("of the next step", DOWN, {"step": 2}, WrongStep),
    ("of one who is no trainer", DOWN, {"microbatch": microbatch(0, ALIEN)}, Refused),
]


@pytest.mark.parametrize("lie", [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
async def test_recall_is_refused(scene: ReplicaScene, lie: tuple[PeerId, dict[str, Any], type[PeerError]]) -> None:
    by, changes, error = lie
    await scene.there()
    with pytest.raises(error):
        await ask(scene, by, **changes)


async def test_recall_of_what_its_neighbours_cannot_give_says_who(scene: ReplicaScene) -> None:
    scene.network.kill(UP)
    with pytest.raises(Refused, match=r"stage 1: up: no such peer"):
        await ask(scene, DOWN)


async def test_recalls_are_bounded_by_kind(scene: ReplicaScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "MAX_RECALLS", 2)
    scene.replica.device.gate = asyncio.Event()
    await scene.forward()
    waiting = [asyncio.create_task(ask(scene, DOWN)) for _ in range(2)]
    await turns()
    with pytest.raises(Busy, match="2 recalls"):
        await ask(scene, DOWN)
    scene.replica.device.gate.set()
    assert await asyncio.gather(*waiting) == [2.0, 2.0]


async def test_adopting_again_what_is_added_tells_again_and_adds_nothing(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    await scene.backward(x=4.0)
    await eventually(lambda: scene.up.of("backward"))
    await adopt(scene)
    await eventually(lambda: len(scene.up.of("backward")) == 2)
    assert scene.up.payloads("backward") == [5.0, 5.0]
    back = [report for report in scene.trainer.of("hop") if report.direction == "backward"]
    assert [report.again for report in back] == [False, True]
    assert all(
        verify(
            ME,
            receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 1, told_digest(report.content, report.seals)),
            report.receipt,
        )
        for report in back
    )
    assert len(scene.replica.events.of(Accumulated)) == 1


async def test_trainer_that_brings_the_gradient_of_what_is_added_anew_is_told_again() -> None:
    """Its receipt was lost, or not believed: the one place that it can move the hop to may be this one."""
    scene = ReplicaScene(stage=1, route=(UP, ME))
    await scene.open()
    async with working(scene.replica):
        await scene.forward(x=3.0)
        await eventually(lambda: scene.trainer.of("output"))
        for _ in range(2):
            await scene.backward(x=4.0, by=TRAINER)
            await eventually(lambda: scene.up.of("backward"))
            await turns()
        assert [report.again for report in scene.trainer.of("hop")] == [False, False]
        await scene.backward(x=4.0, by=TRAINER, attempt=1)
        await eventually(lambda: len(scene.up.of("backward")) == 2)
        assert [report.again for report in scene.trainer.of("hop")] == [False, False, True]
    assert len(scene.replica.events.of(Accumulated)) == 1


async def test_neighbour_that_hands_on_the_gradient_of_what_is_added_anew_is_thanked(scene: ReplicaScene) -> None:
    """Its trainer asks for itself where something is missing: else one lost receipt would be told all the way down."""
    await scene.there(x=3.0)
    for attempt in range(2):
        await scene.backward(x=4.0, attempt=attempt)
        await eventually(lambda: scene.up.of("backward"))
    await turns()
    assert [len(scene.up.of("backward")), len(scene.trainer.of("hop"))] == [1, 2]


async def test_adopting_with_a_neighbour_gone_names_it_to_the_trainer(scene: ReplicaScene) -> None:
    scene.network.kill(DOWN)
    await scene.forward(x=3.0)
    await adopt(scene)
    await eventually(lambda: any(b.direction == "backward" for b in scene.trainer.of("blocked")))
    blocked = next(b for b in scene.trainer.of("blocked") if b.direction == "backward")
    assert (blocked.code, blocked.hop, blocked.peer) == ("unreachable", 2, DOWN)
    assert scene.part.held == {}


@pytest.mark.parametrize("by", [UP, DOWN, ALIEN])
async def test_only_its_trainer_has_a_microbatch_adopted_or_dropped(scene: ReplicaScene, by: PeerId) -> None:
    await scene.there()
    with pytest.raises(Refused, match="only its trainer"):
        await adopt(scene, by=by)
    body = Drop(step=1, microbatch=microbatch(0), attempt=9, hop=1)
    with pytest.raises(Refused, match="only its trainer"):
        await scene.boxes[by].call(ME, body)


async def test_a_dropped_microbatch_gives_its_place_back_and_one_that_was_added_stays() -> None:
    scene = ReplicaScene(max_under_way=1)
    await scene.open()
    drop = [Drop(step=1, microbatch=microbatch(position), attempt=3, hop=1) for position in range(2)]
    async with working(scene.replica):
        await scene.there(0)
        await scene.trainer.call(ME, drop[0])
        await scene.there(1)
        await scene.backward(1)
        await eventually(lambda: scene.part.held)
        await scene.trainer.call(ME, drop[1])
        assert set(scene.part.held) == {microbatch(1)}
        assert await ask(scene, DOWN, microbatch=microbatch(1)) == 2.0


async def test_trainer_gives_again_only_to_its_own_stages() -> None:
    first, last = PeerId("a0"), PeerId("b0")
    crew = await Crew.of([[first], [last]])
    leader = FakeLeader(1)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)

        async def get(by: PeerId, what: str, **changes: Any) -> float:
            fields: dict[str, Any] = {"step": 1, "microbatch": microbatch(0), "route": (first, last), "what": what}
            _, payload = await crew.replicas[by].endpoint.call(
                TRAINER,
                TRAINER_RECALL,
                TrainerRecall(**(fields | changes)),
                timeout_s=5,
                max_reply_bytes=ACTIVATION_BYTES,
            )
            return value(payload)

        assert (await get(first, "output"), await get(last, "gradient")) == (1.0, 1.0)
        for by, what in ((last, "output"), (first, "gradient"), (last, "targets"), (first, "targets")):
            with pytest.raises(Refused):
                await get(by, what)
        for changes in ({"microbatch": microbatch(0, PeerId("other"))}, {"route": (first,)}):
            with pytest.raises(Refused):
                await get(last, "gradient", **changes)
        with pytest.raises(WrongStep):
            await get(last, "gradient", step=2)
