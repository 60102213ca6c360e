"""One copy: when it keeps what it has, when it lets it go, and how long it waits for another try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.averaging.config import AveragingConfig
from swarm.consensus.copies import COPY_BYTES_S
from swarm.consensus.records import CloseRecord, Decision
from swarm.errors import OutOfSync, PeerError, StateError, Unreachable, WrongStep
from swarm.events import CopyDropped
from swarm.ids import PartName, PeerId
from swarm.membership import download, part_copy
from swarm.membership.observer import ObserverContext
from swarm.membership.part_copy import CopyContext, PartCopy, RecentRecords
from swarm.membership.parts import Sparing
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import Snapshot, digest
from tests.harness.rigs.membership import (
    CONTACT,
    DONOR,
    OTHER,
    RUN,
    STAGE,
    TINY,
    EventList,
    HandClock,
    InlineDevice,
    Run,
    signed,
    turns,
)

ME = CONTACT
"""A trainer, so that it can keep a copy of a stage."""


class Scripted:
    """An observer: its start and its steps are as the scene says."""

    def __init__(self, scene: Scene, context: ObserverContext, donors: tuple[PeerId, ...]) -> None:
        self.scene, self.context, self.donors = scene, context, donors
        scene.observers.append(self)

    async def start(self, contact: PeerId, *, wanted: CloseRecord, spare: bool = False) -> Decision:
        """The decision that is wanted, or a failure."""
        self.scene.spared.append(spare)
        error = self.scene.starts.pop(0) if self.scene.starts else None
        if error is not None:
            raise error
        self.head = wanted
        return next(decision for decision in self.scene.run.decisions if decision.record == wanted)

    async def begin(self, decision: Decision, part: Any) -> None:
        """The state is here."""
        await self.context.observe(decision)

    def resume(self, part: Any) -> None:
        """It was here already."""
        self.scene.resumed += 1

    async def follow(self) -> CloseRecord:
        """The next step, when the scene lets it come."""
        decision = await self.scene.updates.get()
        if isinstance(decision, PeerError):
            raise decision
        await self.context.observe(decision)
        self.head = decision.record
        return decision.record

    async def ahead(self) -> torch.Tensor | None:
        """What the scene has of the next step before it is decided."""
        return self.scene.ahead.pop(0) if self.scene.ahead else None

    def went_on(self, record: CloseRecord) -> None:
        """It was decided as it stood."""
        self.head = record

    async def close(self) -> None:
        """Thank you."""
        self.scene.closed += 1


class Scene:
    """A copy of the stage at a trainer, and what happens to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.clock, self.events = Run(), HandClock(), EventList()
        self.observers: list[Scripted] = []
        self.spared: list[bool] = []
        self.starts: list[PeerError | None] = []
        self.ahead: list[torch.Tensor] = []
        self.state: Snapshot | None = None
        self.updates: asyncio.Queue[Decision | PeerError] = asyncio.Queue()
        self.resumed = self.closed = 0
        self.told: list[tuple[str, int]] = []
        self.refused: list[tuple[str, str]] = []
        self.records = RecentRecords(self.clock)
        manifest = SimpleNamespace(
            run_id=RUN,
            run=SimpleNamespace(copies=1),
            model=TINY,
            split=SplitConfig(stages=2),
            optimizer=OptimizerConfig(),
            averaging=AveragingConfig(),
        )
        around: Any = SimpleNamespace(
            manifest=manifest, endpoint=SimpleNamespace(peer=ME), clock=self.clock, events=self.events
        )
        context = CopyContext(
            around=around,
            records=self.records,
            host=InlineDevice(),  # type: ignore[arg-type]
            turn=asyncio.Lock(),
            copied=self._copied,
            dropped=self._dropped,
            disk_refuses=lambda what, reason: self.refused.append((what, reason)),
        )
        monkeypatch.setattr(part_copy, "Observer", lambda context, donors, name: Scripted(self, context, donors))
        monkeypatch.setattr(download, "Download", lambda context, wanted, sink: self)
        self.copy = PartCopy(context, STAGE)
        self.given = {DONOR: 10, OTHER: 2}

    async def fetch(self, donors: tuple[PeerId, ...]) -> Snapshot:
        """The state, as a download gives it."""
        return self.state or self.run.part.snapshot()

    async def decide(self, *, arrives: bool) -> Decision:
        """One more step of the run; the copy gets its update or not."""
        decision = self.run.close()
        await self.records.add(decision)
        if arrives:
            self.updates.put_nowait(decision)
        await turns()
        return decision

    async def _copied(self, part: PartName, decision: Decision) -> None:
        self.told.append(("copied", decision.record.step))

    async def _dropped(self, part: PartName) -> None:
        self.told.append(("dropped", -1))


async def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, asyncio.Task[None]]:
    scene = Scene(monkeypatch)
    running = asyncio.create_task(scene.copy.run())
    await scene.records.add(Decision(scene.run.head, {}))
    await turns()
    return scene, running


