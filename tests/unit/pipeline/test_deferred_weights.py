"""A replica that hands a gradient on and computes those of its weights later: each microbatch counts once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from swarm.errors import Violation
from swarm.events import Accumulated, ContributionReplayed, GraphsDropped
from swarm.ids import JourneyKey, PeerId, StepWork
from swarm.pipeline.messages import Adopt, Drop
from swarm.pipeline.seals import told_digest
from swarm.pipeline.stage.microbatch_state import Phase
from swarm.pipeline.trainer.pace import YOUNG, JourneyDeadlines
from swarm.security.signing import receipt_bytes
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import ME, RUN, Crew, ReplicaScene, failing, microbatch, quick, verify, working

A0, A1, B0, B1 = (PeerId(name) for name in ("a0", "a1", "b0", "b1"))
QUOTA = 4
ONE = 100
"""Bytes that the cheap part holds of one microbatch."""


class Later(ReplicaScene):
    """A replica that does what waits for its weights only when the test says so."""

    def __init__(self, deferred_bytes: int = 100 * ONE) -> None:
        super().__init__(deferred_bytes=deferred_bytes)
        self._waiting: list[Any] = []

    async def open(self) -> None:
        """See :class:`ReplicaScene`."""
        await super().open()
        queue = self.server._table.queue
        self._push = push = queue.push

        def hold(kind: Any, step: int, item: Any) -> None:
            if kind == "weights":
                self._waiting.append((kind, step, item))
            else:
                push(kind, step, item)

        queue.push = hold  # type: ignore[method-assign]

    def go(self) -> None:
        """Let it do what waits."""
        for one in self._waiting:
            self._push(*one)
        self._waiting.clear()
        self.server._worker.wake()

    async def turned(self, position: int = 0, x: float = 4.0) -> None:
        """Have a microbatch go as far as that its gradient is handed on."""
        before = len(self.up.of("backward"))
        await self.there(position, x=3.0)
        await self.backward(position, x=x)
        await eventually(lambda: len(self.up.of("backward")) > before)
        assert [state.phase for state in self.server._table if state.key.microbatch == microbatch(position)] == [
            Phase.TURNED_BACK
        ], "the case: its weights wait"


@pytest_asyncio.fixture
async def later() -> AsyncIterator[Later]:
    made = Later()
    await made.open()
    async with working(made.replica):
        yield made


async def test_gradient_is_handed_on_before_anything_is_added_and_the_receipt_comes_after(later: Later) -> None:
    await later.turned()
    await eventually(lambda: len(later.trainer.of("hop")) == 2)
    assert later.part.held == {}
    assert later.replica.events.of(Accumulated) == []
    turned = later.trainer.of("hop")[1]
    assert (turned.direction, turned.receipt, turned.again) == ("backward", b"", True)
    later.go()
    await eventually(lambda: len(later.trainer.of("hop")) == 3)
    told = later.trainer.of("hop")[2]
    assert (told.direction, told.again) == ("backward", False)
    assert verify(
        ME, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 1, told_digest(told.content, told.seals)), told.receipt
    )
    assert later.part.held == {microbatch(0): 32.0}
    assert len(later.up.of("backward")) == 1
    assert len(later.replica.events.of(Accumulated)) == 1


async def test_forwards_and_backwards_go_before_weights() -> None:
    scene = ReplicaScene(deferred_bytes=100 * ONE)
    await scene.open()
    done: list[str] = []
    for name in ("forward", "backward", "weights"):
        scene.part.on[name] = lambda name=name: done.append(name)
    async with working(scene.replica):
        await scene.there(0)
        scene.replica.device.gate = gate = asyncio.Event()
        await scene.backward(0)
        await scene.forward(1)
        gate.set()
        await eventually(lambda: len(done) == 4)
    assert done == ["forward", "backward", "forward", "weights"]


async def test_what_would_be_more_than_may_be_held_is_computed_at_once() -> None:
    later = Later(deferred_bytes=2 * ONE)
    await later.open()
    async with working(later.replica):
        await later.turned(0)
        await later.turned(1)
        assert later.server._table.deferred_bytes == 2 * ONE
        await later.there(2)
        await later.backward(2)
        await eventually(lambda: later.part.held)
        assert set(later.part.held) == {microbatch(2)}
        later.go()
        await eventually(lambda: len(later.part.held) == 3)
    assert later.server._table.deferred_bytes == 0


async def test_dropped_microbatch_leaves_nothing_and_one_of_a_closed_step_adds_nothing(later: Later) -> None:
    await later.turned(0)
    await later.turned(1)
    (state, _) = later.server._table
    rest = weakref.ref(state.tensors.rest)
    await later.trainer.call(ME, Drop(step=1, microbatch=microbatch(0), attempt=0, hop=1))
    del state
    gc.collect()
    assert rest() is None
    later.replica.open_step(2)
    later.go()
    await later.there(2, step=2)
    await later.backward(2, step=2)
    await eventually(lambda: bool(later._waiting))
    later.go()
    await eventually(lambda: later.part.held)
    assert set(later.part.held) == {microbatch(2)}


async def test_trainer_that_asks_again_gets_gradient_and_receipt(later: Later) -> None:
    await later.turned()
    await later.trainer.call(ME, Adopt(**later.fields(attempt=1), within_s=1.0))
    await eventually(lambda: len(later.up.of("backward")) == 2 and later.part.held)
    assert later.up.payloads("backward") == [5.0, 5.0]
    await eventually(lambda: later.trainer.of("hop")[-1].receipt)
    told = later.trainer.of("hop")[-1]
    assert verify(
        ME, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 1), 1, told_digest(told.content, told.seals)), told.receipt
    )
    later.go()
    await later.there(1)
    assert len(later.replica.events.of(Accumulated)) == 1


async def test_trainer_that_has_the_gradient_gets_the_receipt_and_nothing_is_computed_again(later: Later) -> None:
    await later.turned()
    await later.trainer.call(ME, Adopt(**later.fields(attempt=1), within_s=1.0, pass_on=False))
    await eventually(lambda: later.trainer.of("hop")[-1].receipt)
    later.go()
    await later.there(1)
    assert later.up.payloads("backward") == [5.0]
    assert later.part.held


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), Violation("not finite")], ids=repr)
async def test_weights_that_cannot_be_computed_are_told_and_nothing_is_added(later: Later, error: Exception) -> None:
    await later.turned()
    later.part.on["weights"] = failing(error)
    later.go()
    blocked = await later.blocked()
    assert (blocked.direction, blocked.peer) == ("backward", ME)
    assert blocked.code == ("violation" if isinstance(error, Violation) else "busy")
    assert (later.part.held, len(later.server._table)) == ({}, 0)


async def test_rest_that_was_dropped_for_want_of_memory_is_computed_again(later: Later) -> None:
    await later.turned()
    later.part.on["forward"] = failing(torch.OutOfMemoryError("out of memory"))
    await later.forward(1)
    await later.blocked()
    (event,) = later.replica.events.of(GraphsDropped)
    assert (event.graphs, later.server._table.deferred_bytes) == (1, 0)
    del later.part.on["forward"]
    later.go()
    await eventually(lambda: later.part.held)
    assert later.part.held == {microbatch(0): 32.0}, "as with it"
    assert len(later.up.of("backward")) == 1


async def test_closing_step_takes_what_waits_and_it_is_not_added_twice(later: Later) -> None:
    await later.turned()
    await later.server.settle(1, {StepWork(1, microbatch(0)): later.route})
    assert later.part.held == {microbatch(0): 32.0}
    assert len(later.replica.events.of(ContributionReplayed)) == 1
    assert later.server._table.deferred_bytes == 0
    later.go()
    await later.server.settle(1, {StepWork(1, microbatch(0)): later.route})
    await later.server.settle(1, {})
    assert later.part.held == {}


@pytest.mark.parametrize("fault", ["kill", "silence"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("phase", ["backward", "weights", "accumulate", "accumulated"])
async def test_replica_that_dies_around_its_weights_costs_nothing(stage: int, phase: str, fault: str) -> None:
    crew = await Crew.of([[A0, A1], [B0, B1]], limits={"deferred_bytes": 100 * ONE}, pace=quick())
    crew.strike(stage, phase, getattr(crew, fault))
    leader = await crew.feed(QUOTA)
    assert len(crew.struck) == 1
    everything = {microbatch(position) for position in range(QUOTA)}
    assert {journey.key.microbatch for journey in leader.finished} == everything
    async with working(*(replica for peer, replica in crew.replicas.items() if peer not in crew.struck)):
        await crew.settle(crew.assigned(leader))
    assert [set(sums) for sums in crew.sums()] == [everything, everything]
    assert [set(sums.values()) for sums in crew.sums()] == [{16.0}, {8.0}], "as where nobody dies"


def test_deadline_of_weights_is_the_longest_until_enough_was_measured() -> None:
    pace = JourneyDeadlines(floor_s=1.0, ceiling_s=60.0)
    for _ in range(YOUNG - 1):
        pace.observe(A0, "weights", 0.1)
    assert pace.seconds(A0, "weights") == 60.0
    pace.observe(A0, "weights", 0.1)
    assert pace.seconds(A0, "weights") == 1.0
