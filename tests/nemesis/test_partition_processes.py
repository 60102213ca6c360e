"""Real peers, two of them cut off from the rest: the rest goes on, they wait, and come back to the one history."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.chaos.faults import Heal, Moment, Partition
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.chaos.process_world import ProcessWorld
from peers.chaos.shaping import shaped
from tests.harness.by_hand import RUN
from tests.harness.expect import wait_until
from tests.harness.faults_processes import started

# Half a minute: tests/swarms/test_partitions.py has the cases, in virtual time.
pytestmark = [pytest.mark.process, pytest.mark.nemesis]
MANY = ("bootstrap", "host-0", "host-1", "trainer-0")
FEW = ("host-2", "host-3")


def test_peers_cut_off_wait_and_come_back_to_the_one_history(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {n} of a text that nobody else has, {n * 7}." * 6 for n in range(80)))
    manifest = tmp_path / "run.toml"
    manifest.write_text(RUN.format(steps=100_000).replace("stage_hosts = 2", "stage_hosts = 4"))
    with shaped({"default": {"latency_ms": 5}}) as links, ProcessWorld(tmp_path, links) as world:
        invite = str(started(world, "bootstrap", "new", str(manifest)).wait_event("Invited")["invite"])
        hosts = {
            f"host-{number}": started(
                world, f"host-{number}", "join", invite, "--role", "stage", "--stage", str(number % 2)
            )
            for number in range(4)
        }
        trainer = started(world, "trainer-0", "join", invite, "--role", "trainer", "--data", str(text))
        plan = FaultPlan(
            Strike("cut", On("StepClosed", peer="trainer-0", nth=3), Partition(FEW, MANY)),
            Strike("heal", On("StepClosed", peer="trainer-0", nth=3, after="alone"), Heal()),
            Strike("alone", On("QuorumLost", peer="host-3", after="cut"), Moment()),
            Strike("back", On("PeerReady", peer="host-3", after="heal"), Moment()),
            Strike("end", On("StepClosed", peer="host-3", nth=2, after="back"), Moment()),
            world=world,
        )
        wait_until(lambda: "end" in plan.fired or trainer.process.poll() is not None, deadline_s=240, what="the end")
        plan.assert_fired()
        began, alone, ended = (plan.fired[label].wall for label in ("cut", "alone", "heal"))
        during = [event for event in trainer.events("StepClosed") if alone < event["t"] < ended]
        assert len(during) >= 2, "the majority went on"
        for name in FEW:
            assert hosts[name].events("CutOff"), name
            assert not [e for e in hosts[name].events("StepClosed") if began + 2 < e["t"] < ended], name
        assert not any(peer.events("QuorumLost") for peer in (trainer, hosts["host-0"], hosts["host-1"]))
    check_run([tmp_path / "homes"]).assert_sound(("I1", "I2", "I3", "I4", "I5", "I7", "I10", "I20"))
