"""Boundary codecs that records choose, in whole swarms: all use the same one, no matter who dies or comes back
meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.chaos.plan import On, Strike
from peers.profiles import PROFILES, with_profile
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import CodecsChanged, JourneyCompleted, LinkUsage, PeerLost, StepClosed
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.swarms.story import DONE, live_through

EXACT, SMALL = ["float32", "float32"], ["int8h", "int8h"]
STEPS = 6


def swarm_of(root: Path, mbit: float, ends: str = "private", **codecs: str) -> SimSwarm:
    """Two stages of two replicas, activations of 64 kB, 150 ms of compute. In memory latency counts as a part of what a
    payload takes, so that only near machines seem to have wide links."""
    machine = {"peer": "*", "up_mbit_per_s": mbit, "down_mbit_per_s": mbit}
    shape: dict[str, Any] = {
        "hosts": 4,
        "trainers": 2,
        "run": {"steps": STEPS},
        "split": {"stages": 2, "ends": ends},
        "model": {"layers": 2, "dim": 64, "context": 64, "vocab_size": 300},
    }
    return SimSwarm(
        root,
        links=Links.parse({"default": {"latency_ms": 20 if mbit < 100 else 0.1}, "machine": [machine]}),
        stage_s={"forward": 0.05, "backward": 0.1},
        codecs={"activations": "auto"} | codecs,
        **shape,
    )


def sent(swarm: SimSwarm, step: int) -> int:
    """Bytes that stage hosts sent in a step."""
    hosts = [peer for name, peer in swarm.peers.items() if name.startswith("host-")]
    return sum(event.bytes_sent for peer in hosts for event in peer.events.of(LinkUsage) if event.step == step)


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_thin_links_have_the_next_step_send_less_though_a_replica_dies_and_comes_back(
    tmp_path: Path, ends: str
) -> None:
    swarm = swarm_of(tmp_path, 8.0, ends)
    dies = Strike("dies", On(JourneyCompleted, where={"step": 3}), Kill(("host-0",)))
    back = Strike("back", On(PeerLost, after="dies"), Restart("host-0", keep_disk=True))
    live_through(swarm, tmp_path, dies, back, steps=STEPS, timeout_s=3600.0)
    codecs = [record.get("codecs", []) for record in swarm.history()]
    outer = SMALL if ends == "private" else EXACT  # token ids cross these
    assert codecs == [[], *[[outer, SMALL, outer]] * STEPS]
    changes = swarm.peers["trainer-0"].events.of(CodecsChanged)
    assert [(event.step, [list(pair) for pair in event.codecs]) for event in changes] == [(1, codecs[1])]
    assert "float32 would keep links of " in changes[0].why


def test_wide_links_carry_exact_payloads_and_the_very_same_run(tmp_path: Path) -> None:
    wide, named = swarm_of(tmp_path / "auto", 800.0), swarm_of(tmp_path / "named", 800.0, activations="float32")
    for swarm in (wide, named):
        run_world(swarm.run())
    assert [record["codecs"] for record in wide.history()[1:]] == [[EXACT] * 3] * STEPS
    assert not wide.events(CodecsChanged)
    assert "codecs" not in named.history()[1]
    assert "paces" not in named.history()[1]


def test_smaller_codecs_save_bytes_and_steps_take_less_time(tmp_path: Path) -> None:
    small = swarm_of(tmp_path / "small", 8.0, gradients="auto")
    exact = swarm_of(tmp_path / "exact", 8.0, activations="float32", gradients="float32")
    took = []
    for swarm in (small, exact):
        run_world(swarm.run())
        took.append(sum(event.seconds for event in swarm.peers["trainer-0"].events.of(StepClosed) if event.step > 1))
    assert sent(small, 4) < 0.7 * sent(small, 1), "averaging and what calls weigh are the same"
    assert took[0] < 0.95 * took[1], took


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_run_of_each_profile_trains_to_its_end(tmp_path: Path, name: str) -> None:
    batch = {"microbatch_size": 1, "microbatches_per_step": 8}
    document = {"speed": {"profile": name}, "run": {"steps": 2}, "batch": batch}
    sections = with_profile(document, ["batch.microbatches_per_step"])
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, model={"layers": 2, "dim": 64, "context": 8}, **sections)
    run_world(swarm.run())
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    losses = [event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)]
    assert losses[-1] < losses[0]
    check_run([tmp_path], Limits(target=8 if name != "thin" else 64)).assert_sound()
