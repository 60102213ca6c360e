"""Peers come, go and vanish in the middle of a run: it goes on, counts each microbatch once, and agrees bit for bit."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from data_shards.build import build_shard
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord
from swarm.errors import Ending, RunEnded
from swarm.events import (
    DigestMismatch,
    Event,
    PartAssigned,
    PeerReady,
    RosterChanged,
    StateDownloaded,
    StepClosed,
    SyncProgress,
    Waiting,
)
from swarm.ids import PeerId
from swarm.membership import leaving
from swarm.membership.leaving import ended_in_order
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.state.checkpoints.files import held
from swarm.step.leader.requests import ChangeRequests
from tests.harness.expect import eventually
from tests.harness.swarm import LocalPeer, LocalSwarm, _documents
from tests.swarms.stories import SHAPE

Story = Callable[[LocalSwarm], Coroutine[Any, Any, None]]
LONG_S = 300.0
TARGET = 4


def swarm_of(
    root: Path, *, hosts: int, trainers: int, steps: int, sites: Mapping[str, Any] | None = None, **run: Any
) -> SimSwarm:
    """A step takes about a second."""
    shape = {key: SHAPE[key] for key in ("model", "batch", "stage_s")}
    links = Links.parse({"default": {"latency_ms": 20}})
    run = {"steps": steps, **run}
    return SimSwarm(root, hosts=hosts, trainers=trainers, links=links, sites=sites, run=run, **shape)


async def train(swarm: LocalSwarm, story: Story) -> None:
    """Run the swarm with the story beside it, to the end of both."""
    await swarm.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run())
        group.create_task(story(swarm))


async def after_step(swarm: LocalSwarm, step: int) -> None:
    """Until somebody has closed a step."""
    await eventually(lambda: any(closed.step >= step for closed in swarm.events(StepClosed)), deadline_s=LONG_S)


async def ready(peer: LocalPeer) -> None:
    """Until a peer is a member."""
    await eventually(lambda: peer.events.of(PeerReady) or peer.outcome, deadline_s=LONG_S)
    assert peer.events.of(PeerReady), peer.outcome


async def ended(peer: LocalPeer) -> str:
    """Why a peer is not there any more."""
    await eventually(lambda: peer.outcome is not None, deadline_s=LONG_S)
    return str(peer.outcome)


def leave(peer: LocalPeer, ending: Ending = Ending.DRAINED) -> str:
    """Tell a member to leave in order; what it says."""
    assert peer.membership is not None
    return peer.membership.leave("the test", ending)


def on(peer: LocalPeer, kind: type[Event], act: Callable[[], None]) -> None:
    """Do something the moment a peer first says this, before it does anything else."""
    done: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, kind) and not done:
            done.append(event)
            act()

    peer.events.listeners.append(listen)


def check_history(records: list[dict[str, Any]], first: int, last: int) -> None:
    """One chain without gaps, of full steps, in which every microbatch counts once and no shard goes back."""
    assert [record["step"] for record in records] == list(range(first, last + 1))
    decoded = [CloseRecord.model_validate_json(json.dumps(record)) for record in records]
    for before, after in zip(decoded, decoded[1:], strict=False):
        assert after.previous == before.hash()
        assert {c.microbatch.trainer for c in after.committed} <= set(before.members.trainers)
        for trainer, cursor in before.cursors.items():
            assert after.cursors[trainer] >= cursor
    counted = [c.microbatch for record in decoded for c in record.committed]
    assert len(counted) == len(set(counted)) == TARGET * sum(record.step > 0 for record in decoded)
    for record in decoded:
        assert record.tokens == sum(c.tokens for c in record.committed)


# --- churn -------------------------------------------------------------------------------------------------------


class Churn:
    """What happens to a run, drawn from a seed: at every few closed steps somebody joins, leaves, or is killed while
    it observes."""

    def __init__(self, swarm: SimSwarm, seed: int, until: int) -> None:
        self.swarm, self.rng, self.until = swarm, random.Random(seed), until
        self.number = 300
        self.draining: set[str] = set()
        self.killed: list[LocalPeer] = []

    async def run(self) -> None:
        """Until the last steps of the run, in which everything started comes to its end."""
        step = 2
        while step < self.until:
            await after_step(self.swarm, step)
            await self.rng.choice(
                [self.join_host, self.join_host, self.join_trainer, self.leave, self.leave, self.die]
            )()
            step += self.rng.randint(1, 3)

    async def join_host(self, **settings: Any) -> LocalPeer:
        self.number += 1
        stage = self.rng.choice([None, 0, 1])
        return await self.swarm.join(
            f"late-{self.number}", "stage", self.number, stage=stage, may_fail=True, **settings
        )

    async def join_trainer(self) -> LocalPeer:
        self.number += 1
        shard = self.swarm.root / f"late-shard-{self.number}"
        build_shard(shard, _documents(self.number), self.swarm.tokenizer)
        return await self.swarm.join(f"late-{self.number}", "trainer", self.number, data=shard, may_fail=True)

    async def leave(self) -> None:
        members = [p for name, p in self.swarm.peers.items() if p.events.of(PeerReady) and p.outcome is None]
        able = [peer for peer in members if peer.settings.name not in self.draining | {"bootstrap"}]
        if able:
            peer = self.rng.choice(able)
            self.draining.add(peer.settings.name)
            leave(peer)

    async def die(self) -> None:
        """Vanish while observing, or by order before having taken part."""
        peer = await (self.join_host() if self.rng.random() < 0.7 else self.join_trainer())
        moment = self.rng.choice([PartAssigned, StateDownloaded, Waiting])
        self.killed.append(peer)
        on(peer, moment, lambda: self.swarm.kill(peer.settings.name))


def test_run_goes_on_exactly_whoever_comes_goes_and_vanishes(tmp_path: Path) -> None:
    steps = 30
    swarm = swarm_of(tmp_path, hosts=4, trainers=2, steps=steps)
    churn = Churn(swarm, 1, until=steps - 6)
    run_world(train(swarm, lambda _: churn.run()))

    assert not swarm.events(DigestMismatch)
    check_history(swarm.history(), 0, steps)
    truth = {record["step"]: record for record in swarm.history()}
    moved = swarm.peers["bootstrap"].events.of(RosterChanged)
    assert any(change.joined for change in moved)
    assert any(change.left for change in moved)
    named = {m["name"] for change in moved for m in change.joined}
    assert named.isdisjoint(peer.settings.name for peer in churn.killed)
    for name, peer in swarm.peers.items():
        if peer.events.of(PeerReady):
            own = swarm.history(name)
            assert own == [truth[record["step"]] for record in own], name
            assert [record["step"] for record in own] == list(range(own[0]["step"], own[-1]["step"] + 1))
            assert isinstance(peer.outcome, str), (name, peer.outcome)
        elif peer not in churn.killed:
            assert "no peer can join with it" in str(_leaf(peer.outcome)), (name, peer.outcome)
    assert all(peer.task is not None and peer.task.done() for peer in swarm.peers.values())


# --- who leaves --------------------------------------------------------------------------------------------------


def test_member_that_leads_the_step_with_which_it_leaves_closes_it_first(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=4, trainers=1, steps=20)
    led: list[tuple[str, int]] = []

    def leave_as_leader(peer: LocalPeer) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if isinstance(event, StepClosed) and not led and 2 < event.step < 15:
                assert peer.membership is not None
                if peer.membership.roster.succession(event.step + 1)[0] == peer.endpoint.peer:
                    led.append((peer.settings.name, event.step + 1))
                    leave(peer)

        return listen

    async def story(swarm: SimSwarm) -> None:
        for name in ("host-0", "host-1", "host-2", "host-3"):
            swarm.peers[name].events.listeners.append(leave_as_leader(swarm.peers[name]))
        await eventually(lambda: led, deadline_s=LONG_S)
        assert "left in order" in await ended(swarm.peers[led[0][0]])

    run_world(train(swarm, story))
    name, step = led[0]
    last = swarm.peers[name].events.of(StepClosed)[-1]
    assert (last.step, last.leader) == (step, swarm.peers[name].endpoint.peer)
    left = [c for c in swarm.peers["bootstrap"].events.of(RosterChanged) if c.left]
    assert [(c.step, [m["name"] for m in c.left]) for c in left] == [(step, [name])]
    check_history(swarm.history(), 0, 20)


def test_only_one_of_two_replicas_that_want_to_leave_at_once_goes(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, hosts=3, trainers=1, steps=20)
    pair: list[LocalPeer] = []

    async def story(swarm: SimSwarm) -> None:
        await after_step(swarm, 2)
        hosts = [peer for peer in swarm.peers.values() if peer.settings.role == "stage"]
        pair.extend(peer for peer in hosts if peer.events.of(PeerReady)[0].part == "stage-0")
        for peer in pair:
            leave(peer)

    run_world(train(swarm, story))
    assert sorted(str(peer.outcome)[:4] for peer in pair) == ["ever", "it l"]
    stayed = next(peer for peer in pair if str(peer.outcome).startswith("every"))
    assert any("only replica of stage-0" in event.what for event in stayed.events.of(Waiting))


def stage_of(peer: LocalPeer) -> str:
    return str(peer.events.of(PeerReady)[0].part)


async def test_run_of_which_all_are_asked_to_leave_ends_in_order_with_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "HANDOVER_S", 0.0)
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": 4000}, batch=dict(SHAPE["batch"]))

    async def story(swarm: LocalSwarm) -> None:
        await after_step(swarm, 2)
        *others, last = swarm.peers.values()
        for peer in others:
            leave(peer)
        await eventually(lambda: sum(peer.outcome is None for peer in others) == 2, deadline_s=LONG_S)
        await after_step(swarm, max(event.step for event in swarm.events(StepClosed)) + 2)
        assert sum(peer.outcome is None for peer in others) == 2, "one that was not asked keeps those that it needs"
        leave(last)

    await train(swarm, story)
    history = swarm.history("trainer-1")
    end = history[-1]["step"]
    assert [record["step"] for record in history if record.get("ended")] == [end]
    stayed = {member["peer"] for member in history[-1]["roster"]}
    assert len(stayed) == 3, "both stages and a trainer"
    for peer in swarm.peers.values():
        assert (peer.outcome == ended_in_order(end)) is (peer.endpoint.peer in stayed), peer.outcome
        assert peer.membership is not None
        assert peer.membership.ending is Ending.DRAINED
    check_history(history, 0, end)


def copies_of(peer: LocalPeer) -> int:
    return 0 if peer.membership is None else len(peer.membership.copies)


async def test_run_that_is_ended_is_kept_whole_by_each_that_stayed_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds the only replica of its part, and may die before it has written it: two others have a copy of a stage.
    Of the ends none has, once the founder has left: stage hosts keep none."""
    monkeypatch.setattr(leaving, "HANDOVER_S", 0.0)
    names = ("host-0", "host-1", "trainer-0")
    sites = {name: {"run_directory": tmp_path / f"kept-{name}", "checkpoint_every": 10_000} for name in names}
    swarm = LocalSwarm(
        tmp_path, hosts=2, trainers=1, run={"steps": 4000, "copies": 2}, batch=dict(SHAPE["batch"]), sites=sites
    )

    async def story(swarm: LocalSwarm) -> None:
        await after_step(swarm, 2)
        founder, *others = swarm.peers.values()
        leave(founder)
        await ended(founder)
        await eventually(lambda: [copies_of(peer) for peer in others] == [1, 1, 2], deadline_s=LONG_S)
        for peer in others:
            leave(peer)

    await train(swarm, story)
    end = swarm.history("trainer-0")[-1]["step"]
    for name in names:
        assert swarm.peers[name].outcome == ended_in_order(end)
        kept = held(tmp_path / f"kept-{name}" / "checkpoints", end)
        assert set(kept.parts) == {"stage-0", "stage-1", *(["ends"] if name == "trainer-0" else [])}, name


