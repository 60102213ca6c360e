from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peers.cli.app import run
from peers.doctor.contacts import Answered, Knock
from peers.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.place_state import read_state, write_state
from peers.home.places import take_place
from peers.invites.invite import Granted, Invite
from peers.invites.invite_file import await_invite, check_secret, find_past, qr_code, read_invite, write_invite
from peers.reaching import endpoint_config
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.config import load_manifest
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.network.libp2p.identity import load_or_create

RUN = RunId("ab" * 32)


def founded(home: Path) -> Invite:
    """A home in which somebody founded a run that has not begun."""
    with take_place(home, clock=SystemClock(), run=RUN, role="bootstrap") as place:
        peer = load_or_create(place.identity).peer
        session = place.open_session(name="otter", peer=peer, role="bootstrap", run=RUN, run_name="tiny")
        (session / "run.toml").write_text("")
    return Invite(run=RUN, name="tiny", at=(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}",))


def test_invite_written_is_read_back(tmp_path: Path) -> None:
    invite, file = founded(tmp_path / "home"), tmp_path / "there" / "invite"
    assert read_invite(file) is None
    write_invite(file, invite.text())
    assert read_invite(file) == invite
    assert file.stat().st_mode & 0o777 == 0o600, "whoever has it can join"


def test_invite_file_that_others_may_access_is_told_and_refused_where_it_holds_a_key(tmp_path: Path) -> None:
    invite, file = founded(tmp_path / "home"), tmp_path / "my invite"
    write_invite(file, invite.text())
    # The grant itself is not looked at: whether there is a one-time key in the file is.
    granted = replace(invite, granted=Granted(grant=cast(Any, None), seed=bytes(32)))
    assert [check_secret(file, each) for each in (invite, granted)] == ["", ""]
    for mode in (0o640, 0o604):
        file.chmod(mode)
        assert f"chmod 600 '{file}'" in check_secret(file, invite)
        with pytest.raises(ConfigError, match="chmod 600"):
            check_secret(file, granted)
    assert check_secret(tmp_path / "nothing", granted) == ""


def test_qr_code_of_an_invite_needs_a_terminal_that_is_wide_enough(tmp_path: Path) -> None:
    text = founded(tmp_path / "home").text()
    lines = qr_code(text, 100).splitlines()
    width = len(lines[0])
    assert {len(line) for line in lines} == {width}
    assert len(lines) == (width + 1) // 2, "two dots in a character"
    assert qr_code(text, width).splitlines() == lines
    with pytest.raises(ConfigError, match=f"{width} columns"):
        qr_code(text, width - 1)


def test_invite_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    invite, file = founded(tmp_path / "home"), tmp_path / "invite"
    file.touch()  # an empty one is none
    writer = threading.Timer(0.05, write_invite, (file, invite.text()))
    writer.start()
    assert await_invite(file) == invite
    writer.join()


def test_invite_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "invite").write_text("not an invite")
    with pytest.raises(ConfigError, match="swarm1"):
        read_invite(tmp_path / "invite")


def test_past_of_a_founder_whose_run_had_not_begun_is_its_manifest(tmp_path: Path) -> None:
    past = find_past(tmp_path / "home", founded(tmp_path / "home"))
    assert past is not None
    assert (past.place.name, past.contacts) == ("1", ())
    assert past.manifest is not None
    assert past.manifest.name == "run.toml"


def test_home_of_somebody_else_has_no_past(tmp_path: Path) -> None:
    assert find_past(tmp_path / "other", founded(tmp_path / "home")) is None


def test_new_with_the_invite_of_another_home_founds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "invite"
    write_invite(file, founded(tmp_path / "home").text())
    code = run(["new", "--preset", "tiny", "--home", str(tmp_path / "other"), "--invite-file", str(file)])
    assert code == EXIT_USAGE
    assert "a run that this home does not know" in capsys.readouterr().err


def test_new_whose_run_has_begun_comes_back_as_its_founder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, file = tmp_path / "home", tmp_path / "invite"
    write_invite(file, founded(home).text())
    other = f"/ip4/10.0.0.2/tcp/4001/p2p/{load_or_create(tmp_path / 'other.key').peer}"
    monkeypatch.setattr("peers.invites.invite_file.acquaintances", lambda place, run, own: (other,))
    given: dict[str, Any] = {}

    def join(options: Any, **more: Any) -> int:
        given.update(more, options=options)
        return 0

    monkeypatch.setattr("peers.commands.join.join", join)
    assert run(["new", "--preset", "tiny", "--home", str(home), "--invite-file", str(file)]) == 0
    assert given["founder"], "it holds no part: stage hosts keep no copy of private ends"
    assert given["options"].place == "1"
    assert Invite(run=RUN, name="tiny", at=(other,)).text() == given["options"].invite[0]


