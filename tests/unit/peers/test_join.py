from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_shards.build import build_shard
from data_shards.tokenize import train_tokenizer
from peers.cli.app import run
from peers.commands.join import _checked_role
from peers.commands.preflight import check_listen
from peers.console import interrupt
from peers.exit_codes import EXIT_DRAINED, EXIT_INCOMPATIBLE, EXIT_OK, EXIT_USAGE
from peers.home.last_events import last_event
from peers.home.places import read_state, take_place
from peers.invites.invite import Contacts, Granted, Invite
from peers.options.model import PeerOptions
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.security.credentials import Grant, sign_grant
from swarm.security.signing import PrivateIdentity
from tests.harness.rigs.peers import Typed

PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}"
RUN = RunId("ab" * 32)
INVITE = Invite(run=RUN, name="mine", at=(ADDRESS,)).text()
TEXT = "Some text of one's own. " * 40


def write_events(settings: PeerSettings, *events: dict[str, Any]) -> None:
    (settings.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PeerSettings]:
    """What peers were started with; each writes its last events and ends well."""
    found: list[PeerSettings] = []

    def run_peer(settings: PeerSettings) -> int:
        found.append(settings)
        stopped = {"kind": "PeerStopped", "reason": "the last step is closed", "exit_code": 0}
        write_events(settings, {"kind": "RunFound", "run": RUN, "name": "mine"}, stopped)
        return 0

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    return found


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_join_by_invite_hosts_a_stage_in_the_first_free_place(
    tmp_path: Path, started: list[PeerSettings], typed: Typed
) -> None:
    said = typed("join", INVITE, "--home", tmp_path)
    assert said.code == EXIT_OK
    (settings,) = started
    assert (settings.role, settings.bootstrap, settings.run) == ("stage", (ADDRESS,), RUN)
    assert settings.identity == tmp_path / "1" / "identity.key"
    assert settings.home.parent == tmp_path / "1" / "sessions"
    assert settings.control == tmp_path / "1" / "control.sock"
    assert settings.verbose
    assert "joins mine as a stage host" in said.out
    assert f"(new: {tmp_path}/1/identity.key)" in said.out
    assert "(known: " in typed("join", INVITE, "--home", tmp_path).out
    with take_place(tmp_path, clock=SystemClock()):
        typed("join", INVITE, "--home", tmp_path)
    assert [(one.options.device, one.turn) for one in started] == [("auto", 0), ("auto", 0), ("auto", 1)]


def test_join_to_train_says_what_on_and_as_json_nothing_but_events(
    tmp_path: Path, started: list[PeerSettings], typed: Typed
) -> None:
    (tmp_path / "mine.txt").write_text(TEXT)
    home = ("--home", tmp_path / "home")
    said = typed("join", INVITE, "--data", tmp_path / "mine.txt", *home, "--name", "kim")
    assert (said.code, "1 text file, 960 characters" in said.out) == (EXIT_OK, True)
    assert "comes with Python" in typed("join", INVITE, "--role", "trainer", *home).out
    assert typed("join", INVITE, "--json", *home).out == ""
    assert [(one.role, one.options.data) for one in started] == [
        ("trainer", tmp_path / "mine.txt"), ("trainer", None), ("stage", None),
    ]  # fmt: skip
    assert started[0].name == "kim"
    assert [(one.json_lines, one.verbose) for one in started[1:]] == [(False, True), (True, False)]


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    interrupt.install()
    yield
    interrupt.install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_join_signal_beside_the_peer_s_loop_does_not_keep_its_end_from_being_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: None, number: signal.Signals
) -> None:
    def run_peer(settings: PeerSettings) -> int:
        os.kill(os.getpid(), number)
        return 75

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    assert run(["join", INVITE, "-q", "--home", str(tmp_path)]) == 75
    state = read_state(tmp_path / "1")
    assert state is not None
    assert state.end is not None
    assert state.end.exit_code == 75
    assert interrupt.received() is not None


