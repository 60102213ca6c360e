"""The step loop: opens, feeds, leads, and ends in order."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import Refused, RunEnded
from swarm.network.protocols import Request
from swarm.optimization.lead import LeadDesk
from swarm.optimization.loop import StepLoop
from swarm.optimization.messages import Complete, Lease, Leased, Propose
from swarm.optimization.parting import Farewell, Parting
from swarm.optimization.records import CloseRecord, Decision
from swarm.schema import Empty
from tests.harness.expect import eventually
from tests.unit.optimization.test_step import LEADER, Stage
from tests.unit.optimization.world import COMMITTED, ROSTER, RULES, Bench, T, apply, decide, reconcile, record


class Script:
    """A feed that says when it was called and can be held up or fail."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gate: asyncio.Event | None = None
        self.cancelled = 0

    async def __call__(self, step: int) -> None:
        """See :data:`~swarm.optimization.loop.Feed`."""
        self.steps.append(step)
        if self.gate is None:
            return
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def close(bench: Bench, before: CloseRecord | None = None) -> CloseRecord:
    """Have the bench's member close one step, as if its leader asked."""
    closed = record(before) if before is not None else record()
    for body in (reconcile(closed.step), apply(closed.step), Propose(record=closed), decide(closed)):
        await bench.ask(body)
    return closed


def loop_of(bench: Bench, stage: Stage, feed: Script | None, parting: Parting | None = None) -> StepLoop:
    """A loop of a peer that leads no step."""
    desk = LeadDesk(RULES, bench.me, bench.member.wait_open, lambda peer, data, signature: True)
    return StepLoop(bench.member, desk, stage.closing, parting or Parting(), feed)


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    await made.set()
    made.calls._endpoint = made.network.endpoint("X")
    return made


async def test_loop_feeds_every_step_once_and_ends_after_the_last(stage: Stage) -> None:
    bench, feed, parting = Bench(), Script(), Parting()
    running = asyncio.create_task(loop_of(bench, stage, feed, parting).run())
    closed = None
    for step in range(1, RULES.steps + 1):
        await eventually(lambda step=step: feed.steps == list(range(1, step + 1)))
        closed = await close(bench, closed)
    (farewell,) = parting.methods()
    await farewell.handle(Request(ROSTER.leader(RULES.steps), Farewell(step=RULES.steps), memoryview(b""), 1e9))
    await running
    assert feed.steps == [1, 2, 3]
    assert not stage.asked("step/1/reconcile")


async def test_loop_waits_for_its_feed_before_it_feeds_the_next_step(stage: Stage) -> None:
    bench, feed = Bench(), Script()
    feed.gate = asyncio.Event()
    running = asyncio.create_task(loop_of(bench, stage, feed).run())
    await eventually(lambda: feed.steps)
    await close(bench)
    assert feed.steps == [1]
    feed.gate.set()
    await eventually(lambda: feed.steps == [1, 2])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_loop_cancelled_stops_its_feed_and_its_averaging(stage: Stage) -> None:
    bench, feed = Bench(), Script()
    feed.gate = bench.average.gate = asyncio.Event()
    running = asyncio.create_task(loop_of(bench, stage, feed).run())
    asking = asyncio.create_task(bench.ask(reconcile()))
    await eventually(lambda: bench.average.begun and feed.steps)
    for task in (asking, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (feed.cancelled, bench.average.cancelled) == (1, 1)


async def test_loop_whose_feed_fails_ends_with_its_error(stage: Stage) -> None:
    async def feed(step: int) -> None:
        raise Refused("no replica left")

    with pytest.raises(ExceptionGroup) as caught:
        await loop_of(Bench(), stage, feed).run()  # type: ignore[arg-type]
    assert caught.group_contains(Refused, match="no replica left")


async def test_loop_of_a_member_that_cannot_close_a_decided_step_ends_with_the_reason(stage: Stage) -> None:
    async def decided(closed: Decision) -> None:
        raise OSError("disk full")

    bench = Bench(decided=decided)
    running = asyncio.create_task(loop_of(bench, stage, None).run())
    with pytest.raises(OSError, match="disk full"):
        await close(bench)
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.group_contains(RunEnded, match="disk full")


async def test_loop_of_the_leader_closes_the_step_when_its_batch_is_complete() -> None:
    stage = Stage()
    stage.puppets[LEADER].desk = False
    await stage.set()
    bench = Bench(LEADER)
    desk = LeadDesk(RULES, LEADER, bench.member.wait_open, lambda peer, data, signature: True)
    desk.open_step(1, bench.member.roster)
    running = asyncio.create_task(StepLoop(bench.member, desk, stage.closing, Parting(), None).run())
    caller = stage.endpoints[T]
    stage.endpoints[LEADER].mount(desk)
    await caller.call(LEADER, "lead/1/lease", Lease(step=1, total=2), Leased, timeout_s=5)
    for contribution in COMMITTED:
        body = Complete(step=1, contribution=contribution, receipts=(bytes(64),))
        await caller.call(LEADER, "lead/1/complete", body, Empty, timeout_s=5)
    await eventually(lambda: stage.asked("step/1/decide") == set(stage.puppets))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
