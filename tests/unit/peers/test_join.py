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
from peers.commands.preflight import check_checkpoints, check_listen
from peers.console import interrupt
from peers.exit_codes import EXIT_DRAINED, EXIT_INCOMPATIBLE, EXIT_OK, EXIT_USAGE
from peers.home.last_events import last_event
from peers.home.place_state import read_state
from peers.home.places import take_place
from peers.invites.invite import Contacts, Granted, Invite
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.security.credentials import Grant, sign_grant
from swarm.security.signing import PrivateIdentity

PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}"
RUN = RunId("ab" * 32)
INVITE = Invite(run=RUN, name="mine", at=(ADDRESS,)).text()
TEXT = "Some text of one's own. " * 40


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PeerSettings]:
    """What peers were started with; each writes its last events and ends well."""
    found: list[PeerSettings] = []

    def run_peer(settings: PeerSettings) -> int:
        found.append(settings)
        events = [
            {"kind": "RunFound", "run": RUN, "name": "mine"},
            {"kind": "PeerStopped", "reason": "the last step is closed", "exit_code": 0},
        ]
        (settings.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
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
    tmp_path: Path, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", INVITE, "--home", str(tmp_path)]) == EXIT_OK
    (settings,) = started
    assert (settings.role, settings.bootstrap, settings.run) == ("stage", (ADDRESS,), RUN)
    assert settings.identity == tmp_path / "1" / "identity.key"
    assert settings.home.parent == tmp_path / "1" / "sessions"
    assert settings.control == tmp_path / "1" / "control.sock"
    assert settings.verbose
    out = capsys.readouterr().out
    assert "joins mine as a stage host" in out
    assert f"(new: {tmp_path}/1/identity.key)" in out
    assert run(["join", INVITE, "--home", str(tmp_path)]) == EXIT_OK
    assert "(known: " in capsys.readouterr().out


def test_join_notes_in_its_place_what_it_joined_and_how_it_ended(tmp_path: Path, started: list[PeerSettings]) -> None:
    assert run(["join", ADDRESS, "--home", str(tmp_path), "--quiet"]) == EXIT_OK
    state = read_state(tmp_path / "1")
    assert state is not None
    assert (state.run, state.run_name, state.role) == (RUN, "mine", "stage")
    assert state.end is not None
    assert (state.end.reason, state.end.exit_code) == ("the last step is closed", 0)
    assert started[0].run is None


def test_join_with_data_trains_and_says_what_it_found(
    tmp_path: Path, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text(TEXT)
    arguments = ["--data", str(tmp_path / "mine.txt"), "--home", str(tmp_path / "home"), "--name", "kim"]
    assert run(["join", INVITE, *arguments]) == EXIT_OK
    assert (started[0].role, started[0].options.data, started[0].name) == ("trainer", tmp_path / "mine.txt", "kim")
    assert "1 text file, 960 characters" in capsys.readouterr().out


def test_join_trainer_without_data_is_told_what_it_trains_on(
    tmp_path: Path, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", INVITE, "--role", "trainer", "--home", str(tmp_path)]) == EXIT_OK
    assert (started[0].role, started[0].options.data) == ("trainer", None)
    assert "comes with Python" in capsys.readouterr().out


def test_join_json_prints_nothing_but_events(
    tmp_path: Path, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", INVITE, "--json", "--home", str(tmp_path)]) == EXIT_OK
    assert (started[0].json_lines, started[0].verbose) == (True, False)
    assert capsys.readouterr().out == ""


def test_join_takes_its_settings_from_the_environment(
    tmp_path: Path, started: list[PeerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_INVITE", INVITE)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    monkeypatch.setenv("SWARM_PLACE", "mine")
    monkeypatch.setenv("SWARM_GRACE", "5")
    monkeypatch.setenv("SWARM_REGION", "eu-west")
    assert run(["join", "-q", "--dial-out-only"]) == EXIT_OK
    assert started[0].options.grace == 5
    assert (started[0].options.region, started[0].options.dial_out_only) == ("eu-west", True)
    assert started[0].identity == tmp_path / "mine" / "identity.key"


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
    tmp_path: Path, taken: int, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    tokenizer = train_tokenizer([TEXT], 300)
    build_shard(tmp_path / "torn", [TEXT], tokenizer)
    (tmp_path / "torn" / "tokens.bin").write_bytes(b"\0\0")
    cases = {
        "INVITE is missing": [],
        "INVITE": ["swarm1:abc"],
        "ends in /p2p/": ["/ip4/192.0.2.7/tcp/31337"],
        "cannot be used here": [f"/ip4/192.0.2.7/tcp/1/ws/p2p/{PEER}"],
        "no such path": [INVITE, "--data", str(tmp_path / "nothing")],
        "it is empty\n  check: expected a built shard": [INVITE, "--data", str(tmp_path / "empty")],
        "it is empty\n  check: expected a file": [INVITE, "--data", str(tmp_path / "empty.txt")],
        "a stage host reads no data": [INVITE, "--data", str(tmp_path / "empty.txt"), "--role", "stage"],
        "a trainer holds no stage": [INVITE, "--stage", "1", "--role", "trainer"],
        "torn or cut short": [INVITE, "--data", str(tmp_path / "torn")],
        "--stage": [INVITE, "--stage", "0", "--role", "trainer"],
        "--device": [INVITE, "--device", "tpu"],
        "--checkpoints": [INVITE, "--checkpoints", "/proc/nope/{run}"],
        f"{taken} is taken": [INVITE, "--listen", f"/ip4/127.0.0.1/tcp/{taken}"],
        "up to 32 small letters, digits and dashes": [INVITE, "--region", "Here!"],
        "--threads": [INVITE, "--threads", "0"],
        "place": [INVITE, "--place", "no such name!"],
    }
    for words, arguments in cases.items():
        code = run(["join", *arguments, "--home", str(tmp_path / "home")])
        error = capsys.readouterr().err
        assert (code, error.startswith("error: ")) == (EXIT_USAGE, True), error
        assert words in error
        assert "next:" in error
    assert started == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("wire", "next_"), [(1, "swarm invite"), (3, "Update swarm on this machine")])
def test_join_invite_of_another_version_is_incompatible(
    wire: int, next_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[PeerSettings]
) -> None:
    other = Invite(run=RUN, name="mine", at=(ADDRESS,), wire=wire).text()
    assert run(["join", other, "--home", str(tmp_path)]) == EXIT_INCOMPATIBLE
    cause, check, said = capsys.readouterr().err.splitlines()
    assert f"it is to a run of version {wire}" in cause
    assert check == "  check: expected a run of wire version 2"
    assert said.startswith("  next:")
    assert next_ in said
    assert started == []


def test_join_a_run_that_ended_here_says_so_and_calls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = iter([(True, 0), (False, 3)])

    def run_peer(settings: PeerSettings) -> int:
        closed, code = next(lives)
        events: list[dict[str, object]] = [{"kind": "RunFound", "run": RUN, "name": "mine", "steps": 6}]
        events += [{"kind": "StepClosed", "step": step} for step in (5, 6)] if closed else []
        (settings.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return code

    monkeypatch.setattr("peers.node.run_peer", run_peer)
    home = ["--home", str(tmp_path)]
    assert run(["join", INVITE, "--place", "a", *home]) == 0
    assert capsys.readouterr().err == ""
    for place in ("a", "b", "a"):
        assert run(["join", INVITE, "--place", place, *home]) == 0
        assert "note: this run ended here at step 6, its last" in capsys.readouterr().err
    other = Invite(run=RunId("cd" * 32), name="other", at=(ADDRESS,)).text()
    assert run(["join", other, "--place", "b", *home]) == 3
    assert capsys.readouterr().err == ""


def test_join_a_run_whose_last_steps_are_done_again_here_dials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dialled: list[PeerSettings] = []

    def run_peer(settings: PeerSettings) -> int:
        dialled.append(settings)
        events = [{"kind": "RunFound", "run": RUN, "name": "mine", "steps": 6}, {"kind": "StepClosed", "step": 6}]
        (settings.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
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
        closed = {"kind": "StepClosed", "step": 5, "ended": True}
        (settings.home / "events.jsonl").write_text(json.dumps(closed) + "\n")
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


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/0", "/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])
def test_check_listen_any_free_port_will_do(address: str) -> None:
    check_listen([address])


def test_check_checkpoints_tries_and_leaves_nothing(tmp_path: Path) -> None:
    check_checkpoints(tmp_path / "some" / "where" / "x-{run}" / "more")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        check_checkpoints(tmp_path / "file" / "below")
    assert (refused.value.key, refused.value.value) == ("--checkpoints", str(tmp_path / "file" / "below"))
    assert refused.value.remedy.startswith("Not a directory: name another with --checkpoints")


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
    ("granted", "role", "next_"),
    [("trainer", "stage", "--role trainer"), ("stage", "trainer", "--role stage"), ("observer", "stage", "dashboard")],
)
def test_invite_for_another_role_is_refused_before_anybody_is_dialled(granted: Any, role: Any, next_: str) -> None:
    issuer, key = PrivateIdentity(bytes(32)), PrivateIdentity(bytes([1]) * 32)
    grant = Grant(run="ab" * 32, serial="0" * 16, name="ana", role=granted, until_step=9, key=key.peer)
    contacts = Contacts(addresses=(), granted=Granted(grant=sign_grant(grant, issuer)))
    with pytest.raises(ConfigError, match=next_):
        _checked_role(contacts, role)
    if granted != "observer":
        _checked_role(contacts, granted)
