"""A variant of a stage whose last host dies: another takes it over from a copy, or the run says what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.chaos.faults import Fault, Kill, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import CopyHeld, JourneyCompleted, PeerLost, StepClosed, StepGivenUp, Waiting, WentBack
from swarm.ids import stage_part
from swarm.sim.loop import run_world
from tests.benchmarks._parity_run import TrainedRun, read_history
from tests.harness.faults_memory import MemoryWorld
from tests.properties.test_parity import differing
from tests.swarms.story import DONE
from tests.swarms.test_rescue import holders

STEPS, LAW, CODE = 6, stage_part(1, 0, 2), stage_part(1, 1, 2)
LAST = "host-4"
"""The only host of code, of five."""
SPLIT: dict[str, Any] = {"stages": 2, "variants": (1, 2), "route_by": "domain", "domains": ("law", "code")}
MIDST = On(JourneyCompleted, peer="trainer-1", where={"step": 3})
NOTICED = On(PeerLost, after="kill")


def struck(root: Path, *then: Fault, may_fail: bool = False, **run: Any) -> SimSwarm:
    """Kill the last host of code while its trainer's step 3 goes on; what follows happens when it is missed."""
    names = ("bootstrap", *(f"host-{number}" for number in range(5)), f"{LAST}-again-1")
    kept = {name: {"run_directory": root / f"kept-{name.removesuffix('-again-1')}"} for name in names}
    domains = {f"trainer-{number}": {"domain": name} for number, name in enumerate(SPLIT["domains"])}
    sites = {name: site | {"run_directory": root / f"kept-{name}"} for name, site in domains.items()} | kept
    swarm = SimSwarm(
        root,
        hosts=5,
        trainers=2,
        split=SPLIT,
        sites=sites,
        run={"steps": STEPS, "reproducible": True, **run},
        model={"layers": 2, "dim": 16, "context": 8},
        batch={"microbatch_size": 1, "microbatches_per_step": 4},
        may_fail=may_fail,
    )
    after = (Strike(f"then-{index}", NOTICED, fault) for index, fault in enumerate(then))
    plan = FaultPlan(Strike("kill", MIDST, Kill((LAST,))), *after, world=MemoryWorld(swarm))
    try:
        run_world(swarm.run(timeout_s=600.0))
    finally:
        plan.assert_fired()
    assert {len(holders(swarm, CODE, step)) for step in (0, 1, 2)} == {1}, "the fault: nobody else had it"
    return swarm


def test_variant_whose_last_host_dies_is_taken_over_from_a_copy_and_no_bit_of_it_is_lost(tmp_path: Path) -> None:
    swarm = struck(tmp_path, copies=2)
    assert {peer.outcome for name, peer in swarm.peers.items() if name != LAST} == {DONE}
    assert {(event.step, event.lost) for event in swarm.events(StepGivenUp)} == {(3, (CODE,))}
    assert CODE in {event.part for event in swarm.events(CopyHeld)}
    assert {part: len(holders(swarm, part)) for part in (stage_part(0), LAW, CODE)} == {
        stage_part(0): 1,
        LAW: 2,
        CODE: 1,
    }
    (rescuer,) = holders(swarm, CODE)
    assert {event.part for event in swarm.peers[rescuer].events.of(CopyHeld)}.isdisjoint({CODE}), "trainers keep them"
    check_run([swarm.root]).assert_sound()
    records = read_history(tmp_path / "bootstrap" / "history.jsonl")
    assert len({record.digests[CODE] for record in records}) == STEPS, "all but the step that was given up taught it"
    assert differing(TrainedRun.linked(tmp_path, swarm.manifest, records, swarm.shards), records) == []


def test_run_waits_for_a_variant_of_which_nobody_keeps_a_copy_and_ends_naming_it(tmp_path: Path) -> None:
    swarm = struck(tmp_path, copies=0, wait_for_lost_s=30.0, may_fail=True)
    waits = {event.what for event in swarm.events(Waiting) if CODE in event.what}
    assert any(f"a replica of {CODE}: {LAST}" in what and f"next: start {LAST} where it was" in what for what in waits)
    ended = {repr(peer.outcome) for name, peer in swarm.peers.items() if name != LAST}
    assert {f"the last replica of {CODE} is lost: {LAST}" in said for said in ended} == {True}, ended
    assert max(event.step for event in swarm.events(StepClosed)) == 2


def test_run_goes_back_to_a_checkpoint_when_the_last_host_of_a_variant_is_started_again(tmp_path: Path) -> None:
    swarm = struck(tmp_path, Restart(LAST), copies=0)
    assert {peer.outcome for name, peer in swarm.peers.items() if name != LAST} == {DONE}
    assert {event.step for event in swarm.events(WentBack)} == {2}
    assert holders(swarm, CODE) == [f"{LAST}-again-1"]
    check_run([swarm.root]).assert_sound()
