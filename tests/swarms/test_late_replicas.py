"""With a quorum no close waits for a replica that is late: it stays a member, and what it learnt counts later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending
from swarm.events import (
    CaughtUp,
    ClosedWithout,
    CutOff,
    DigestMismatch,
    JourneyCompleted,
    LateWorkLost,
    PeerLost,
    StepClosed,
)
from swarm.membership.catching_up import CatchingUp
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.sim.wires import PayloadWeights

STEPS, REPLICAS, TARGET, MAY_MISS = 7, 4, 16, 2
LATE = "host-1"
"""It leads no step: a leader that stands still is waited for."""
PAUSE_S = 4.0
"""Shorter than it takes to be taken for gone."""


def swarm_of(root: Path, *, quorum: float, thinner: float = 1.0, fragments: int = 1) -> SimSwarm:
    """Four replicas of one stage; LATE has a link that is so many times thinner."""
    rates = [("host-*", 100.0), (LATE, 100.0 / thinner)]
    machines = [{"peer": name, "up_mbit_per_s": rate, "down_mbit_per_s": rate} for name, rate in rates]
    swarm = SimSwarm(
        root,
        hosts=REPLICAS,
        trainers=1,
        links=Links.parse({"default": {"latency_ms": 10}, "machine": machines}),
        stage_s={"forward": 0.3, "backward": 0.6},
        run={"steps": STEPS},
        model={"vocab_size": 300, "dim": 128, "layers": 1, "heads": 1, "context": 8},
        split={"stages": 1},
        batch={"microbatch_size": 1, "microbatches_per_step": 4},
        averaging={
            "mode": "local",
            "local": {"steps": 4, "quorum": quorum, "may_miss": MAY_MISS, "fragments": fragments},
        },
        optimizer={"warmup_steps": 0},
    )
    swarm.network.weights = PayloadWeights(averages={"host-*": 10.0})
    return swarm


def pause_at_closes(swarm: SimSwarm) -> list[int]:
    """Have LATE stand still whenever a step's last loss is known; returns the steps in which it did."""
    struck: list[int] = []
    completed: dict[int, int] = {}

    def hear(event: Any) -> None:
        if isinstance(event, JourneyCompleted):
            completed[event.step] = completed.get(event.step, 0) + 1
            if completed[event.step] == TARGET and event.step < STEPS:
                struck.append(event.step)
                swarm.pause(LATE)
                asyncio.get_running_loop().call_later(PAUSE_S, swarm.resume, LATE)

    def added(name: str) -> None:
        if name == "trainer-0":
            swarm.peers[name].events.listeners.append(hear)

    swarm.on_added.append(added)
    return struck


def at_step(swarm: SimSwarm, step: int, act: Callable[[], None]) -> None:
    """Have LATE do something once, as soon as it has closed this step."""

    def hear(event: Any) -> None:
        if isinstance(event, StepClosed) and event.step == step:
            asyncio.get_running_loop().call_soon(act)

    swarm.on_added.append(lambda name: swarm.peers[LATE].events.listeners.append(hear) if name == LATE else None)


def closing_s(swarm: SimSwarm) -> dict[int, float]:
    return {event.step: event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0}


def check(swarm: SimSwarm, root: Path) -> None:
    """Nothing is lost or counted twice, all hold the same, and LATE is a member throughout."""
    report = check_run([root], Limits(target=TARGET))
    assert not [one for one in report.failures if one.invariant != "I3"]
    assert report.steps == STEPS
    assert not swarm.events(DigestMismatch)
    assert not swarm.events(CutOff)
    assert not swarm.events(PeerLost)
    late = swarm.peers[LATE].endpoint.peer
    assert all(late in [member["peer"] for member in record["roster"]] for record in swarm.history())


def left_out(swarm: SimSwarm) -> list[int]:
    late = swarm.peers[LATE].endpoint.peer
    assert {peer for event in swarm.events(ClosedWithout) for peer in event.late} == {late}
    return sorted(event.step for event in swarm.events(ClosedWithout))


