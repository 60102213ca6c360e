"""A run started terminal by terminal: peers join it while it runs and leave it in order, the founder too."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.harness.by_hand import LOCAL, by_hand, digests_differ, found, some_text
from tests.harness.expect import wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_run_by_hand_late_join_drain_and_signals(tmp_path: Path) -> None:
    text = some_text(tmp_path)
    with by_hand(tmp_path, forked=False) as hand:
        bootstrap, invite = found(hand, steps=100_000)
        hosts = [hand.start("join", invite, "--role", "stage", *LOCAL) for _ in range(2)]
        trainer = hand.start("join", invite, "--role", "auto", "--data", str(text), *LOCAL)
        trainer.wait_step(2)
        assert trainer.wait_event("PeerReady")["part"] == "ends"

        late = hand.start("join", invite, *LOCAL)  # auto without data: a stage
        assigned = late.wait_event("PartAssigned")
        assert assigned["part"] in ("stage-0", "stage-1")
        assert "fewest replicas" in assigned["reason"]
        ready = late.wait_event("PeerReady")
        assert ready["step"] >= 2
        late.wait_step(ready["step"] + 2)
        assert any(event["part"] == assigned["part"] for event in late.events("Accumulated")), "it was given no work"

        status = json.loads(hand.run("status", "--json").stdout)
        standings = [place["standing"] for place in status["places"]]
        assert {standing["role"] for standing in standings} == {"bootstrap", "stage", "trainer"}
        name = next(s["name"] for s in standings if s["peer"] == late.events("PeerReady")[0]["peer"])

        drained = hand.run("drain", "--peer", name)
        assert drained.returncode == 0, drained.stderr
        assert late.end()[0] == 0
        assert "left in order" in late.end()[1]

        # The founder leaves; any peer in the run can invite to it.
        bootstrap.process.send_signal(signal.SIGINT)
        assert bootstrap.end()[0] == 0
        place = next(p for p, s in zip(status["places"], standings, strict=True) if s["role"] == "trainer")["place"]
        second_invite = hand.run("invite", "--peer", place).stdout.strip()
        successor = hand.start("join", second_invite, "--role", "trainer", *LOCAL)
        step = successor.wait_event("PeerReady")["step"]
        successor.wait_step(step + 2)
        trainer.process.send_signal(signal.SIGTERM)
        code, reason = trainer.end()
        assert (code, "left in order" in reason) == (75, True)
        successor.wait_step(step + 5)

        # The only trainer cannot be spared: it says so, and a second Ctrl-C ends it all the same.
        successor.process.send_signal(signal.SIGINT)
        successor.wait_event(
            "Waiting",
            what="it holds the only replica of ends: another must join first (swarm join INVITE --role trainer), "
            "or all be asked to leave, which ends the run in order",
        )
        successor.process.send_signal(signal.SIGINT)
        assert successor.end()[0] == 130
        # Nobody else ends with it: who is left waits for somebody to hold its part again.
        for host in hosts:
            host.wait_event("PeerLost", reason="was stopped by Ctrl-C, twice")
            wait_until(lambda host=host: "a replica of ends" in host.events("Waiting")[-1]["what"], what="the wait")
            assert host.process.poll() is None
    assert not digests_differ([bootstrap, *hosts, trainer, late, successor])
