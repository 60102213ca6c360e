"""A host moves to another part, of which it keeps a copy, when the record before plans it: nothing is lost by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill, SlowDevice
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.changes import Changes
from swarm.consensus.copies import copy_holders
from swarm.consensus.records import CloseRecord
from swarm.events import (
    AttemptFailed,
    ContributionReplayed,
    CopyHeld,
    CutOff,
    HopMoved,
    HostsMoved,
    JourneyCompleted,
    MoveDeclined,
    PartAssigned,
)
from swarm.ids import PartName, PeerId, stage_part
from swarm.membership import composition
from swarm.membership.copying import Copying
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.step.moves import MoveRules
from tests.harness.faults_memory import MemoryWorld

STEPS, AT, COPIES = 6, 3, 4
FROM, TO = stage_part(0), stage_part(1)


def planning(monkeypatch: pytest.MonkeyPatch, *, most: int = 1) -> None:
    """Have step AT move hosts of stage 0 that keep a copy of stage 1 there, at most so many."""

    def planned(self: MoveRules, before: CloseRecord, changes: Changes) -> Mapping[PeerId, PartName]:
        holders = copy_holders(before.members, TO, COPIES) if before.step == AT - 1 else ()
        return dict.fromkeys([peer for peer in holders if before.members[peer].part == FROM][:most], TO)

    monkeypatch.setattr(MoveRules, "planned", planned)


def swarm_of(root: Path, *, hosts: int = 8, exact: bool = True, **more: Any) -> SimSwarm:
    run, links = {"steps": STEPS, "copies": COPIES, "reproducible": exact}, {"default": {"latency_ms": 20}}
    shape = {"split": {"stages": 2}, "stage_s": {"forward": 0.1, "backward": 0.1}, **more}
    return SimSwarm(
        root, hosts=hosts, trainers=2, run=run, rebalance={"mode": "auto"}, links=Links.parse(links), **shape
    )


def parts(swarm: SimSwarm, step: int) -> dict[str, str | None]:
    return {member["name"]: member["part"] for member in swarm.history()[step]["roster"]}


def digests(swarm: SimSwarm) -> list[dict[str, str]]:
    return [record["digests"] for record in swarm.history()]


def moved(swarm: SimSwarm) -> list[str]:
    before, after = parts(swarm, AT - 1), parts(swarm, AT)
    return [name for name, part in after.items() if part != before[name]]


def check(swarm: SimSwarm) -> None:
    assert {peer.outcome for peer in swarm.peers.values()} == {"every step of the run is closed"}
    check_run([swarm.root]).assert_sound()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> SimSwarm:
    """Ran to its end, and nobody moved."""
    swarm = swarm_of(tmp_path_factory.mktemp("still"))
    run_world(swarm.run(timeout_s=600.0))
    assert parts(swarm, 0) == parts(swarm, -1)
    return swarm


def test_planned_host_moves_over_its_copy_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: SimSwarm
) -> None:
    planning(monkeypatch)
    moving = swarm_of(tmp_path / "moving")
    run_world(moving.run(timeout_s=600.0))
    (name,) = moved(moving)
    assert digests(moving) == digests(still)
    assert not moving.events(CutOff)
    assert not moving.events(AttemptFailed)
    (told,) = moving.events(HostsMoved)
    assert {moving.network.names[peer]: part for peer, part in told.moves.items()} == {name: TO}
    assert [event.part for event in moving.peers[name].events.of(PartAssigned)] == [FROM, TO]
    assert name in {
        moving.network.names[peer] for one in moving.history()[AT + 1]["committed"] for peer in one["route"]
    }
    check(moving)


def test_host_without_the_memory_for_its_copy_says_so_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: SimSwarm
) -> None:
    planning(monkeypatch)
    monkeypatch.setattr(
        composition, "lacking_to_move", lambda _, held, name, step: f"{held.spec.name} fits, {name} not"
    )
    swarm = swarm_of(tmp_path)
    run_world(swarm.run(timeout_s=600.0))
    (told,) = swarm.events(MoveDeclined)
    assert (told.step, told.part, told.reason) == (AT, TO, f"{FROM} fits, {TO} not")
    assert parts(swarm, 0)[swarm.network.names[told.peer]] == FROM
    assert not swarm.events(HostsMoved)
    assert (parts(swarm, -1), digests(swarm)) == (parts(swarm, 0), digests(still))
    check(swarm)


def test_mover_keeps_what_it_held_as_a_copy_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = swarm_of(tmp_path, hosts=3)
    planning(monkeypatch, most=3)
    run_world(swarm.run(timeout_s=600.0))
    (name,) = moved(swarm)  # one replica stays in each part
    held = [event.step for event in swarm.peers[name].events.of(CopyHeld) if event.part == FROM]
    membership = swarm.peers[name].membership
    assert (held, membership is not None and FROM in membership.copies) == ([], True)
    check(swarm)


def test_mover_whose_copy_comes_too_late_gets_its_part_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(self: Copying, part: PartName, step: int) -> None:
        return None

    swarm = swarm_of(tmp_path)
    planning(monkeypatch)
    monkeypatch.setattr(Copying, "take", late)
    run_world(swarm.run(timeout_s=600.0))
    (name,) = moved(swarm)
    assert len(swarm.peers[name].events.of(CutOff)) == 1
    assert parts(swarm, -1)[name] == TO
    check(swarm)


def test_starved_stage_gets_a_host_with_the_record_that_names_its_dead(tmp_path: Path, still: SimSwarm) -> None:
    starved = [name for name, part in parts(still, 0).items() if part == TO][:3]
    swarm = swarm_of(tmp_path / "starved")
    kill = Strike("kill", On(JourneyCompleted, peer="trainer-0", where={"step": AT}), Kill(tuple(starved)))
    plan = FaultPlan(kill, world=MemoryWorld(swarm))
    run_world(swarm.run(timeout_s=600.0))
    plan.assert_fired()
    before, after = parts(swarm, AT - 1), parts(swarm, AT)
    assert Counter(before.values()) == {FROM: 4, TO: 4, "ends": 2, None: 1}
    assert Counter(after.values()) == {FROM: 3, TO: 2, "ends": 2, None: 1}
    assert any("stage-1 computes 1" in reason for event in swarm.events(HostsMoved) for reason in event.reasons)
    assert digests(swarm) == digests(still)
    assert {peer.outcome for name, peer in swarm.peers.items() if name not in starved} == {
        "every step of the run is closed"
    }
    check_run([swarm.root]).assert_sound()


def test_stage_of_slow_hosts_gets_another(tmp_path: Path, still: SimSwarm) -> None:
    slow = tuple(name for name, part in parts(still, 0).items() if part == TO)
    swarm = swarm_of(tmp_path / "slow")
    begun = On(JourneyCompleted, peer="trainer-0", where={"step": 1})
    plan = FaultPlan(*(Strike(f"slow-{name}", begun, SlowDevice(name, 4.0)) for name in slow), world=MemoryWorld(swarm))
    run_world(swarm.run(timeout_s=600.0))
    plan.assert_fired()
    assert (len(slow), Counter(parts(swarm, -1).values())[TO]) == (4, 5)
    assert digests(swarm) == digests(still)
    check(swarm)


OVERLAP = {
    "speed": {"mode": "overlap", "early_share": 0.5},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 24},
}


@pytest.mark.parametrize(
    ("ends", "stage_s"), [("private", 0.05), ("hosted", 1.0)], ids=["early work done", "early work on its way"]
)
def test_host_moves_with_two_steps_open_and_others_do_again_what_it_did_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, stage_s: float
) -> None:
    takes = dict.fromkeys(("forward", "forward_loss", "backward"), stage_s)
    shape: dict[str, Any] = {**OVERLAP, "split": {"stages": 2, "ends": ends}, "stage_s": takes, "hosts": 4}
    still = swarm_of(tmp_path / "still", **shape)
    run_world(still.run(timeout_s=600.0))
    planning(monkeypatch)
    moving = swarm_of(tmp_path / "moving", **shape)
    run_world(moving.run(timeout_s=600.0))
    (told,) = moving.events(HostsMoved)
    (mover,) = told.moves
    early = [one for one in moving.events(JourneyCompleted) if one.step == AT + 1 and one.route[0] == mover]
    again = [one for one in moving.events(ContributionReplayed) if one.step == AT + 1]
    refused = [one for one in moving.events(HopMoved) if (one.old, one.step) == (mover, AT + 1)]
    done = {one.microbatch for one in again} | {one.microbatch for one in refused}
    assert {one.microbatch for one in early} <= done
    assert early if stage_s < 0.1 else refused, "it did early work where it was, or was about to"
    assert (moving.events(CutOff), digests(moving)) == ([], digests(still))
    check(moving)


def test_stage_starved_with_two_steps_open_gets_a_host(tmp_path: Path) -> None:
    still = swarm_of(tmp_path / "still", **OVERLAP)
    run_world(still.run(timeout_s=600.0))
    starved = [name for name, part in parts(still, 0).items() if part == TO][:3]
    swarm = swarm_of(tmp_path / "starved", **OVERLAP)
    fed_early = On(JourneyCompleted, peer="trainer-0", where={"step": AT + 1})
    plan = FaultPlan(Strike("kill", fed_early, Kill(tuple(starved))), world=MemoryWorld(swarm))
    run_world(swarm.run(timeout_s=600.0))
    plan.assert_fired()
    assert swarm.events(HostsMoved)
    assert Counter(parts(swarm, -1).values())[TO] >= 2
    assert digests(swarm) == digests(still)
    check_run([swarm.root]).assert_sound()


def test_replicas_that_train_apart_move_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning(monkeypatch)
    swarm = swarm_of(tmp_path, exact=False, averaging={"mode": "local", "local": {"steps": 2}})
    run_world(swarm.run(timeout_s=600.0))
    assert len(moved(swarm)) == 1
    assert not swarm.events(CutOff)
    check(swarm)
