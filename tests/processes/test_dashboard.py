"""A dashboard of a real run: served by a member, and by an observer that holds nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.harness.by_hand import LOCAL, RUN, ByHand, by_hand
from tests.harness.expect import LONG_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]


def state(url: str) -> dict[str, Any]:
    """What a dashboard shows."""
    with urllib.request.urlopen(f"{url}api/v1/state", timeout=LONG_S) as answer:
        return dict(json.load(answer))


def shows(url: str, step: int) -> dict[str, Any]:
    """What it shows once it has seen a step, and each of the members has said how it is."""

    def look() -> dict[str, Any] | None:
        seen = state(url)
        told = [peer["busy"] is not None for peer in seen["peers"].values() if peer["here"]]
        return seen if seen["step"] >= step and told and all(told) else None

    found = wait_until(look, what=f"step {step} on the dashboard")
    assert found is not None
    return found


def observer(hand: ByHand, invite: str) -> tuple[subprocess.Popen[str], str]:
    """``swarm dashboard INVITE``, and its address."""
    command = [sys.executable, "-m", "peers.cli", "dashboard", invite, "--listen", "0"]
    environment = os.environ | {"SWARM_HOME": str(hand.home.parent / "nobody")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[1]


def test_members_and_observers_serve_the_run_and_end_at_once(tmp_path: Path) -> None:
    with by_hand(tmp_path) as hand:
        manifest = tmp_path / "run.toml"
        manifest.write_text(RUN.format(steps=100_000))
        founder = hand.start("new", str(manifest), *LOCAL, "--dashboard", "0")
        invite = str(founder.wait_event("Invited")["invite"])
        served = founder.wait_event("DashboardServed")
        assert served["token"] == ""
        hosts = [hand.start("join", invite, "--role", "stage", *LOCAL) for _ in range(2)]
        trainer = hand.start("join", invite, "--role", "trainer", *LOCAL)
        trainer.wait_step(2)

        own = shows(served["address"], 3)
        assert (own["state"], own["members"], own["run"]["name"]) == ("training", 4, "hand")
        assert [part["part"] for part in own["parts"]] == ["ends", "stage-0", "stage-1"]
        assert sum(peer["trained_microbatches"] for peer in own["peers"].values()) == 4 * own["step"]
        assert own["links"], "nothing is said of links"
        assert "/ip4/" not in json.dumps(own)

        process, url = observer(hand, invite)
        try:
            seen = shows(url, own["step"] + 2)
            assert (seen["source"]["kind"], seen["members"]) == ("observer", 4)
            hosts[0].process.send_signal(signal.SIGKILL)
            wait_until(
                lambda: any(one["state"] in ("away", "lost") for one in state(url)["peers"].values()),
                what="that one cannot be reached",
            )
            wait_until(
                lambda: any(one["what"] in ("silent", "lost") for one in state(url)["churn"]),
                what="that it is told",
            )
            port = int(url.rstrip("/").rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as stream:
                stream.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                assert b"200 OK" in stream.recv(1000)
                process.send_signal(signal.SIGTERM)
                assert process.wait(LONG_S) == 143
                while stream.recv(1 << 16):
                    pass
        finally:
            process.kill()
            process.communicate()
