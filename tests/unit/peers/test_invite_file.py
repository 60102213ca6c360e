from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peers.cli.app import run
from peers.commands.join import _awaited
from peers.exit_codes import EXIT_USAGE
from peers.home.places import Tenant, take_place
from peers.invites.invite import Granted, Invite
from peers.invites.invite_file import await_invite, check_secret, qr_code, read_invite, write_invite
from swarm.clock import SystemClock
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.network.libp2p.identity import load_or_create

RUN = RunId("ab" * 32)


def founded(home: Path) -> Invite:
    """A home in which somebody founded a run that has not begun."""
    with take_place(home, clock=SystemClock(), tenant=Tenant(run=RUN, role="bootstrap")) as place:
        peer = load_or_create(place.identity).peer
        session = place.open_session(name="otter", peer=peer, role="bootstrap", run=RUN, run_name="tiny")
        (session / "run.toml").write_text("")
    return Invite(run=RUN, name="tiny", at=(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}",))


@pytest.mark.parametrize(("there", "words"), [(True, "which is empty"), (False, "which is not there yet")])
def test_who_waits_for_an_invite_in_a_file_says_why_and_what_writes_it(
    there: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, said = tmp_path / "invite", list[tuple[str, str]]()
    if there:
        file.touch(0o600)
    invite = founded(tmp_path / "home")
    monkeypatch.setattr("peers.invites.invite_file.await_invite", lambda path: invite)
    assert _awaited(file, lambda label, text: said.append((label, text))) == invite.text()
    ((label, text),) = said
    assert label == "invite"
    assert text.startswith(f"waits for one in {file}, {words}; ")
    assert f"swarm new --invite-file {file} writes it, or, at a peer of the run, swarm invite --out {file}" in text


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


def test_new_with_the_invite_of_another_home_founds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "invite"
    write_invite(file, founded(tmp_path / "home").text())
    code = run(["new", "--preset", "tiny", "--home", str(tmp_path / "other"), "--invite-file", str(file)])
    assert code == EXIT_USAGE
    assert "which this home did not found" in capsys.readouterr().err