@pytest.mark.parametrize("fragments", [1, 2])
def test_close_does_not_wait_for_a_replica_that_stands_still(tmp_path: Path, fragments: int) -> None:
    swarm = swarm_of(tmp_path, quorum=0.75, fragments=fragments)
    struck = pause_at_closes(swarm)
    run_world(swarm.run())
    assert struck == list(range(1, STEPS)), "the fault fired at each close"
    missed = left_out(swarm)
    assert missed == [1, 2, 4, 5], "after two in a row it is waited for, as it is at the end"
    assert all(event.waited_s < 1.0 for event in swarm.events(ClosedWithout))
    seconds = closing_s(swarm)
    assert max(seconds[step] for step in missed[1:]) < min(seconds[3], seconds[6])
    assert [event.step for event in swarm.peers[LATE].events.of(CaughtUp)] == missed
    late, history = str(swarm.peers[LATE].endpoint.peer), swarm.history()
    did = [sum(one["tokens"] for one in record["committed"] if one["route"][0] == late) for record in history]
    owed = [record.get("late", {}).get(late) for record in history]
    if fragments == 1:
        expected = [None, [1, did[1]], [2, did[1] + did[2]], None, [1, did[4]], [2, did[4] + did[5]], None, None]
    else:
        expected = [None, [1, 0], [2, 0], None, [1, 0], [2, 0], None, None]
    assert owed == expected
    check(swarm, tmp_path)


def test_close_does_not_wait_for_a_replica_whose_link_is_thin(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, quorum=0.75, thinner=20.0)
    run_world(swarm.run())
    assert left_out(swarm) == [2, 3, 5, 6], "in the first step nothing is known of links"
    assert all(event.waited_s < 1.0 for event in swarm.events(ClosedWithout))
    seconds = closing_s(swarm)
    assert max(seconds[step] for step in (2, 3, 5, 6)) < min(seconds[1], seconds[4], seconds[7]) / 2
    check(swarm, tmp_path)


def test_close_waits_for_all_where_the_manifest_says_so(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, quorum=1.0)
    struck = pause_at_closes(swarm)
    run_world(swarm.run())
    assert struck == list(range(1, STEPS))
    assert not swarm.events(ClosedWithout)
    assert not any("late" in record or "spread_ms" in record for record in swarm.history())
    check(swarm, tmp_path)


def test_late_replica_that_is_to_leave_is_waited_for_and_leaves_in_order(tmp_path: Path) -> None:
    swarm, asked = swarm_of(tmp_path, quorum=0.75, thinner=20.0), list[str]()
    at_step(swarm, 2, lambda: asked.append(swarm.peers[LATE].membership.leave("the test", Ending.DRAINED)))
    run_world(swarm.run())
    assert len(asked) == 1
    assert left_out(swarm) == [2], "with step 3 it leaves"
    late, history = str(swarm.peers[LATE].endpoint.peer), swarm.history()
    assert late in history[2]["late"]
    assert late not in [member["peer"] for member in history[3]["roster"]]
    assert late not in history[3]["absent"]
    assert not swarm.events(CutOff)
    assert not swarm.events(LateWorkLost)


def test_late_replica_that_gets_its_state_from_others_brings_nothing_of_what_it_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, prepare, failed = swarm_of(tmp_path, quorum=0.75), CatchingUp.prepare, list[int]()
    struck = pause_at_closes(swarm)

    async def once(self: CatchingUp, state: Any, record: Any) -> None:
        if self._around.endpoint.peer in record.late and not failed:
            failed.append(record.step)
            return
        await prepare(self, state, record)

    monkeypatch.setattr(CatchingUp, "prepare", once)
    run_world(swarm.run())
    assert struck
    assert failed == [1]
    late = swarm.peers[LATE]
    assert len(late.events.of(CutOff)) >= 1
    lost = [event for event in swarm.events(LateWorkLost) if event.peer == late.endpoint.peer]
    assert lost
    assert len(swarm.history()) == STEPS + 1
    assert not swarm.events(DigestMismatch)
