"""Stages with variants among real processes: trainers join by domain, a host is killed, each path is a model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from swarm.ids import stage_part
from tests.benchmarks._parity_run import TrainedRun
from tests.harness.by_hand import LOCAL, by_hand
from tests.properties.test_parity import differing

pytestmark = [pytest.mark.process, pytest.mark.long]

STEPS, CODE = 40, stage_part(1, 1, 2)
DOMAINS = {"law": "The party of the first part shall, ", "code": "for (i = 0; i < n; i++) { x[i] += "}
RUN = f"""
[run]
name = "hand"
steps = {STEPS}
reproducible = true
copies = 0
start_when = {{ stage_hosts = 6, trainers = 2 }}
[model]
vocab_size = 300
dim = 16
layers = 2
heads = 2
context = 16
[split]
stages = 2
ends = "hosted"
variants = [1, 2]
route_by = "domain"
domains = ["law", "code"]
[batch]
microbatch_size = 2
microbatches_per_step = 4
"""


def test_each_variant_has_the_bits_of_one_process_on_its_rows_though_a_host_of_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(tmp_path / "run.toml"), "--listen", "/ip4/127.0.0.1/tcp/0")
        invite = str(founder.wait_event("Invited")["invite"])
        of_code = [("--domain", "code")] * 2 + [()] * 4
        hosts = [hand.start("join", invite, "--role", "stage", *domain, *LOCAL) for domain in of_code]
        stranger = hand.run("join", invite, "--role", "trainer", "--domain", "poems", *LOCAL)
        assert (stranger.returncode, "one of law, code" in stranger.stderr) == (2, True), stranger.stderr
        trainers = []
        for number, (domain, words) in enumerate(DOMAINS.items()):
            text = tmp_path / f"{domain}.txt"
            text.write_text("\n\n".join(f"{words}{n} and {7 * n}." * 6 for n in range(80)))
            who = ("--name", f"trainer-{number}", "--place", f"t{number}", "--domain", domain)
            trainers.append(hand.start("join", invite, "--role", "trainer", "--data", str(text), *who, *LOCAL))
        code = [host for host in hosts if host.wait_event("PeerReady")["part"] == CODE]
        assert code == hosts[:2], "who says a domain holds its expert"
        trainers[1].wait_step(3)
        code[0].process.send_signal(signal.SIGKILL)
        assert [one.end()[0] for one in (founder, *trainers)] == [0, 0, 0]
        trained = TrainedRun.in_home(hand.home, tmp_path / "again", trainers=2)
        code_hosts = [record.members.replicas(CODE) for record in trained.records]
        assert (len(code_hosts[0]), len(code_hosts[-1])) == (2, 1), "one was killed"
        assert differing(trained, trained.records) == []
        run = ("--run", trained.manifest.run_id[:12])
        for domain in DOMAINS:
            made = hand.run("export", "--out", str(tmp_path / domain), "--path", domain, *run)
            assert made.returncode == 0, made.stderr
        unsaid = hand.run("export", "--out", str(tmp_path / "any"), *run)
        assert (unsaid.returncode, "one of law, code" in unsaid.stderr) == (2, True)
    first, second = (
        [(tmp_path / domain / f"model-0000{part}-of-00002.safetensors").read_bytes() for domain in DOMAINS]
        for part in (1, 2)
    )
    assert first[0] == first[1], "both paths share the first stage"
    assert second[0] != second[1]
