"""Peers from Python: what is told to whom, on which thread, and how a peer's end is."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import peers
from peers.local.peer_order import ordered
from swarm.errors import ConfigError
from tests.harness.rigs.peers import HEAVY

TELLS = """
import json, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
order = sys.stdin.read()
pathlib.Path(sys.argv[1]).write_text(order)
def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)
say("RunFound", run="ab" * 32)
if '"foundation": null' not in order:
    say("Invited", invite="swarm1:theirs")
for step in (1, 2, 2, 3):
    say("StepClosed", step=step, record=f"r{step}", microbatches=step != 3, loss=1.5, tokens=8, seconds=0.5)
print("no event", 3, {}, sep="\\n")
print("what went wrong", file=sys.stderr)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
sys.exit({signal.SIGINT: 0, signal.SIGTERM: 75}[signal.sigwait({signal.SIGINT, signal.SIGTERM})])
"""
"""A peer that closes two steps, gives up a third, and ends with the code given, or leaves when it is told."""


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in of the peer's process writes what it was started with; it leaves when it is told to."""
    _stand_in(monkeypatch, tmp_path / "order")
    return tmp_path / "order"


def _stand_in(monkeypatch: pytest.MonkeyPatch, order: Path, *code: str) -> None:
    monkeypatch.setattr("peers.local.launcher.launched", lambda _: [sys.executable, "-c", TELLS, str(order), *code])


def test_import_loads_nothing_and_the_functions_nothing_heavy() -> None:
    look = "before = set(sys.modules); import peers; one = set(sys.modules) - before; peers.join; print(sorted(one), "
    look += f"sorted(set(sys.modules) & {set((*HEAVY, 'pydantic'))}))"
    told = subprocess.run([sys.executable, "-c", f"import sys, typing; {look}"], capture_output=True, text=True)
    assert told.stdout == "['peers'] []\n", told.stderr


def test_steps_are_called_back_on_the_thread_that_waits(order: Path) -> None:
    told: list[tuple[peers.Step, int]] = []
    with peers.join("swarm1:mine", data="notes", home=order.parent, port=None, max_upload="2MB") as peer:
        peer.on_step(lambda step: told.append((step, threading.get_ident())))
        peer.wait(1)
        assert [step.number for step, _ in told] == [1]
        assert (peer.invite, peer.run) == ("swarm1:mine", "ab" * 32)
        peer.leave()
    assert peer.exit_code == 0
    assert told[1] == (peers.Step(number=2, loss=1.5, tokens=8, seconds=0.5), threading.get_ident())
    assert len(told) == 2
    sent = ordered(order.read_text())
    assert (sent.options.invite, sent.options.data, sent.options.max_upload) == (("swarm1:mine",), Path("notes"), "2MB")
    assert (sent.foundation, sent.words, sent.json_lines) == (None, False, True)
    peer.wait()  # it is over


def test_founder_has_an_invite_and_leaves_in_order_where_its_block_or_a_callback_raises(order: Path) -> None:
    peer = peers.found(preset="tiny", steps=3, stages=1, home=order.parent)
    assert peer.invite == "swarm1:theirs"
    with pytest.raises(KeyError), peer:
        raise KeyError
    assert peer.exit_code == 75, "asked as SIGTERM asks"
    foundation = ordered(order.read_text()).foundation
    assert foundation is not None
    assert foundation.changes == {"run.steps": 3, "split.stages": 1}
    other = peers.join("swarm1:mine")
    other.on_step(lambda step: 1 // (2 - step.number))
    with pytest.raises(ZeroDivisionError), other:
        pass
    assert other.exit_code == 75


def test_peer_that_fails_raises_what_it_said_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stand_in(monkeypatch, tmp_path / "order", "3")
    with pytest.raises(peers.PeerFailed, match="^what went wrong$") as failed, peers.join("swarm1:mine") as peer:
        pass
    assert (failed.value.exit_code, peer.exit_code) == (3, 3)
    monkeypatch.setattr("peers.local.launcher.launched", lambda _: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(peers.PeerFailed, match="exit code 137"):
        print(peers.found(preset="tiny").invite)
    monkeypatch.setattr("peers.local.launcher.launched", lambda _: [str(tmp_path / "nothing")])
    with pytest.raises(peers.PeerFailed, match="cannot be started: .*No such file"):
        peers.join("swarm1:mine").wait()


def test_options_that_cannot_be_used_are_refused_before_anything_is_started() -> None:
    with pytest.raises(TypeError, match="no option 'max_uplod'; did you mean max_upload"):
        peers.join("swarm1:mine", max_uplod="2MB")
    with pytest.raises(TypeError, match="no option 'stage'"):
        peers.found(preset="tiny", stage=1)
    invite = "swarm1:" + 30 * "AbC-"
    with pytest.raises(ConfigError, match="run = 'swarm1:(AbC-){13}A…'") as refused:
        peers.load(invite)
    assert invite not in str(refused.value)
    with pytest.raises(ConfigError, match="--max-upload = '2'"):
        peers.join("swarm1:mine", max_upload="2")
