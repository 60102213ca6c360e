"""Gradients of microbatches that nobody fed: they take the places of others, and no more memory than those."""

from __future__ import annotations

import pytest

from swarm.errors import Busy, PeerError, Refused
from swarm.ids import StepWork
from swarm.pipeline.messages import RECALL, Adopt, Backward
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    ACTIVATION_BYTES,
    DOWN,
    ME,
    TRAINER,
    ReplicaScene,
    microbatch,
    sealed,
    tensor,
    turns,
    working,
)

PLACES = 4


async def flooded(scene: ReplicaScene, count: int, *, wait: bool) -> int:
    """How many of so many invented gradients are taken."""
    taken = 0
    for position in range(100, 100 + count):
        try:
            await scene.backward(position)
            taken += 1
        except Busy:
            pass
        if wait:
            await eventually(lambda: scene.trainer.of("blocked")[-1:] and not len(scene.server._table))
    return taken


async def opened() -> ReplicaScene:
    scene = ReplicaScene(max_under_way=PLACES, retention_bytes=2 * ACTIVATION_BYTES)
    await scene.open()
    scene.up.errors[RECALL] = Refused("no such microbatch")
    return scene


async def test_what_was_invented_one_after_the_other_is_forgotten() -> None:
    scene = await opened()
    async with working(scene.replica):
        assert await flooded(scene, 50, wait=True) == 50
        assert {blocked.hop for blocked in scene.trainer.of("blocked")} == {0}
        table = scene.server._table
        assert (len(table), table.retention.bytes) == (0, 0)
        await scene.there(0)


async def test_what_was_invented_at_once_takes_no_more_than_the_places() -> None:
    scene = await opened()
    scene.up.errors[RECALL] = Busy("later")
    async with working(scene.replica):
        assert await flooded(scene, 50, wait=False) == PLACES
        await turns()
        assert scene.server._table.retention.bytes == PLACES * ACTIVATION_BYTES


async def test_a_gradient_under_way_keeps_its_place() -> None:
    scene = await opened()
    async with working(scene.replica):
        for position in range(PLACES):
            body = Backward(**scene.fields(position), seal=bytes(64))
            scene.arrive("backward", body, tensor(1.0), DOWN)
        with pytest.raises(Busy, match="under way"):
            await scene.forward(9)
        scene.replica.clock.now = 31.0
        await scene.forward(9)


async def test_what_its_trainer_asked_for_is_kept_for_the_next_attempt() -> None:
    """Also where the gradient alone was here first, and the attempt to have the rest failed meanwhile."""
    scene = await opened()
    async with working(scene.replica):
        adopt = Adopt(**scene.fields(0, attempt=1, within_s=5.0))
        await turns(2)
        bring = scene.arrive("backward", sealed(Backward, DOWN, tensor(4.0), **scene.fields(0)), tensor(4.0), DOWN)
        await bring()
        await scene.trainer.call(ME, adopt)
        await eventually(lambda: scene.trainer.of("blocked"))
        await turns()
        assert scene.server._table.retention.bytes == ACTIVATION_BYTES
        await scene.forward(0, x=3.0, attempt=2)
        await eventually(lambda: scene.part.held)
        assert scene.part.held == {microbatch(0): 32.0}


async def test_what_was_forgotten_is_fetched_when_its_trainer_asks_for_it() -> None:
    scene = await opened()
    async with working(scene.replica):
        await scene.backward(0)
        await eventually(lambda: scene.trainer.of("blocked"))
        await turns()
        assert len(scene.server._table) == 0
        with pytest.raises(PeerError):
            await scene.backward(0, by=TRAINER)
        await scene.trainer.call(ME, Adopt(**scene.fields(0, attempt=1, within_s=5.0)))
        assert scene.server._table.find(StepWork(1, microbatch(0))) is not None
        await eventually(lambda: scene.down.of("recall"))
        assert [recall.what for recall in scene.down.of("recall")] == ["gradient"]
