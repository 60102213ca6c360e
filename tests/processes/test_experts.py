"""Experts token by token among real processes: a host is killed, the numbers are those of one process, the model is
exported, measured and asked."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from swarm.ids import PartName
from tests.benchmarks._parity_run import TrainedRun
from tests.harness.by_hand import LOCAL, by_hand
from tests.properties.test_parity import differing

pytestmark = [pytest.mark.process, pytest.mark.long]

STEPS = 24
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
layers = 4
heads = 2
context = 16
experts = 4
capacity = 1.0
balance = {{ kind = "bias", rate = 0.01 }}
[split]
stages = 2
ends = "hosted"
[batch]
microbatch_size = 2
microbatches_per_step = 4
"""


def test_run_with_experts_has_the_bits_of_one_process_though_a_host_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The owl number {n} saw {7 * n} mice in the barn of {n * n}." * 3 for n in range(90)))
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(tmp_path / "run.toml"), "--listen", "/ip4/127.0.0.1/tcp/0")
        invite = str(founder.wait_event("Invited")["invite"])
        hosts = [hand.start("join", invite, "--role", "stage", *LOCAL) for _ in range(3)]
        who = ("--name", "trainer-0", "--place", "t0")
        trainer = hand.start("join", invite, "--role", "trainer", "--data", str(text), *who, *LOCAL)
        held = [str(host.wait_event("PeerReady")["part"]) for host in hosts]
        twice = next(part for part in held if held.count(part) == 2)
        killed = hosts[held.index(twice)]
        trainer.wait_step(3)
        killed.process.send_signal(signal.SIGKILL)
        assert [one.end()[0] for one in (founder, trainer)] == [0, 0]
        run = TrainedRun.in_home(hand.home, tmp_path / "again", trainers=1)
        holders = [len(record.members.replicas(PartName(twice))) for record in run.records]
        assert (holders[0], holders[-1]) == (2, 1), "one was killed"
        assert differing(run, run.records) == []
        dropped = [
            event["without_room"]
            for path in hand.home.rglob("events.jsonl")
            for event in map(json.loads, path.read_text().splitlines())
            if event["kind"] == "ChoicesDropped"
        ]
        assert any(dropped), "an expert was full"
        made = hand.run("export", "--out", str(tmp_path / "model"), "--run", run.manifest.run_id[:12])
        assert made.returncode == 0, made.stderr
        measured = [
            json.loads(hand.run("eval", *which, "--json", str(text)).stdout)["loss"]
            for which in (("--run", run.manifest.run_id[:12]), ("--model", str(tmp_path / "model")))
        ]
        assert measured[0] == pytest.approx(measured[1], rel=1e-4), "transformers has the same model"
        sampled = hand.run("sample", "--model", str(tmp_path / "model"), "--prompt", "The owl", "--tokens", "4")
        assert sampled.returncode == 0, sampled.stderr
