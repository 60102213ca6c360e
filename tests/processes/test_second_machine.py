"""One run over several machines (network namespaces): joined by invite, directly and from behind NAT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.by_hand import by_hand, found
from tests.harness.namespaces import behind_nat, lan

pytestmark = [pytest.mark.root, pytest.mark.process]
ANYWHERE = "/ip4/0.0.0.0/tcp/0"


def test_run_over_four_machines_two_of_them_behind_nat(tmp_path: Path) -> None:
    """Stage hosts on an open machine and behind a NAT, the trainer behind another: those two meet through a relay."""
    with (
        lan("boot", "far") as net,
        behind_nat(net, "left"),
        behind_nat(net, "right"),
        by_hand(tmp_path, forked=False) as hand,
    ):
        prefix = {name: net.command(name, []) for name in ("boot", "far", "left", "right")}
        bootstrap, invite = found(hand, steps=4, listen=ANYWHERE, prefix=prefix["boot"])
        peers = {
            name: hand.start("join", invite, "--role", role, *stage, prefix=prefix[name], home=tmp_path / name)
            for name, role, *stage in (
                ("far", "stage", "--stage", "0"),
                ("left", "stage", "--stage", "1"),
                ("right", "trainer"),
            )
        }
        ends = {name: peer.end(deadline_s=240) for name, peer in {"boot": bootstrap, **peers}.items()}
        assert {code for code, _ in ends.values()} == {0}, ends
        how = {name: peer.events("Reachability")[0]["how"] for name, peer in peers.items()}
        assert how == {"far": "direct", "left": "relayed", "right": "relayed"}
        assert all(
            "p2p-circuit" in str(peers[name].events("Reachability")[0]["addresses"]) for name in ("left", "right")
        )
        assert len(peers["left"].events("Accumulated")) == 4 * 4


def test_doctor_on_other_machines_says_how_peers_reach_them(tmp_path: Path) -> None:
    with lan("boot", "far") as net, behind_nat(net, "left"), by_hand(tmp_path, forked=False) as hand:
        _, invite = found(hand, steps=4, listen=ANYWHERE, prefix=net.command("boot", []))

        def checks(host: str) -> tuple[int, dict[str, dict[str, Any]]]:
            command = [sys.executable, "-m", "peers.cli", "doctor", invite, "--json", "--timeout", "60"]
            ended = net.run(host, command, check=False, capture_output=True, text=True, timeout=120)
            return ended.returncode, {check["name"]: check for check in json.loads(ended.stdout)["checks"]}

        code, far = checks("far")
        assert (code, far["reachable"]["level"], far["reachable"]["facts"]["how"]) == (0, "ok", "direct"), far
        code, left = checks("left")
        assert (code, left["reachable"]["level"], left["reachable"]["facts"]["how"]) == (0, "warn", "relayed"), left
        net.unplug("left")
        code, gone = checks("left")
        assert (code, gone["contact"]["level"], "finds no way" in gone["contact"]["cause"]) == (5, "fail", True), gone
