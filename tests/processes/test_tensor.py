"""Replicas with one device and with two in one reproducible run of real processes: the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks._parity_run import TrainedRun
from tests.harness.by_hand import LOCAL, by_hand, some_text
from tests.properties.test_parity import differing

pytestmark = [pytest.mark.process, pytest.mark.long]

STEPS = 12
RUN = f"""
[run]
name = "hand"
steps = {STEPS}
reproducible = true
copies = 0
start_when = {{ stage_hosts = 3, trainers = 1 }}
[model]
vocab_size = 300
dim = 16
layers = 2
heads = 4
context = 16
[split]
stages = 2
ends = "hosted"
tensor = 2
[batch]
microbatch_size = 2
microbatches_per_step = 4
"""


def test_replicas_with_one_device_and_with_two_have_the_bits_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(tmp_path / "run.toml"), *LOCAL)
        invite = str(founder.wait_event("Invited")["invite"])

        def host(stage: int, devices: str) -> tuple[str, ...]:
            return ("join", invite, "--stage", str(stage), "--device", devices, *LOCAL)

        three = hand.run(*host(0, "cpu+cpu+cpu"))
        assert (three.returncode, "every peer of this run computes 2 strips" in three.stderr) == (2, True), three.stderr
        two, one = (hand.start(*host(0, devices)) for devices in ("cpu+cpu", "cpu"))
        last = hand.start(*host(1, "cpu"))
        who = ("--name", "trainer-0", "--place", "t0")
        trainer = hand.start("join", invite, "--data", str(some_text(tmp_path)), *who, *LOCAL)
        assert [each.end()[0] for each in (founder, two, one, last, trainer)] == [0] * 5
        assert [event["device"] for event in two.events("DeviceChosen")] == ["cpu+cpu"]
        run = TrainedRun.in_home(hand.home, tmp_path / "again", trainers=1)
        computed = {done.route[0] for record in run.records for done in record.committed}
        assert computed == {str(each.events("PeerReady")[0]["peer"]) for each in (one, two)}, "both had their share"
        assert len(run.records) == STEPS + 1
        assert differing(run, run.records) == []
        split = run.manifest.split.model_copy(update={"tensor": 1})
        apart = differing(replace(run, manifest=run.manifest.model_copy(update={"split": split})), run.records)
        assert apart, "whole layers round otherwise"