def test_founder_that_comes_back_with_a_relay_asks_it_for_a_seat_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, file = tmp_path / "home", tmp_path / "invite"
    write_invite(file, founded(home).text())
    peers = [load_or_create(tmp_path / f"{name}.key").peer for name in ("other", "relay")]
    other, relay = (f"/ip4/10.0.0.2/tcp/4001/p2p/{peer}" for peer in peers)
    monkeypatch.setattr("peers.invites.invite_file.acquaintances", lambda place, run, own: (other,))
    started: list[PeerSettings] = []
    monkeypatch.setattr("peers.node.run_peer", lambda settings: started.append(settings) or 0)
    again = ["new", "--preset", "tiny", "--home", str(home), "--invite-file", str(file), "--through", relay]
    assert run(again) == 0
    (settings,) = started
    assert (settings.role, settings.manifest, settings.run) == ("bootstrap", None, RUN)
    config = endpoint_config(settings)
    # Whoever could call it here, as a peer of the same house, would say that it needs no relay.
    assert ([str(each) for each in config.relays], config.behind_nat) == ([relay], True)


# --- a founder without an invite file --------------------------------------------------------------------------------


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[PeerSettings]]:
    """The manifest of a founder that was killed, in its session, and the settings of whoever starts from then on."""
    started: list[PeerSettings] = []
    monkeypatch.setattr("peers.node.run_peer", lambda settings: started.append(settings) or 0)
    text = tmp_path / "some.txt"
    text.write_text("Enough text to make a small tokenizer of, with a few words that come again. " * 20)
    home = str(tmp_path / "home")
    assert run(["new", "--preset", "tiny", "--admission", "token", "--text", str(text), "--home", home]) == 0
    files = started.pop().manifest
    assert files is not None
    place = tmp_path / "home" / "1"
    state = read_state(place)
    assert state is not None
    write_state(place, replace(state, end=None))
    return files, started


def acquainted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answered: Answered) -> str:
    """Have the founder's records name another peer, which answers so when it is knocked at."""

    async def knock_at(addresses: Any) -> list[Knock]:
        return [Knock(address=each, answered=answered) for each in addresses]

    other = f"/ip4/10.0.0.2/tcp/4001/p2p/{load_or_create(tmp_path / 'other.key').peer}"
    monkeypatch.setattr("peers.invites.invite_file.acquaintances", lambda place, run, own: (other,))
    monkeypatch.setattr("peers.commands.new.knock_at", knock_at)
    return other


def test_founder_that_was_killed_comes_back_with_the_files_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: tuple[Path, list[PeerSettings]], capsys: Any
) -> None:
    files, started = killed
    other = acquainted(monkeypatch, tmp_path, "peer")
    assert run(["new", str(files), "--home", str(tmp_path / "home")]) == 0
    (settings,) = started
    assert (settings.role, settings.returns, settings.bootstrap[0]) == ("bootstrap", True, other)
    assert settings.identity == files.parents[2] / "identity.key"
    assert settings.run == load_manifest(files).run_id
    out = capsys.readouterr().out
    assert "comes back to it" in out
    assert "as its founder" in out


def test_founder_of_a_run_that_never_began_founds_it_again(
    tmp_path: Path, killed: tuple[Path, list[PeerSettings]]
) -> None:
    files, started = killed
    assert run(["new", str(files), "--home", str(tmp_path / "home")]) == 0
    assert [(settings.role, settings.identity) for settings in started] == [
        ("bootstrap", files.parents[2] / "identity.key")
    ]


def test_founder_whose_peers_do_not_answer_founds_its_run_again_only_where_nothing_is_kept_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: tuple[Path, list[PeerSettings]], capsys: Any
) -> None:
    files, started = killed
    acquainted(monkeypatch, tmp_path, "closed")
    assert run(["new", str(files), "--home", str(tmp_path / "home")]) == 0
    assert [settings.role for settings in started] == ["bootstrap"]
    assert "founded again, from its beginning" in capsys.readouterr().out
    kept = tmp_path / "home" / "runs" / "tiny"
    (kept / "checkpoints" / "step-00000010").mkdir(parents=True)
    (kept / "run.toml").write_bytes(files.read_bytes())
    assert run(["new", str(files), "--home", str(tmp_path / "home")]) == EXIT_UNREACHABLE
    assert f"new --resume {load_manifest(files).run_id[:12]}" in capsys.readouterr().err
    assert len(started) == 1


def test_run_is_not_founded_beside_a_peer_of_it_that_lives_here(
    tmp_path: Path, killed: tuple[Path, list[PeerSettings]], capsys: Any
) -> None:
    files, started = killed
    with take_place(tmp_path / "home", "1", clock=SystemClock()) as place:
        place.joined(load_manifest(files).run_id, "tiny")
        assert run(["new", str(files), "--home", str(tmp_path / "home")]) == EXIT_USAGE
    assert "drain --peer 1" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("command", [["status"], ["new", "--resume"]])
def test_where_a_founder_was_killed_the_command_that_brings_it_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: tuple[Path, list[PeerSettings]], capsys: Any,
    command: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run([*command, "--home", str(tmp_path / "home")])
    assert f"swarm new {killed[0]}" in capsys.readouterr().err
