"""Whole runs in ``local`` mode: replicas train apart, meet at each close, and hold the same there, no matter who
dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill, Pause, SlowDevice
from peers.chaos.plan import On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import (
    Accumulated,
    ContributionReplayed,
    ContributionReversed,
    CopyHeld,
    DigestMismatch,
    JourneyCompleted,
    Mixed,
    PeerReady,
    RoundDone,
    StepClosed,
)
from swarm.sim.links import Links
from tests.harness.expect import eventually
from tests.harness.swarm import LocalSwarm
from tests.swarms.story import live_through

STEPS, INNER = 4, 6
SHAPE: dict[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "run": {"steps": STEPS},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
    "optimizer": {"warmup_steps": 0},
}
LINKS = Links.parse({"default": {"latency_ms": 20}})
LOCAL: dict[str, Any] = {"mode": "local", "local": {"steps": INNER}}
IN_TURN: dict[str, Any] = {"mode": "local", "local": {"steps": INNER, "fragments": 4}}


async def test_close_of_a_fragment_sends_its_bytes_alone_and_the_loss_falls(tmp_path: Path) -> None:
    """Two replicas of each part: each sends half of what is averaged to the other, and gets as much."""
    whole, in_turn = (LocalSwarm(tmp_path / name, averaging=each, **SHAPE) for name, each in FORMS.items())
    for swarm in (whole, in_turn):
        await swarm.run()
        assert not swarm.events(DigestMismatch)
    full = {event.part: event.bytes_sent for event in whole.events(RoundDone)}
    sent: dict[str, dict[int, int]] = {part: {} for part in full}
    for event in in_turn.events(RoundDone):
        sent[event.part][event.step] = event.bytes_sent
        assert event.bytes_sent < 1.6 * full[event.part] / 4, event
    for part, steps in sent.items():
        assert len(steps) == 4
        assert sum(steps.values()) == pytest.approx(full[part], rel=0.01), "all fragments had their turn"
    for swarm in (whole, in_turn):
        history = swarm.history()
        assert [len(record["committed"]) for record in history] == [0] + [4 * INNER] * STEPS
        losses = [record["loss_sum"] / record["tokens"] for record in history[1:]]
        assert losses[-1] < losses[0] - 0.2, losses
        assert len({str(record["digests"]) for record in history}) == STEPS + 1


FORMS = {"whole": LOCAL, "fragments": IN_TURN}


async def test_adapters_are_trained_apart_as_whole_models_are(tmp_path: Path) -> None:
    model = {"lora": {"rank": 4, "base": "nf4"}}
    swarm = LocalSwarm(tmp_path, averaging=LOCAL, model=model, **SHAPE)
    await swarm.run()
    assert not swarm.events(DigestMismatch)
    losses = [record["loss_sum"] / record["tokens"] for record in swarm.history()[1:]]
    assert losses[-1] < losses[0], losses


def test_replica_that_dies_takes_what_it_learnt_with_it_and_the_others_go_on(tmp_path: Path) -> None:
    swarm = SimSwarm(
        tmp_path, averaging=IN_TURN, may_fail=True, stage_s={"forward": 0.1, "backward": 0.2}, links=LINKS, **SHAPE
    )
    strikes = [
        Strike("mid-step", On(Accumulated, peer="host-1", where={"step": 2}, nth=3), Kill(("host-1",))),
        Strike("trainer", On(JourneyCompleted, peer="trainer-1", where={"step": 3}, nth=2), Kill(("trainer-1",))),
    ]
    plan = live_through(swarm, tmp_path, *strikes, steps=STEPS, timeout_s=600.0, not_promised=("I3",))
    assert plan.counts == {"kill": 2}
    assert not swarm.events(ContributionReversed)
    assert not swarm.events(ContributionReplayed)


def test_replica_that_was_cut_off_comes_back(tmp_path: Path) -> None:
    """It is left out while it stands still, and takes the state of the others, who went on."""
    shape = {**SHAPE, "run": {"steps": 12}}
    swarm = SimSwarm(
        tmp_path, averaging=IN_TURN, may_fail=True, stage_s={"forward": 0.1, "backward": 0.2}, links=LINKS, **shape
    )
    pause = Strike("pause", On(StepClosed, peer="host-1", where={"step": 2}), Pause(("host-1",), 15.0))
    live_through(swarm, tmp_path, pause, steps=12, timeout_s=1200.0, not_promised=("I3",))
    assert not swarm.events(DigestMismatch)
    assert [event.again for event in swarm.peers["host-1"].events.of(PeerReady)] == [False, True]


async def test_peer_that_joins_begins_at_the_anchor_of_each_fragment(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path, averaging=IN_TURN, **{**SHAPE, "run": {"steps": 10, "copies": 1}})

    async def story() -> None:
        await eventually(lambda: any(event.step >= 2 for event in swarm.events(StepClosed)))
        await swarm.join("late", "stage", 300, stage=1)

    await swarm.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run())
        group.create_task(story())
    ready = swarm.peers["late"].events.of(PeerReady)
    assert [one.part for one in ready] == ["stage-1"]
    late = swarm.peers["late"].endpoint.peer
    assert any(
        late in [*contribution["route"]] for record in swarm.history()[-2:] for contribution in record["committed"]
    )
    assert not swarm.events(DigestMismatch)
    assert swarm.events(CopyHeld)


def four_of_one_stage(root: Path, averaging: dict[str, Any]) -> SimSwarm:
    one_stage = {"trainers": 1, "split": {"stages": 1}, "batch": {"microbatch_size": 1, "microbatches_per_step": 8}}
    return SimSwarm(
        root, averaging=averaging, stage_s={"forward": 0.1, "backward": 0.2}, links=LINKS, **{**SHAPE, **one_stage}
    )


MIXED: dict[str, Any] = {"mode": "local", "strategy": "grid", "local": {"steps": 2, "sync_every": 3}}


def test_replicas_push_to_one_other_and_wait_for_nobody(tmp_path: Path) -> None:
    pushed = {**MIXED, "strategy": "push-sum"}
    swarm = four_of_one_stage(tmp_path, pushed)
    slow = Strike("slow", On(StepClosed, peer="host-3", where={"step": 1}), SlowDevice("host-3", 10.0))
    live_through(swarm, tmp_path, slow, steps=STEPS, timeout_s=3000.0, not_promised=("I3",))
    mixed = swarm.events(Mixed)
    assert {event.own for event in mixed} <= {"pushed", "pushed again", "kept"}
    assert all(event.left_out for event in mixed if event.own == "kept")
    assert max(event.averaged for event in mixed) >= 2
    assert not any(event.left_out for event in mixed if event.step == 1)
    assert max(event.seconds for event in mixed) < 5.0


def test_replicas_mix_in_groups_that_swap_and_wait_for_nobody(tmp_path: Path) -> None:
    """Four replicas of one stage, on a grid of two by two; one is ten times as slow."""
    swarm = four_of_one_stage(tmp_path, MIXED)
    slow = Strike("slow", On(StepClosed, peer="host-3", where={"step": 1}), SlowDevice("host-3", 10.0))
    live_through(swarm, tmp_path, slow, steps=STEPS, timeout_s=3000.0, not_promised=("I3",))
    mixed = swarm.events(Mixed)
    assert {event.members for event in mixed} == {2}
    assert {event.averaged for event in mixed if event.step == 1} == {2}
    late = [event for event in mixed if event.left_out]
    assert {peer for event in late for peer in event.left_out} == {swarm.peers["host-3"].endpoint.peer}
    assert {reason for event in late for reason in event.left_out.values()} == {"busy: its newest version is of leg 0"}
    assert max(event.seconds for event in mixed) < 1.0
    assert max(event.leg for event in mixed) > 3
    assert {event.own for event in mixed if event.averaged == 2} == {"added"}


def test_replica_that_hangs_costs_its_group_one_deadline_and_is_averaged_again(tmp_path: Path) -> None:
    swarm = four_of_one_stage(tmp_path, MIXED)
    pause = Strike("pause", On(StepClosed, peer="host-3", where={"step": 1}), Pause(("host-3",), 3.0))
    live_through(swarm, tmp_path, pause, steps=STEPS, timeout_s=600.0, not_promised=("I3",))
    mixed = swarm.events(Mixed)
    assert len([event for event in mixed if "deadline" in "".join(event.left_out.values())]) == 1
    assert max(event.seconds for event in mixed) < 2.0
    slow = [sum(event.seconds > 0.5 for event in peer.events.of(Mixed)) for peer in swarm.peers.values()]
    assert max(slow) == 1, "nobody waits for it twice"
    assert all(event.averaged == 2 for event in mixed if event.step > 2)
