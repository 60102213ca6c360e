"""Whom a peer asks that comes back and finds its invite's contacts gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.cli.app import run
from peers.commands.history_source import acquaintances, remembered
from peers.home.places import Tenant, take_place
from peers.invites.invite import Invite
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.consensus.roster import Roster
from swarm.ids import PeerId
from swarm.network.libp2p.identity import load_or_create
from tests.harness.rigs.peers import PEERS, RUN, DecidedChain, roster, write

OWN = PEERS["heron"]


def address(peer: PeerId, port: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{port}/p2p/{peer}"


def members(*names: str) -> Roster:
    """Each with two addresses."""
    return Roster(
        member.model_copy(update={"addresses": (address(member.peer, 1), address(member.peer, 2))})
        for member in roster(*names).members
    )


def remember(session: Path, *names: str) -> None:
    """A history that ends with these."""
    chain = DecidedChain().found().close(roster=members(*names).members)
    write(session / "history.jsonl", chain.lines, torn=b'{"torn')


def test_others_of_the_newest_record_come_one_address_of_each_first(tmp_path: Path) -> None:
    remember(tmp_path / "sessions" / f"20260101-{RUN[:8]}", "otter", "heron")
    remember(tmp_path / "sessions" / f"20260102-{RUN[:8]}", "otter", "mole", "heron")
    (tmp_path / "sessions" / f"20260103-{RUN[:8]}").mkdir()
    others = sorted(peer for name, peer in PEERS.items() if name in ("otter", "mole"))
    known = acquaintances(tmp_path, RUN, OWN)
    assert sorted(known[:2]) == [address(peer, 1) for peer in others]
    assert sorted(known[2:]) == [address(peer, 2) for peer in others]


def test_newest_record_is_found_behind_what_cannot_be_read_and_in_a_long_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "sessions" / f"20260101-{RUN[:8]}"
    remember(session, "otter", "heron")
    file = session / "history.jsonl"
    with file.open("ab") as end:
        end.write(b' of a record"}\n{"torn')
    found = [remembered(tmp_path, RUN, OWN)]
    remember(session, "otter", "heron")
    monkeypatch.setattr("peers.commands.history_source._TAIL_BYTES", 100)
    found.append(remembered(tmp_path, RUN, OWN))
    assert [(one.step, one.names) for one in found if one is not None] == [(1, ("otter",))] * 2


def test_join_in_a_place_that_knows_the_run_asks_those_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[PeerSettings] = []

    def run_peer(settings: PeerSettings) -> int:
        started.append(settings)
        return 0

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    home = tmp_path / "home"
    with take_place(home, clock=SystemClock(), tenant=Tenant(run=RUN, role="stage")) as place:
        peer = load_or_create(place.identity).peer
        remember(place.open_session(name="me", peer=peer, role="stage", run=RUN, run_name="tiny"), "otter", "mole")
    gone = address(PEERS["vole"], 9)
    run(["join", Invite(run=RUN, name="tiny", at=(gone,)).text(), "--role", "stage", "--home", str(home)])
    assert started[0].bootstrap[0] == gone
    assert {address(PEERS["otter"], 1), address(PEERS["mole"], 1)} < set(started[0].bootstrap)