def test_join_bad_input_is_refused_before_anything_is_made(
    tmp_path: Path, taken: int, started: list[PeerSettings], typed: Typed, snapshot: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    build_shard(tmp_path / "torn", [TEXT], train_tokenizer([TEXT], 300))
    (tmp_path / "torn" / "tokens.bin").write_bytes(b"\0\0")
    cases = (
        "", "swarm1:abc", "/ip4/192.0.2.7/tcp/31337", f"/ip4/192.0.2.7/tcp/1/ws/p2p/{PEER}",
        "INVITE --data TMP/nothing", "INVITE --data TMP/empty", "INVITE --data TMP/empty.txt",
        "INVITE --data TMP/empty.txt --role stage", "INVITE --stage 1 --role trainer", "INVITE --data TMP/torn",
        "INVITE --device tpu", "INVITE --device cpu+cuda", "INVITE --device cpu+auto", "INVITE --device cuda:1+cuda:1",
        "INVITE --device cpu+cpu --role trainer", "INVITE --checkpoints /proc/nope/{run}",
        f"INVITE --listen /ip4/127.0.0.1/tcp/{taken}", "INVITE --region Here!", "INVITE --threads 0",
        "INVITE --place name!",
    )  # fmt: skip
    refused = [
        typed("join", *(word.replace("INVITE", INVITE).replace("TMP", str(tmp_path)) for word in words.split()),
              "--home", tmp_path / "home")
        for words in cases
    ]  # fmt: skip
    assert {one.code for one in refused} == {EXIT_USAGE}
    assert all("next:" in one.err for one in refused)
    told = [text for words, one in zip(cases, refused, strict=True) for text in (f"join {words}", one.err)]
    assert "\n".join(told).replace(str(taken), "PORT") == snapshot
    assert started == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("wire", [1, 3])
def test_join_invite_of_another_version_is_incompatible(
    wire: int, tmp_path: Path, typed: Typed, snapshot: Any, started: list[PeerSettings]
) -> None:
    said = typed("join", Invite(run=RUN, name="mine", at=(ADDRESS,), wire=wire).text(), "--home", tmp_path)
    assert said.code == EXIT_INCOMPATIBLE
    assert said.err == snapshot
    assert started == []


def test_join_a_run_that_ended_here_says_so_and_calls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    lives = iter([(True, 0), (False, 3)])

    def run_peer(settings: PeerSettings) -> int:
        closed, code = next(lives)
        events: list[dict[str, object]] = [{"kind": "RunFound", "run": RUN, "name": "mine", "steps": 6}]
        events += [{"kind": "StepClosed", "step": step} for step in (5, 6)] if closed else []
        write_events(settings, *events)
        return code

    monkeypatch.setattr("peers.node.run_peer", run_peer)

    def join(place: str, invite: str = INVITE) -> tuple[int, bool]:
        said = typed("join", invite, "--place", place, "--home", tmp_path)
        return said.code, "note: this run ended here at step 6, its last" in said.err

    assert [join(place) for place in ("a", "a", "b", "a")] == [(0, False), (0, True), (0, True), (0, True)]
    assert join("b", Invite(run=RunId("cd" * 32), name="other", at=(ADDRESS,)).text()) == (3, False)


def test_join_a_run_whose_last_steps_are_done_again_here_dials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dialled: list[PeerSettings] = []

    def run_peer(settings: PeerSettings) -> int:
        dialled.append(settings)
        found = {"kind": "RunFound", "run": RUN, "name": "mine", "steps": 6}
        write_events(settings, found, {"kind": "StepClosed", "step": 6})
        return 0

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    join = ["join", INVITE, "--home", str(tmp_path), "--place"]
    assert run([*join, "a"]) == 0
    with take_place(tmp_path, "founder", clock=SystemClock()) as founder:
        founder.open_session(name="founder", peer=PEER, role="bootstrap", run=RUN)
        assert run([*join, "b"]) == 0
        assert "ended here" not in capsys.readouterr().err
    assert run([*join, "c"]) == 0
    assert "note: this run ended here at step 6, its last" in capsys.readouterr().err
    assert len(dialled) == 2


def test_join_a_run_that_was_ended_in_order_says_so_and_dials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody may have gone on with it: with the same invite, when its port is the same."""

    def run_peer(settings: PeerSettings) -> int:
        write_events(settings, {"kind": "StepClosed", "step": 5, "ended": True})
        return EXIT_DRAINED

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    assert run(["join", INVITE, "--home", str(tmp_path)]) == EXIT_DRAINED
    assert "the run was ended" not in capsys.readouterr().out
    assert run(["join", INVITE, "--home", str(tmp_path)]) == EXIT_DRAINED
    told = "the run was ended with step 5, as a peer here saw: somebody must have gone on with it ("
    assert told in capsys.readouterr().out


# --- ports -----------------------------------------------------------------------------------------------------------


def test_check_listen_taken_port_names_who_has_it_and_the_way_out(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}") as caught:
        check_listen([f"/ip4/0.0.0.0/tcp/{taken}"])
    assert "--listen /ip4/0.0.0.0/tcp/0" in caught.value.remedy


def test_check_listen_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="of this machine"):
        check_listen(["/ip4/203.0.113.9/tcp/0"])


def test_last_event_passes_over_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "A", "n": 1}\n{"kind": "A", "n": 2}\n{"kind": "B"}\n{"ki')
    assert last_event(path, "A") == {"kind": "A", "n": 2}
    assert last_event(path, "A", whole=True) == {"kind": "A", "n": 2}
    assert last_event(tmp_path / "none", "A") is None


@pytest.mark.parametrize(
    ("granted", "said", "blamed", "next_"),
    [
        ("trainer", {"role": "stage"}, "--role", "--role trainer --data TEXT"),
        ("trainer", {}, "INVITE", "--role trainer --data TEXT"),
        ("stage", {"role": "trainer"}, "--role", "--role stage"),
        ("stage", {"data": Path("notes")}, "--data", "--role stage"),
        ("observer", {}, "INVITE", "dashboard"),
    ],
)
def test_invite_for_another_role_is_refused_before_anybody_is_dialled(
    granted: Any, said: Any, blamed: str, next_: str
) -> None:
    issuer, key = PrivateIdentity(bytes(32)), PrivateIdentity(bytes([1]) * 32)
    grant = Grant(run="ab" * 32, serial="0" * 16, name="ana", role=granted, until_step=9, key=key.peer)
    contacts = Contacts(addresses=(), granted=Granted(grant=sign_grant(grant, issuer)))
    with pytest.raises(ConfigError, match=next_) as refused:
        _checked_role(contacts, PeerOptions(**said))
    assert refused.value.key == blamed
    if granted != "observer":
        assert _checked_role(contacts, PeerOptions(role=granted)) == granted
