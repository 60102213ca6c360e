"""``swarm logs``: the lines of peers of this machine again, from the events below their home."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.home.places import take_place
from swarm.events import Event, Invited, PeerStopped, Waiting
from swarm.ids import PeerId
from swarm.monitoring.recorder import Recorder
from tests.harness.rigs.peers import PEERS, FakeClock, Typed

pytestmark = pytest.mark.usefixtures("elsewhere")


def lived(home: Path, place: str, peer: str, *told: Event) -> None:
    """Have a peer been here which told this."""
    clock = FakeClock()
    with take_place(home, place, clock=clock) as held:
        session = held.open_session(name=peer, peer=PEERS[peer], role="stage")
        recorder = Recorder(session / "events.jsonl", PeerId(PEERS[peer]), clock)
        for event in told:
            recorder.emit(event)
            clock.now += 1
        recorder.close()


def test_logs_are_the_lines_of_all_peers_or_of_one(tmp_path: Path, typed: Typed) -> None:
    home = tmp_path / "home"
    assert typed("logs").code == 3
    lived(
        home,
        "1",
        "otter",
        *(Waiting(what="a trainer"), Invited(invite="swarm1:secret"), PeerStopped(reason="ended", exit_code=0)),
    )
    lived(home, "2", "mole", Waiting(what="\x1b[2Ja host"))
    said = [json.loads(line) for line in typed("logs --json").out.splitlines()]
    assert {(one["peer"], one["line"]) for one in said} == {
        ("otter", "waiting       a trainer"), ("otter", "done          ended"), ("mole", "waiting       [2Ja host"),
    }  # fmt: skip
    assert typed("logs --peer mole").out.endswith("  mole  waiting       [2Ja host\n")
    assert len(typed("logs -n 1").out.splitlines()) == 1
    assert "secret" not in typed("logs").text
