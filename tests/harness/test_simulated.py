"""A swarm in a virtual world trains as any other, repeats itself, and takes the time that is described."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peers.chaos.invariants.evidence import event_hash, gather
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import StepClosed
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from tests.harness.sources import ROOT

SCRIPT = """
import sys, pathlib, torch
from tests.harness.test_simulated import trained
torch.set_num_threads(1)
print(trained(pathlib.Path(sys.argv[1])))
"""
ROUGH = {"seed": 3, "default": {"latency_ms": 20, "jitter_ms": 10, "mbit_per_s": 20, "loss": 0.02}}


def trained(root: Path) -> str:
    """The hash of all events of a small run over rough links."""
    root.mkdir(exist_ok=True)
    swarm = SimSwarm(root, hosts=4, trainers=2, links=Links.parse(ROUGH))
    run_world(swarm.run())
    return event_hash(gather([root]))


@pytest.mark.long
def test_same_seed_gives_the_same_events_in_every_process(tmp_path: Path) -> None:
    hashes = {trained(tmp_path / "here")}
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / seed)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        hashes.add(ended.stdout.strip())
    assert len(hashes) == 1


def test_described_devices_and_links_decide_how_long_a_step_takes(tmp_path: Path) -> None:
    swarm = SimSwarm(
        tmp_path,
        hosts=2,
        links=Links.parse({"default": {"latency_ms": 5}}),
        stage_s={"forward": 0.1, "backward": 0.2},
        batch={"microbatches_per_step": 10},
    )
    run_world(swarm.run())
    busy = {name: device.busy_s for name, device in swarm.devices.items()}
    assert busy["host-0"] == pytest.approx(3 * 10 * 0.3)
    assert busy["bootstrap"] == busy["trainer-0"] == 0.0
    seconds = [event.seconds for event in swarm.events(StepClosed) if event.step == 3]
    assert all(3.0 < took < 4.5 for took in seconds), "ten microbatches of 0.3 s on the slowest stage, and the closing"
