"""An expert that stays with its owner, among real processes: its only host is killed, the others train on, and it goes
on where it was once it is started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from swarm.ids import stage_part
from tests.benchmarks._parity_run import read_history
from tests.harness.by_hand import LOCAL, ByHand, Started, by_hand
from tests.harness.expect import wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]

CODE = stage_part(1, 1, 2)
RUN = """
[run]
name = "own"
steps = 100000
copies = 1
start_when = { stage_hosts = 3, trainers = 2 }
[model]
vocab_size = 300
dim = 16
layers = 2
heads = 2
context = 16
[split]
stages = 2
variants = [1, 2]
route_by = "domain"
domains = ["law", "code"]
[batch]
microbatch_size = 2
microbatches_per_step = 4
"""


def invited(hand: ByHand, name: str, role: str, organisation: str) -> str:
    made = hand.run(
        "invite", "--for", name, "--role", role, "--organisation", organisation, "--peer", "founder", "--json"
    )
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["invites"][0]["invite"])


def waits_for_its_owner(trainer: Started) -> bool:
    said = (str(event["what"]) for event in trainer.events("Waiting"))
    return any(
        f"a host of {CODE}, which acme keeps to itself" in what and "next: acme starts one" in what for what in said
    )


def test_expert_whose_owners_host_is_killed_waits_for_it_alone_and_goes_on_from_its_disk(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with by_hand(tmp_path) as hand:
        place = ("--name", "founder", "--place", "founder", "--listen", "/ip4/127.0.0.1/tcp/0")
        hand.start("new", str(tmp_path / "run.toml"), "--own", "code=acme", "--admission", "token", *place).wait_event(
            "Invited"
        )
        homes = {"h0": "mary", "h1": "mary", "h2": "acme", "t0": "mary", "t1": "acme"}
        roles = {name: "trainer" if name[0] == "t" else "stage" for name in homes}
        invites = {name: invited(hand, name, roles[name], home) for name, home in homes.items()}

        def start(name: str, *more: str) -> Started:
            who = ("--role", roles[name], "--name", name, "--place", name, "--checkpoint-every", "1")
            return hand.start("join", invites[name], *who, *LOCAL, *more)

        foreign = hand.run("join", invites["t0"], "--role", "trainer", "--domain", "code", "--place", "t0", *LOCAL)
        assert (foreign.returncode, "acme does not keep to itself" in foreign.stderr) == (2, True), foreign.stderr
        hosts, trainers = {name: start(name) for name in ("h0", "h1", "h2")}, list[Started]()
        for number, domain in enumerate(("law", "code")):
            text = tmp_path / f"{domain}.txt"
            text.write_text("\n\n".join(f"{domain} has {n} and {7 * n}." * 6 for n in range(80)))
            trainers.append(start(f"t{number}", "--data", str(text), "--domain", domain))
        assert hosts["h2"].wait_event("PeerReady")["part"] == CODE
        trainers[0].wait_step(3)
        hosts["h2"].process.send_signal(signal.SIGKILL)
        void = int(trainers[0].wait_event("StepGivenUp", lost=[CODE])["step"])
        trainers[0].wait_step(void + 3)
        wait_until(lambda: waits_for_its_owner(trainers[1]), what="the other trainer says for whom it waits")
        again = start("h2")
        came = again.wait_event("StateDownloaded", part=CODE)
        assert (came["bytes_received"], came["step"] > 0) == (0, True)
        again.wait_event("PeerReady", part=CODE)
        last = max(int(event["step"]) for event in trainers[0].events("StepClosed"))
        trainers[1].wait_event("JourneyCompleted", step=last + 5)
        files = {path.relative_to(hand.home).parts for path in hand.home.rglob(f"{CODE}*.safetensors")}
    records = read_history(max(hand.home.rglob("history.jsonl"), key=lambda path: path.stat().st_size))
    held = {record.step: bool(record.members.replicas(CODE)) for record in records}
    assert (held[void - 1], held[void], held[void + 3], held[last + 4]) == (True, False, False, True), (
        "it fed the step after"
    )
    assert {one.choice for record in records if void < record.step <= void + 3 for one in record.committed} == {0}
    assert files, "its own host keeps checkpoints"
