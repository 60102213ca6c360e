"""A peer for each device: what each is told, and what is refused."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peers.home.places import take_place
from peers.local import siblings
from peers.local.peer_order import Company, PeerOrder, order_for, ordered
from peers.local.siblings import join_each, siblings_of
from peers.options.foundation import Foundation
from peers.options.model import PeerOptions
from peers.sharing.limit_options import Return, read_rate
from swarm.clock import SystemClock
from swarm.errors import ConfigError

OPTIONS = PeerOptions(invite=("swarm1:abc",), device="cuda:0,cuda:1")


def test_named_ports_are_counted_up_and_free_ones_stay() -> None:
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/0", "/ip4/10.0.0.1/udp/4001/quic-v1")
    _, second = siblings_of(replace(OPTIONS, listen=listen, announce=("/dns4/rig.example/tcp/4001",)))
    assert second.options.listen == ("/ip4/0.0.0.0/tcp/4002", "/ip6/::/tcp/0", "/ip4/10.0.0.1/udp/4002/quic-v1")
    assert second.options.announce == ("/dns4/rig.example/tcp/4002",)


def test_limits_of_the_machine_are_shared_out() -> None:
    limits = {"max_upload": "20mbit", "max_download": "2.5MB"}
    for count in (2, 3):
        each = siblings_of(replace(OPTIONS, device=",".join(["cpu"] * count), **limits))  # type: ignore[arg-type]
        for key, whole in limits.items():
            rates = [read_rate(getattr(one.options, key)) for one in each]
            assert 0.999 * read_rate(whole) < sum(rates) <= read_rate(whole)
    (alone,) = siblings_of(replace(OPTIONS, device="cpu", max_upload="1mbit"))
    assert alone.options.max_upload == "1mbit"
    assert siblings_of(replace(OPTIONS, max_upload="2mbit"))[1].options.max_upload == "1.000mbit"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_upload": "1.9mbit"}, "2mbit at least for 2 devices"),
        ({"device": "cuda:1,cuda:0,cuda:1"}, "each GPU once"),
        ({"device": "cuda,cuda:0"}, "each GPU once"),
        ({"device": "cpu,auto"}, "devices by name"),
        ({"device": "cuda:0+cuda:1,cuda:2+cuda:1"}, "each GPU once"),
    ],
)
def test_devices_that_cannot_each_have_a_peer_are_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        siblings_of(replace(OPTIONS, **changes))  # type: ignore[arg-type]


ANSWERS = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
order = pathlib.Path(sys.argv[1]) / f"order-{os.getpid()}"
order.write_text(sys.stdin.read())
if '"place": "device-0"' in order.read_text():
    print("it broke", file=sys.stderr)
    os.open(sys.argv[1] + "/broke", os.O_WRONLY)
    sys.exit(3)
pathlib.Path(sys.argv[1], "broke").read_bytes()
print("it runs", flush=True)
os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait({signal.SIGTERM})
print("it leaves")
"""


def test_others_go_on_when_one_breaks_and_leave_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(siblings, "launched", lambda command: [sys.executable, "-c", ANSWERS, str(tmp_path)])
    monkeypatch.setattr(siblings, "free_memory", lambda: 1001)
    os.mkfifo(tmp_path / "broke")  # read to its end when the first is gone
    before = signal.getsignal(signal.SIGTERM)
    options = replace(OPTIONS, device="cpu,cpu", stage=0, max_memory=3.5)
    assert join_each(options, tmp_path / "home", words=True, json_lines=False) == 3
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr()
    assert (said.out, said.err) == ("cpu#1 it runs\ncpu#1 it leaves\n", "cpu#0 it broke\n")
    first, second = sorted(
        (ordered(file.read_text()) for file in tmp_path.glob("order-*")), key=lambda o: o.options.place
    )
    assert (first.options, second.options) == tuple(one.options for one in siblings_of(options))
    assert (first.words, first.json_lines, second.company.host_bytes) == (True, False, 500)
    assert len({*first.company.beside, *second.company.beside}) == 2


def test_each_join_of_a_home_has_places_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str | None]] = []

    def run(found: list[siblings.Sibling], home: Path, back: None, **_: bool) -> int:
        ran.append([one.options.place for one in found])
        if len(ran) < 3:  # while the places of this one are chosen, but not taken yet
            join_each(options, home, words=False, json_lines=False)
        return 0

    monkeypatch.setattr(siblings, "_run_each", run)
    options = replace(OPTIONS, device="cpu,cpu")
    with take_place(tmp_path, "device-2", clock=SystemClock()):
        join_each(options, tmp_path, words=False, json_lines=False)
    join_each(options, tmp_path, words=False, json_lines=False)
    join_each(replace(options, place="lab"), tmp_path, words=False, json_lines=False)
    assert ran == [
        ["device-0", "device-1"],
        ["device-3", "device-4"],
        ["device-5", "device-6"],
        ["device-0", "device-1"],
        ["lab-0", "lab-1"],
    ]


def test_options_reach_the_other_process_as_they_are() -> None:
    options = replace(OPTIONS, listen=("/ip4/0.0.0.0/tcp/1",), max_memory=3.5, stage=0)
    company = Company(beside=("abc",), host_bytes=7)
    back = Return(keeper=7, reason="battery", seconds=1.5)
    for order in (
        PeerOrder(options=options, company=company, words=False, json_lines=True),
        PeerOrder(
            options=options, back=back, foundation=Foundation(preset="tiny", stages=2), words=True, json_lines=False
        ),
    ):
        assert ordered(order_for(order)) == order
