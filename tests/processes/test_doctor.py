"""``swarm doctor`` beside a real swarm: it sees the run as one who joins, and leaves nothing there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from peers.exit_codes import EXIT_OK
from tests.harness.by_hand import LOCAL, by_hand, found

pytestmark = [pytest.mark.process, pytest.mark.long]
LABELS = {
    "python", "torch", "memory", "disk", "open files", "device", "port", "invite", "contact", "computes", "run",
    "parts", "round trip", "clock", "bandwidth", "reachable", "speed", "worth it",
}  # fmt: skip


def test_doctor_of_a_live_run_says_that_this_machine_can_join_and_joins_nothing(tmp_path: Path) -> None:
    with by_hand(tmp_path) as hand:
        _, invite = found(hand, steps=100_000)
        words = hand.run("doctor", invite, *LOCAL, "--timeout", "600")
        assert words.returncode == EXIT_OK, words.stdout
        assert "has not begun: 0 of 2 stage hosts and 0 of 1 trainers are here" in words.stdout
        assert words.stdout.splitlines()[-1].startswith("this machine can join"), words.stdout

        for _ in range(2):
            hand.start("join", invite, "--role", "stage", *LOCAL)
        trainer = hand.start("join", invite, "--role", "trainer", *LOCAL)
        trainer.wait_step(2)
        ended = hand.run("doctor", invite, *LOCAL, "--json", "--timeout", "600")
        assert ended.returncode == EXIT_OK, ended.stdout
        document = json.loads(ended.stdout)
        checks = {check["name"]: check for check in document["checks"]}
        assert (document["ok"], set(checks)) == (True, LABELS)
        assert {name for name, check in checks.items() if check["level"] == "skipped"} == set()
        assert checks["run"]["facts"]["peers"] == 4
        assert checks["clock"]["facts"]["peers"] == 4
        assert abs(checks["clock"]["facts"]["offset_s"]) < 3
        assert checks["bandwidth"]["facts"]["up"] > 0
        assert checks["reachable"]["facts"]["how"] == "local"
        assert set(checks["parts"]["facts"]["parts"]) == {"stage-0", "stage-1", "ends"}
        assert checks["worth it"]["facts"]["step_s"] > 0

        trainer.wait_step(trainer.events("StepClosed")[-1]["step"] + 2)
        members = json.loads(hand.run("peers", "--json").stdout)["peers"]
        assert len(members) == 4, "the guest is no member"
    assert list(Path(tempfile.gettempdir()).glob("swarm-doctor-*")) == []
