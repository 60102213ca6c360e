"""Real peers over described links, with faults on purpose: the harness does to them what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.chaos.faults import Moment, Partition, Pause
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.chaos.process_world import ProcessWorld
from peers.chaos.shaping import shaped
from tests.harness.by_hand import RUN, some_text
from tests.harness.expect import wait_until
from tests.harness.faults_processes import started

pytestmark = [pytest.mark.process, pytest.mark.long]
OTHERS = ("bootstrap", "host-0", "trainer-0")


def test_run_over_slow_links_survives_a_short_cut_and_a_pause(tmp_path: Path) -> None:
    text = some_text(tmp_path)
    manifest = tmp_path / "run.toml"
    manifest.write_text(RUN.format(steps=100_000))
    with (
        shaped({"default": {"latency_ms": 15, "jitter_ms": 5}}) as links,
        ProcessWorld(tmp_path, links) as world,
    ):
        invite = str(started(world, "bootstrap", "new", str(manifest)).wait_event("Invited")["invite"])
        for name in ("host-0", "host-1"):
            started(world, name, "join", invite, "--role", "stage")
        trainer = started(world, "trainer-0", "join", invite, "--role", "trainer", "--data", str(text))
        plan = FaultPlan(
            Strike("cut", On("StepClosed", peer="trainer-0", nth=3), Partition(("host-1",), OTHERS, seconds=1.5)),
            Strike("stop", On("StepClosed", peer="trainer-0", nth=3, after="cut"), Pause(("host-0",), seconds=1.5)),
            Strike("end", On("StepClosed", peer="trainer-0", nth=3, after="stop"), Moment()),
            world=world,
        )
        wait_until(lambda: "end" in plan.fired or trainer.process.poll() is not None, what="the end")
        plan.assert_fired()
        pairs = [("trainer-0", name) for name in ("bootstrap", "host-0", "host-1")]
        assert all(links.passed(*pair) + links.passed(*reversed(pair)) > 0 for pair in pairs), links.proxy.passed
        closed = [event["t"] for event in trainer.events("StepClosed")]
        for label in ("cut", "stop"):
            at = plan.fired[label].wall
            after = min(t for t in closed if t > at + 1.0)
            assert after - max(t for t in closed if t <= after - 1e-6 and t < at + 1.0) > 1.0, "nobody noticed it"
    report = check_run([tmp_path / "homes"])
    report.assert_sound(("I1", "I2", "I3", "I4", "I5", "I7", "I10"))