async def test_run_is_handed_over_to_who_comes_while_all_are_asked_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches its part when they are asked; nobody else would be left for it."""
    monkeypatch.setattr(leaving, "HANDOVER_S", 0.0)
    swarm = LocalSwarm(tmp_path, hosts=2, trainers=1, run={"steps": 4000}, batch=dict(SHAPE["batch"]))
    old: list[LocalPeer] = []
    left: list[str] = []

    async def story(swarm: LocalSwarm) -> None:
        await after_step(swarm, 2)
        old.extend(swarm.peers.values())
        relief = await swarm.join("relief", "stage", 300, stage=0)
        on(relief, SyncProgress, lambda: [leave(peer) for peer in old] and None)
        await ready(relief)
        relieved = next(peer for peer in old if peer.settings.role == "stage" and stage_of(peer) == "stage-0")
        left.append(await ended(relieved))
        assert relief.outcome is None
        leave(relief)

    await train(swarm, story)
    assert "left in order" in left[0]
    relief = swarm.peers["relief"]
    assert "the run was ended" in str(relief.outcome)
    check_history(swarm.history("relief"), swarm.history("relief")[0]["step"], swarm.history("relief")[-1]["step"])


def test_order_to_leave_while_it_observes_ends_a_joiner_at_once_and_the_run_does_not_notice(
    tmp_path: Path,
) -> None:
    swarm = swarm_of(tmp_path, hosts=2, trainers=1, steps=20)

    async def story(swarm: SimSwarm) -> None:
        await after_step(swarm, 2)
        peer = await swarm.join("fickle", "stage", 300, may_fail=True)
        on(peer, PartAssigned, lambda: None if leave(peer) else None)
        await ended(peer)
        error = _leaf(peer.outcome)
        assert isinstance(error, RunEnded)
        assert (str(error), error.ending) == ("this peer left before it took part", Ending.DRAINED)

    run_world(train(swarm, story))
    check_history(swarm.history(), 0, 20)
    assert not any(change.joined for change in swarm.peers["bootstrap"].events.of(RosterChanged))


# --- what happens to an observer is its own affair ---------------------------------------------------------------


def test_joiner_that_dies_between_asking_and_the_close_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of(tmp_path, hosts=2, trainers=1, steps=14)
    asked: list[PeerId] = []
    honest = ChangeRequests.asking

    def asking(requests: ChangeRequests) -> tuple[PeerId, ...]:
        """The step begins to close: just now it dies."""
        found = honest(requests)
        if found and not asked:
            asked.extend(found)
            swarm.kill("short")
        return found

    monkeypatch.setattr(ChangeRequests, "asking", asking)

    async def story(swarm: SimSwarm) -> None:
        await after_step(swarm, 2)
        await swarm.join("short", "stage", 300, may_fail=True)

    run_world(train(swarm, story))
    assert asked == [swarm.peers["short"].endpoint.peer], "the fault did not fire"
    check_history(swarm.history(), 0, 14)
    assert not swarm.peers["bootstrap"].events.of(RosterChanged)


def _leaf(outcome: object) -> object:
    while isinstance(outcome, BaseExceptionGroup):
        outcome = outcome.exceptions[0]
    return outcome