async def begun_ahead(
    monkeypatch: pytest.MonkeyPatch, update: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Scene, asyncio.Task[None], Decision]:
    """The copy has an update of step 1, made from the one with which that will be decided."""
    scene = Scene(monkeypatch)
    first, scene.state = scene.run.head, scene.run.part.snapshot()
    decision = scene.run.close()
    assert decision.mean is not None
    scene.ahead = [update(decision.mean)]
    running = asyncio.create_task(scene.copy.run())
    await scene.records.add(Decision(first, {}))
    await turns()
    return scene, running, decision


async def ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_copy_that_nothing_leads_on_any_more_takes_the_update_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, running, decision = await begun_ahead(monkeypatch, lambda mean: mean)
    await ended(running)
    assert scene.copy.holds(0), "the fault: the step was decided, and it was not led on"
    assert await scene.copy.finish(decision.record)
    state = await scene.copy.snapshot()
    assert state is not None
    assert digest(state) == decision.record.digests[STAGE]


async def test_copy_with_an_update_that_was_not_decided_asks_for_the_one_that_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, running, decision = await begun_ahead(monkeypatch, torch.ones_like)  # another attempt's
    await scene.records.add(decision)
    await turns()
    assert scene.copy.holds(0), "it is not what was decided"
    scene.updates.put_nowait(decision)
    await turns()
    assert scene.copy.holds(1)
    await ended(running)


async def test_copy_that_is_late_knows_itself_that_a_step_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, running, decision = await begun_ahead(monkeypatch, lambda mean: mean)
    before = decision.record
    void = signed(before.model_copy(update={"step": 2, "previous": before.hash(), "void": True}))
    await scene.records.add(decision)
    assert not await scene.copy.finish(void.record)  # it has yet to take the update of the step before
    await scene.records.add(void)
    scene.updates.put_nowait(Unreachable("gone"))
    scene.starts = [Unreachable("gone")]
    await turns()
    await scene.clock.advance(1.0)
    assert scene.copy.holds(2)
    assert not scene.events.of(CopyDropped)
    await ended(running)


async def test_copy_for_which_the_disk_has_no_room_says_so_and_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, rates = [False, False, True], list[float]()

    async def ensure(around: object, name: PartName, donors: object, sparing: Sparing) -> None:
        rates.append(sparing.pace.rate)
        if not rooms.pop(0):
            sparing.refuses("it is full")
            raise StateError("it is full")

    monkeypatch.setattr(part_copy, "ensure_frozen", ensure)
    scene, running = await begun(monkeypatch)
    what = f"the frozen weights of a copy of {STAGE}"
    assert scene.refused == [(what, "it is full")]
    for _ in range(4):
        await scene.clock.advance(1.0)
        await turns()
    assert scene.refused == [(what, "it is full"), (what, "it is full"), (what, "")]
    assert scene.copy.holds(0)
    assert rates == [COPY_BYTES_S] * 3
    await ended(running)


async def test_copy_whose_donors_are_gone_keeps_the_newest_state_and_asks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, running = await begun(monkeypatch)
    scene.starts = [Unreachable("gone")] * 3
    scene.updates.put_nowait(Unreachable("gone"))
    for _ in range(4):
        await turns()
        assert scene.copy.holds(0), "it may be all that is left"
        await scene.clock.advance(1.0)
    assert scene.resumed == 1, "one of them came back"
    assert scene.spared == [True, False, False, False, False], "nothing to download"
    assert [one.donors[0] for one in scene.observers[:3]] == [DONOR, OTHER, DONOR], "another first each time"
    assert not scene.events.of(CopyDropped)
    await scene.decide(arrives=True)
    assert scene.copy.holds(1)
    await ended(running)


async def test_copy_that_came_too_late_waits_for_more_steps_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, running = await begun(monkeypatch)
    fetch = scene.fetch

    async def slow(donors: tuple[PeerId, ...]) -> Snapshot:
        state = await fetch(donors)
        await scene.records.add(scene.run.close())  # the run goes on meanwhile
        scene.updates.put_nowait(WrongStep("not kept any more"))
        return state

    monkeypatch.setattr(scene, "fetch", slow)
    await scene.decide(arrives=False)
    scene.updates.put_nowait(WrongStep("not kept"))
    tried = []
    for _ in range(20):
        await turns()
        await scene.clock.advance(1.0)
        await scene.decide(arrives=False)
        tried.append(len(scene.observers))
    pauses = [tried.count(count) for count in sorted(set(tried))]
    assert pauses[1:3] == sorted(pauses[1:3]), tried
    assert len(scene.observers) < 6, "it would have tried twenty times"
    assert scene.closed == len(scene.observers), "nobody keeps anything for it meanwhile"
    await ended(running)


async def test_records_know_their_pace_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = Run(2), HandClock()
    records = RecentRecords(clock)
    with pytest.raises(OutOfSync):
        _ = records.head
    waiting = asyncio.create_task(records.wait(2))
    assert records.step_s is None
    for decision in run.decisions:
        await records.add(decision)
        await clock.advance(3.0)
    assert await waiting == records.head == run.head
    assert records.step_s == pytest.approx(3.0)
    assert records.at(1) == run.decisions[1].record
    assert records.at(7) is None
