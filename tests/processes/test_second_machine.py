"""One run over several machines (network namespaces): joined by invite, directly and from behind NAT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.by_hand import ByHand, Started, by_hand, found
from tests.harness.expect import LONG_S, wait_until
from tests.harness.namespaces import Net, behind_nat, lan

pytestmark = [pytest.mark.root, pytest.mark.process]
ANYWHERE = "/ip4/0.0.0.0/tcp/0"
AWAY_S = 20.0
"""A way that is away for ten minutes is a story of `swarms/test_returning.py`."""


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
        ends = {name: peer.end() for name, peer in {"boot": bootstrap, **peers}.items()}
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
            ended = net.run(host, command, check=False, capture_output=True, text=True, timeout=LONG_S)
            return ended.returncode, {check["name"]: check for check in json.loads(ended.stdout)["checks"]}

        code, far = checks("far")
        assert (code, far["reachable"]["level"], far["reachable"]["facts"]["how"]) == (0, "ok", "direct"), far
        code, left = checks("left")
        assert (code, left["reachable"]["level"], left["reachable"]["facts"]["how"]) == (0, "warn", "relayed"), left
        net.unplug("left")
        code, gone = checks("left")
        assert (code, gone["contact"]["level"], "finds no way" in gone["contact"]["cause"]) == (5, "fail", True), gone


def relay_on(hand: ByHand, net: Net, host: str, *options: str) -> tuple[Started, str]:
    """A relay on a host, in a home of its own: (its process, the address that it prints)."""
    home = hand.home.with_name(host)
    relay = hand.start("relay", *options, prefix=net.command(host, []), home=home)
    return relay, str(relay.wait_event("PeerStarted", role="relay")["addresses"][0])


def standing(hand: ByHand, net: Net, host: str, home: Path) -> dict[str, Any]:
    """What ``swarm status --json`` says of the one peer of a home."""
    command = [sys.executable, "-m", "peers.cli", "status", "--json", "--home", str(home)]
    seen = json.loads(net.run(host, command, timeout=LONG_S).stdout)["places"]
    found: dict[str, Any] = seen[0]["standing"]
    return found


def test_founder_behind_nat_is_joined_from_behind_others_through_relays(tmp_path: Path) -> None:
    """The trainer is next to the founder. One relay of two is killed, then the other; for a while nobody reaches
    another home. No microbatch is lost or counted twice, and nobody ends."""
    steps = 80
    with (
        lan("pub", "second") as net,
        behind_nat(net, "home"),
        behind_nat(net, "left"),
        behind_nat(net, "right"),
        by_hand(tmp_path, forked=False) as hand,
    ):
        relay, at = relay_on(hand, net, "pub")
        assert at.startswith(f"/ip4/{net.address('pub')}/tcp/4001/p2p/")
        other, at_other = relay_on(hand, net, "second")
        founder, invite = found(
            hand, steps=steps, listen=ANYWHERE, prefix=net.command("home", []), through=(at, at_other)
        )
        told = founder.wait_event("Reachability")
        assert (told["how"], len(relays_of(told))) == ("relayed", 2), told
        peers = [
            hand.start("join", invite, "--role", role, *stage, prefix=net.command(host, []), home=tmp_path / name)
            for name, host, role, *stage in (
                ("a", "left", "stage", "--stage", "0"),
                ("b", "right", "stage", "--stage", "1"),
                ("t", "home", "trainer"),
            )
        ]
        told = peers[-1].wait_event("Reachability")
        assert told["how"] == "relayed", "the founder on its machine is no witness that others can call it"
        founder.wait_step(3)
        served = standing(hand, net, "pub", tmp_path / "pub")["relaying"]
        assert (served["slots"], served["runs"]) == (4, 1), served
        relay.process.kill()
        relay.process.wait(LONG_S)
        left_one = [at_other.rpartition("/")[2]]
        wait_until(lambda: relays_of(founder.events("Reachability")[-1]) == left_one, what="one relay less")
        other.process.kill()
        other.process.wait(LONG_S)
        lost = [peer.wait_event("PeerLost")["t"] for peer in peers]
        wait_until(
            lambda: all(peer.events()[-1]["t"] > since + AWAY_S for peer, since in zip(peers, lost, strict=True)),
            what="a while without a relay",
        )
        assert [peer.process.poll() for peer in (founder, *peers)] == [None] * 4
        (again, same), (other, _) = (relay_on(hand, net, host) for host in ("pub", "second"))
        assert same == at, "its key is in its home, so its address stays"
        ends = [peer.end() for peer in peers]
        assert {code for code, _ in ends} == {0}, ends
        code, why = (
            founder.end()
        )  # it holds nothing, so that it is not waited for: maybe the run was over before it was back
        assert (code, why) == (0, ends[0][1]) or "the run is over" in why, why
        closed = {event["step"]: event["microbatches"] for peer in peers for event in peer.events("StepClosed")}
        assert closed == dict.fromkeys(range(1, steps + 1), 4), "none lost, none counted twice"
        for left in (again, other):
            left.process.terminate()
            assert left.end()[0] == 75
        passed_on = [event["relayed_bytes"] for each in (again, other) for event in each.events("RelayServing")[-1:]]
        assert max(passed_on) > 100_000, "the way between the homes leads through it"


def relays_of(event: dict[str, Any]) -> list[str]:
    """The relays that a ``Reachability`` event names."""
    through, _, _ = str(event["detail"]).partition(": ")
    return through.removeprefix("through ").split(", ") if event["how"] == "relayed" else []


def test_relay_that_is_full_or_gone_is_said_with_what_to_do(tmp_path: Path) -> None:
    with lan("pub") as net, behind_nat(net, "home"), by_hand(tmp_path, forked=False) as hand:
        relay, at = relay_on(hand, net, "pub", "--slots", "1")
        founder, _ = found(hand, steps=4, listen=ANYWHERE, prefix=net.command("home", []), through=(at,))
        other = hand.start(
            "new", str(tmp_path / "run.toml"), "--through", at, prefix=net.command("home", []), home=tmp_path / "o"
        )
        full = other.wait_event("Reachability")
        assert full["how"] == "outgoing", full
        assert "serves 1 peers already" in full["detail"], full

        def new(at: str) -> tuple[int, str]:
            words = ["new", "--preset", "tiny", "--through", at, "--home", str(tmp_path / "n")]
            command = [sys.executable, "-m", "peers.cli", *words]
            ended = net.run("home", command, check=False, timeout=LONG_S)
            return ended.returncode, ended.stderr

        peer = at.rpartition("/")[2]
        code, said = new(f"/dns4/relay.invalid/tcp/4001/p2p/{peer}")
        assert (code, "getent hosts relay.invalid" in said) == (3, True), said
        code, said = new(at.replace("/tcp/4001/", "/tcp/4002/"))
        assert (code, "no relay listens at that port" in said) == (3, True), said
        code, said = new(at.replace(peer, str(founder.events("PeerStarted")[0]["peer"])))
        assert (code, "who listens there has another id" in said) == (3, True), said
        relay.process.terminate()
        assert relay.end()[0] == 75
        founder.wait_event("Reachability", how="outgoing")
