"""Files that people name for what is written: links are followed, and what is no file is written into, not replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from peers.commands.preflight import check_output
from peers.invites.invite import Invite
from peers.invites.invite_file import read_invite, write_invite
from peers.local.report import write_report
from peers.options.foundation import Invocation
from peers.options.reading import read_peer_options
from swarm.disk import write_named
from swarm.errors import ConfigError, StateError
from swarm.ids import RunId
from swarm.security.signing import peer_of

INVITE = "swarm1:an-invite"
AT = f"/ip4/203.0.113.7/tcp/31337/p2p/{peer_of(bytes(range(32)))}"
OTTERS = Invite(run=RunId("9f2c41" + "0" * 58), name="otters", at=(AT,)).text()


def test_named_file_that_is_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_invite(link, INVITE)
    assert link.is_symlink()
    assert target.read_text() == f"{INVITE}\n"
    assert target.stat().st_mode & 0o777 == 0o600
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "new")
    write_report({"loss": 1.0}, dangling)
    assert (tmp_path / "new").is_file()


def test_named_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output("--report", pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_report({"loss": float("nan")}, pipe)
    read = os.read(reader, 1000)
    os.close(reader)
    assert read == b'{\n  "loss": null\n}\n'
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_named_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="nobody reads this pipe"):
        write_named(pipe, [b"x"])


def test_named_file_of_a_process_is_written_into(tmp_path: Path) -> None:
    """As ``/dev/stdout`` is, also where a shell has sent that to a file: others write there, too."""
    log = tmp_path / "log"
    with log.open("wb") as out:
        out.write(b"before\n")
        out.flush()
        write_named(Path(f"/proc/self/fd/{out.fileno()}"), [b"report\n"])
        assert log.read_bytes() == b"before\nreport\n"
        assert log.stat().st_ino == os.fstat(out.fileno()).st_ino, "it was not replaced"


def test_named_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_output("--report", tmp_path / "report.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="mkdir -p") as refused:
        check_output("--report", tmp_path / "new" / "report.json")
    assert refused.value.why == f"there is no directory {tmp_path / 'new'}"
    with pytest.raises(ConfigError, match="--report") as refused:
        check_output("--report", tmp_path)
    assert refused.value.why == "this is a directory"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        check_output("--invite-file", tmp_path / "file" / "invite")
    assert "there is no directory" in refused.value.why


def test_report_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="the report was not written"):
        write_report({}, tmp_path / "file" / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_file_that_an_editor_of_another_system_has_written_is_read(encoding: str, tmp_path: Path) -> None:
    config, invite = tmp_path / "peer.toml", tmp_path / "invite"
    config.write_bytes('# mine\r\nname = "otter"\r\n'.encode(encoding))
    invite.write_bytes(f"{OTTERS}\r\n".encode(encoding))
    options = read_peer_options("join", {}, Invocation(config=config))
    assert options.name == "otter"
    found = read_invite(invite)
    assert found is not None
    assert found.text() == OTTERS
