"""A microbatch that its trainer begins anew: it is out of the sum, and back where the step counts it after all."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import PeerError, Refused
from swarm.events import ContributionReplayed, ContributionReversed
from swarm.ids import ATTEMPTS_OF_A_WAY as ANEW
from swarm.ids import StepWork
from swarm.pipeline.messages import RECALL, TRAINER_RECALL, Drop
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import ME, ROUTE, TRAINER, ReplicaScene, failing, microbatch, working

WORK = StepWork(1, microbatch(0))


async def undo(scene: ReplicaScene, attempt: int = 0) -> None:
    await scene.trainer.call(ME, Drop(step=1, microbatch=microbatch(0), attempt=attempt, hop=1, undo=True))


async def added(scene: ReplicaScene, *, there: float, back: float, **changes: Any) -> None:
    await scene.there(x=there, **changes)
    await scene.backward(x=back, **changes)
    await eventually(lambda: scene.part.held)


def give_nothing(scene: ReplicaScene) -> None:
    """From now on nobody gives a tensor again."""
    for box, rpc in ((scene.up, RECALL), (scene.down, RECALL), (scene.trainer, TRAINER_RECALL)):
        box.errors[rpc] = Refused("never")


@pytest.mark.parametrize("after", ["nothing", "its forward", "its gradient", "another undo"])
async def test_trainer_that_undoes_what_it_reported_and_gives_nothing_again_cannot_keep_a_replica_from_closing(
    scene: ReplicaScene, after: str
) -> None:
    await added(scene, there=3.0, back=4.0)
    before = dict(scene.part.held)
    give_nothing(scene)
    await undo(scene)
    assert scene.part.held == {}
    assert len(scene.replica.events.of(ContributionReversed)) == 1
    if after == "its forward":
        await scene.there(x=9.0, attempt=ANEW)
    if after == "its gradient":
        await scene.backward(x=9.0, attempt=ANEW)
        await scene.blocked()
    if after == "another undo":
        await undo(scene, attempt=ANEW)
    await scene.server.settle(1, {WORK: ROUTE})
    assert scene.part.held == before
    assert len(scene.replica.events.of(ContributionReplayed)) == 1
    await scene.server.settle(1, {})
    assert scene.part.held == {}


async def test_what_is_begun_anew_counts_as_it_was_added_last(scene: ReplicaScene) -> None:
    await added(scene, there=3.0, back=4.0)
    await undo(scene)
    assert scene.part.held == {}
    await added(scene, there=3.0, back=5.0, attempt=ANEW)
    assert scene.part.held == {microbatch(0): 40.0}
    give_nothing(scene)
    for assigned in ({WORK: ROUTE}, {}, {WORK: ROUTE}):
        await scene.server.settle(1, assigned)
        assert scene.part.held == dict.fromkeys([microbatch(0)] * len(assigned), 40.0)
    scene.replica.open_step(2)
    assert scene.server.held().payload_bytes == 0


@pytest.mark.parametrize("was", ["added", "handed on"])
async def test_mail_of_the_way_that_was_given_up_is_refused(scene: ReplicaScene, was: str) -> None:
    await scene.there(x=3.0)
    if was == "added":
        await scene.backward(x=4.0)
        await eventually(lambda: scene.part.held)
    await undo(scene)
    for late in (scene.forward(x=3.0), scene.backward(x=4.0), scene.backward(x=4.0, attempt=7)):
        with pytest.raises(Refused, match="begun anew"):
            await late
    assert len(scene.server._table) == 0
    await scene.there(x=3.0, attempt=ANEW)


async def test_what_was_added_and_undone_twice_is_added_again_as_the_second_time(scene: ReplicaScene) -> None:
    await added(scene, there=3.0, back=4.0)
    await undo(scene)
    once = scene.server.held().payload_bytes
    await added(scene, there=3.0, back=5.0, attempt=ANEW)
    await undo(scene, attempt=ANEW)
    assert (scene.part.held, scene.server.held().payload_bytes) == ({}, once)
    give_nothing(scene)
    await scene.server.settle(1, {WORK: ROUTE})
    assert scene.part.held == {microbatch(0): 40.0}


async def test_what_cannot_be_taken_out_stays_as_it_was(scene: ReplicaScene) -> None:
    await added(scene, there=3.0, back=4.0)
    before = dict(scene.part.held)
    scene.part.on["backward"] = failing(RuntimeError("a broken device"))
    with pytest.raises(PeerError, match="a broken device"):
        await undo(scene)
    assert scene.part.held == before
    assert [state.complete for state in scene.server._table] == [True], "as what was added is let go of first"
    del scene.part.on["backward"]
    await undo(scene)
    assert scene.part.held == {}


async def test_what_is_begun_anew_elsewhere_is_not_in_the_sum(scene: ReplicaScene) -> None:
    await added(scene, there=3.0, back=4.0)
    await undo(scene)
    await undo(scene)
    await scene.server.settle(1, {})
    assert scene.part.held == {}
    assert scene.server.held().payload_bytes > 0
    scene.server.rewound()
    assert scene.server.held().payload_bytes == 0


async def test_trainer_that_takes_back_what_it_fed_may_not_feed_more() -> None:
    scene = ReplicaScene(max_fed=2)
    await scene.open()
    async with working(scene.replica):
        await added(scene, there=3.0, back=4.0)
        await undo(scene)
        await scene.there(position=1)
        with pytest.raises(Refused, match="2 microbatches of"):
            await scene.forward(position=2)
        await added(scene, there=3.0, back=4.0, attempt=ANEW)
        scene.replica.open_step(2)
        await scene.there(position=2, step=2)


async def test_what_cannot_be_kept_is_not_taken_out() -> None:
    scene = ReplicaScene(retention_bytes=0)
    await scene.open()
    async with working(scene.replica):
        await added(scene, there=3.0, back=4.0)
        before = dict(scene.part.held)
        with pytest.raises(Refused, match="cannot be kept"):
            await undo(scene)
        give_nothing(scene)
        await scene.server.settle(1, {WORK: ROUTE})
        assert scene.part.held == before


async def test_what_the_closing_took_out_its_trainer_cannot_take_along(scene: ReplicaScene) -> None:
    await added(scene, there=3.0, back=4.0)
    before = dict(scene.part.held)
    give_nothing(scene)
    await scene.server.settle(1, {})
    assert scene.part.held == {}
    await scene.boxes[TRAINER].call(ME, Drop(step=1, microbatch=microbatch(0), attempt=0, hop=1))
    await undo(scene)
    await scene.server.settle(1, {WORK: ROUTE})
    assert scene.part.held == before
