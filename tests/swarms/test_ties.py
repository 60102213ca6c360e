"""Of two replicas one reports another result, always: the part is taken over from a copy, and the run goes on."""

from __future__ import annotations

from pathlib import Path

from peers.simulate.sim_swarm import SimSwarm
from swarm.events import DigestMismatch, StepClosed, StepGivenUp
from swarm.sim.loop import run_world
from tests.harness.bad_leaders import lies_about_weights
from tests.swarms.story import DONE

STEP, STEPS = 3, 6
WITHIN_S = 60.0


def test_replica_that_always_differs_from_the_other_of_its_part_stops_nobody(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS, "copies": 2}, may_fail=True)
    with lies_about_weights("host-0", swarm, step=STEP) as struck:
        run_world(swarm.run(timeout_s=900.0))
    assert len(struck) >= 2
    assert {peer.outcome for name, peer in swarm.peers.items() if name != "host-0"} == {DONE}
    assert [event for event in swarm.events(DigestMismatch) if event.step == STEP]
    assert {event.step for event in swarm.events(StepGivenUp)} == {STEP}
    seconds = {event.step: event.seconds for event in swarm.events(StepClosed)}
    assert max(seconds[step] for step in range(2, STEPS + 1)) < WITHIN_S
