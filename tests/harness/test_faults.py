"""Each fault strikes at its event and does what it says; what a world cannot do is said before anything runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import (
    NAMES,
    BulkKill,
    CannotInflict,
    CorruptBytes,
    Fault,
    FillDisk,
    Heal,
    Kill,
    KillDaemon,
    Partition,
    Pause,
    Resume,
    SkewClock,
    SlowDevice,
    SlowLink,
    Twin,
)
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import DeadlineMissed, PeerError
from swarm.events import Accumulated, RunStarted, StepClosed
from swarm.health.heartbeat import PING, Ping
from swarm.sim.links import LinkShape
from swarm.sim.loop import run_world
from tests.harness.faults_disks import FullDisks, full_disk
from tests.harness.faults_memory import MemoryWorld
from tests.harness.swarm import LocalSwarm

Pairs = Sequence[tuple[str, str]]
AT_STEP_2 = On(StepClosed, peer="host-0", where={"step": 2})


class NoWorld:
    """Inflicts nothing and remembers it."""

    def __init__(self, root: Path) -> None:
        self.root, self.inflicted = root, list[Fault]()
        self.hear: Callable[[str, str, Mapping[str, Any]], None] = lambda peer, kind, fields: None

    def check(self, fault: Fault) -> None:
        if isinstance(fault, KillDaemon):
            raise CannotInflict("no daemons here")

    def listen(self, hear: Callable[[str, str, Mapping[str, Any]], None]) -> None:
        self.hear = hear

    def inflict(self, fault: Fault) -> Iterable[str]:
        if isinstance(fault, Twin):
            raise ValueError("no room for two")
        self.inflicted.append(fault)
        return fault.victims

    def identity(self, name: str) -> str:
        return f"id-of-{name}"

    def wall(self) -> float:
        return 12.5


def test_plan_strikes_at_the_nth_event_that_fits(tmp_path: Path) -> None:
    world = NoWorld(tmp_path)
    plan = FaultPlan(
        Strike("kill", On(Accumulated, peer="host-1", nth=2, where={"step": lambda step: step > 1}), Kill(("host-1",))),
        Strike("heal", On("StepClosed", nth=2, after="kill"), Heal()),
        world=world,
    )
    for step, peer in [(1, "host-1"), (2, "host-2"), (2, "host-1"), (3, "host-1"), (4, "host-1")]:
        world.hear(peer, "StepClosed", {"step": step})
        world.hear(peer, "Accumulated", {"step": step})
    assert world.inflicted == [Kill(("host-1",))]
    with pytest.raises(AssertionError, match="heal: heal did not fire; 1 of 2 events seen"):
        plan.assert_fired()
    world.hear("host-9", "StepClosed", {"step": 4})
    plan.assert_fired()
    assert plan.counts == {"kill": 1, "heal": 1}
    written = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    told = {"t": 12.5, "kind": "kill", "peers": ["id-of-host-1"], "label": "kill", "seconds": None, "took_s": 0.0}
    assert written[0] == told | {"names": ["host-1"], "first": ["host-1"]}


def test_plan_that_cannot_be_is_refused_before_it_runs(tmp_path: Path) -> None:
    world = NoWorld(tmp_path)
    with pytest.raises(CannotInflict):
        FaultPlan(Strike("a", On(StepClosed), KillDaemon("x")), world=world)
    with pytest.raises(ValueError, match="not unique"):
        FaultPlan(Strike("a", On(StepClosed), Heal()), Strike("a", On(StepClosed), Heal()), world=world)
    with pytest.raises(ValueError, match="no strike"):
        FaultPlan(Strike("a", On(StepClosed, after="b"), Heal()), world=world)


def test_plan_whose_fault_breaks_says_so_at_the_end(tmp_path: Path) -> None:
    world = NoWorld(tmp_path)
    plan = FaultPlan(Strike("two", On(StepClosed), Twin("x")), world=world)
    world.hear("x", "StepClosed", {})
    with pytest.raises(AssertionError, match="two: ValueError: no room for two"):
        plan.assert_fired()


def test_every_fault_has_a_name() -> None:
    assert {kind.__name__ for kind in NAMES} == {kind.__name__ for kind in Fault.__subclasses__()}


def test_worlds_in_memory_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    for name in ("real", "virtual"):
        (tmp_path / name).mkdir()
    real, virtual = LocalSwarm(tmp_path / "real"), SimSwarm(tmp_path / "virtual")
    refused: list[tuple[LocalSwarm, Fault, str]] = [
        (real, KillDaemon("host-0"), "no daemons"),
        (real, SlowDevice("host-0", 2.0), "SimSwarm"),
        (real, SkewClock("host-0", 1.0), "SimSwarm"),
        (virtual, FillDisk("host-0"), "with MemoryWorld"),
        (virtual, Kill(("host-7",)), "host-7; there are bootstrap, host-0, host-1, trainer-0"),
    ]
    for swarm, fault, told in refused:
        with pytest.raises(CannotInflict, match=told):
            FaultPlan(Strike("x", AT_STEP_2, fault), world=MemoryWorld(swarm))


def struck(root: Path, *strikes: Strike, **shape: Any) -> tuple[SimSwarm, FaultPlan]:
    """A virtual swarm after it ran with these faults, whatever became of it."""
    root.mkdir(exist_ok=True)
    swarm = SimSwarm(root, **{"hosts": 4, "trainers": 2, "run": {"steps": 3}, **shape})
    with MemoryWorld(swarm) as world:
        plan = FaultPlan(*strikes, world=world)

        async def live() -> None:
            with contextlib.suppress(Exception):
                await swarm.run(timeout_s=200.0)

        run_world(live())
    return swarm, plan


def test_killed_peer_does_nothing_more_and_its_calls_break(tmp_path: Path) -> None:
    swarm, plan = struck(tmp_path, Strike("kill", On(Accumulated, peer="host-1", nth=3), Kill(("host-1",))))
    plan.assert_fired()
    written = [json.loads(line) for line in (tmp_path / "host-1" / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in written].count("Accumulated") == 3
    assert written[-1]["kind"] == "Accumulated"
    assert swarm.is_dead("host-1")


def test_same_faults_give_the_same_events(tmp_path: Path) -> None:
    hashes = set()
    for number in range(2):
        strikes = [
            Strike("slow", On(RunStarted), SlowLink(("host-0", "trainer-0"), LinkShape(latency_s=0.2, jitter_s=0.1))),
            Strike("pause", On(Accumulated, peer="host-1", nth=2), Pause(("host-1",), seconds=1.0)),
            Strike("kill", On(Accumulated, peer="host-2", nth=5), BulkKill(2)),
        ]
        struck(tmp_path / str(number), *strikes)[1].assert_fired()
        files = sorted((tmp_path / str(number)).glob("*/events.jsonl"))
        hashes.add(b"".join(file.read_bytes() for file in files))
    assert len(hashes) == 1


async def pinged(swarm: LocalSwarm, one: str, other: str, timeout_s: float = 60.0) -> type[Exception] | None:
    """What a ping from one peer to another ends with."""
    endpoints = swarm.peers[one].endpoint, swarm.peers[other].endpoint
    try:
        await endpoints[0].call(endpoints[1].peer, PING, Ping(), timeout_s=timeout_s)
    except PeerError as error:
        return type(error)
    return None


async def inflict(swarm: LocalSwarm, world: MemoryWorld, fault: Fault, lost: Pairs = (), well: Pairs = ()) -> None:
    """A quiet swarm of endpoints that serve pings, with one fault: between whom pings are lost then, and arrive."""
    if not swarm.peers:
        await swarm.open()
        for peer in swarm.peers.values():
            await peer.endpoint.enter(swarm.manifest.run_id)
            peer.endpoint.mount(peer.around.watch)
    world.check(fault)
    world.inflict(fault)
    assert [await pinged(swarm, *pair, timeout_s=0.2) for pair in lost] == [DeadlineMissed] * len(lost)
    assert [await pinged(swarm, *pair) for pair in well] == [None] * len(well)


async def close(swarm: LocalSwarm) -> None:
    """Close what was opened."""
    for peer in swarm.peers.values():
        await peer.endpoint.close()
        await peer.around.device.close()


THERE, BACK, BESIDE = ("host-0", "host-1"), ("host-1", "host-0"), ("host-1", "trainer-0")


@pytest.mark.parametrize(
    ("fault", "end", "well"),
    [
        (Partition(("host-0",), ("host-1",)), Heal(), (BESIDE,)),
        (Pause(("host-1",)), Resume(("host-1",)), (("host-0", "trainer-0"),)),
    ],
    ids=["cut", "held"],
)
async def test_links_that_are_cut_and_peers_that_are_held_are_silent_in_real_time_until_that_ends(
    tmp_path: Path, fault: Fault, end: Fault, well: Pairs
) -> None:
    swarm = LocalSwarm(tmp_path)
    world = MemoryWorld(swarm)
    await inflict(swarm, world, fault, lost=(THERE, BACK), well=well)
    await inflict(swarm, world, end, well=(THERE, BACK))
    await close(swarm)


async def test_one_way_cut_stops_requests_one_way_and_answers_the_other(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path)
    cut = Partition(("host-0",), ("host-1",), one_way=True)
    await inflict(swarm, MemoryWorld(swarm), cut, lost=(THERE, BACK), well=(BESIDE,))
    received = {name: swarm.peers[name].endpoint.statistics().bytes_received for name in ("host-0", "host-1")}
    ids = {name: swarm.peers[name].endpoint.peer for name in received}
    assert received["host-0"].get(ids["host-1"], 0) > 0
    assert received["host-1"].get(ids["host-0"], 0) == 0


def test_slow_device_takes_longer_at_everything(tmp_path: Path) -> None:
    async def story() -> tuple[float, float]:
        swarm = SimSwarm(tmp_path)
        world = MemoryWorld(swarm)
        await swarm.open()
        device, clock = swarm.devices["host-0"], swarm.network.clock
        took = []
        for factor in (1.0, 4.0):
            world.inflict(SlowDevice("host-0", factor))
            began = clock.monotonic()
            await device.run(device.spend, 0.5)
            took.append(clock.monotonic() - began)
        await close(swarm)
        return took[0], took[1]

    assert run_world(story()) == (0.5, 2.0)


def test_skewed_clock_shows_in_time_stamps_and_records(tmp_path: Path) -> None:
    swarm, plan = struck(
        tmp_path,
        Strike("skew", On(Accumulated, peer="host-1"), SkewClock("host-1", 3600.0)),
        run={"steps": 2},
    )
    plan.assert_fired()
    lines = [json.loads(line) for line in (tmp_path / "host-1" / "events.jsonl").read_text().splitlines()]
    assert any(after["t"] - before["t"] > 3500 for before, after in zip(lines, lines[1:], strict=False))
    assert len(swarm.history()) == 3, "a clock that is off changes nothing"


def test_corrupted_bytes_arrive_changed_and_are_counted(tmp_path: Path) -> None:
    swarm, plan = struck(
        tmp_path,
        Strike("flip", On(StepClosed, peer="host-0"), CorruptBytes(("trainer-0", "host-0"))),
    )
    plan.assert_fired()
    source, target = (swarm.peers[name].endpoint.peer for name in ("trainer-0", "host-0"))
    assert swarm.network.corrupt_left(source, target) == 0


def test_full_disk_refuses_only_below_that_home(tmp_path: Path) -> None:
    for name in ("full", "other"):
        (tmp_path / name).mkdir()
    with full_disk(tmp_path / "full") as disks:
        for name in ("full", "other"):
            with (tmp_path / name / "file").open("w") as file:
                file.write("text")
                file.flush()
                with pytest.raises(OSError, match="No space") if name == "full" else contextlib.nullcontext():
                    os.fsync(file.fileno())
        assert disks.refused == 1
    assert not isinstance(getattr(os.fsync, "__self__", None), FullDisks)
