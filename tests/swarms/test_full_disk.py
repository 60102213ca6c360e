"""A peer whose disk takes nothing more goes on without it, says so once, and writes all of it when it can."""

from __future__ import annotations

from pathlib import Path

from peers.chaos.faults import FillDisk, FreeDisk
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import DiskRefused, DiskTook, StepClosed
from swarm.sim.loop import run_world
from tests.harness.faults_memory import MemoryWorld

STEPS = 6


def test_peer_whose_disk_is_full_goes_on_and_its_history_has_no_gap(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    with MemoryWorld(swarm) as world:
        plan = FaultPlan(
            Strike("full", On(StepClosed, peer="host-0", where={"step": 2}), FillDisk("trainer-0")),
            Strike("free", On(StepClosed, peer="host-0", where={"step": 4}), FreeDisk("trainer-0")),
            world=world,
        )
        run_world(swarm.run())
    plan.assert_fired()
    assert {peer.outcome for peer in swarm.peers.values()} == {"every step of the run is closed"}
    struck = swarm.peers["trainer-0"]
    assert sorted(event.what for event in struck.events.of(DiskRefused)) == ["its votes", "the run's history"]
    assert sorted(event.what for event in struck.events.of(DiskTook)) == ["its votes", "the run's history"]
    assert [event.step for event in struck.events.of(StepClosed)] == list(range(1, STEPS + 1))
    assert [one["step"] for one in swarm.history("trainer-0")] == list(range(STEPS + 1))
    assert not swarm.peers["host-0"].events.of(DiskRefused)
    check_run([tmp_path]).assert_sound()


def test_disk_that_all_peers_share_and_that_is_full_holds_the_run_up_until_there_is_room(tmp_path: Path) -> None:
    """Nobody can keep a vote, so nothing is decided, and nobody ends."""
    swarm = SimSwarm(tmp_path, hosts=2, trainers=1, run={"steps": STEPS}, stage_s={"forward": 0.1})
    with MemoryWorld(swarm) as world:
        at = On(StepClosed, peer="host-0", where={"step": 2})
        plan = FaultPlan(
            *(Strike(f"full {name}", at, FillDisk(name)) for name in ("bootstrap", "host-0", "host-1", "trainer-0")),
            *(
                Strike(f"free {name}", On("Waiting", where={"what": few}), FreeDisk(name))
                for name in ("bootstrap", "host-0", "host-1", "trainer-0")
            ),
            world=world,
        )
        run_world(swarm.run())
    plan.assert_fired()
    assert {peer.outcome for peer in swarm.peers.values()} == {"every step of the run is closed"}
    check_run([tmp_path]).assert_sound()


def few(what: str) -> bool:
    """Whether somebody waits for voters."""
    return what.startswith("a majority: ")
