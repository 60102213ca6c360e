"""Replicas with one device and with two in one reproducible run of real processes: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.home.run_directory import RunDirectory
from swarm.config import load_manifest
from tests.benchmarks._parity_run import TrainedRun, read_history
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
        records = read_history(max(hand.home.rglob("history.jsonl"), key=lambda path: path.stat().st_size))
        computed = {done.route[0] for record in records for done in record.committed}
        assert computed == {str(each.events("PeerReady")[0]["peer"]) for each in (one, two)}, "both had their share"
        again = RunDirectory(tmp_path / "again")
        again.shard(0).parent.mkdir(parents=True, exist_ok=True)
        again.shard(0).symlink_to(*(path for path in hand.home.rglob("shard") if "t0" in path.parts))
        manifest = load_manifest(next(hand.home.rglob("run.toml")))
        assert len(records) == STEPS + 1
        assert differing(TrainedRun(manifest=manifest, directory=again, records=records), records) == []
        whole = manifest.model_copy(update={"split": manifest.split.model_copy(update={"tensor": 1})})
        apart = differing(TrainedRun(manifest=whole, directory=again, records=records), records)
        assert apart, "whole layers round otherwise"
