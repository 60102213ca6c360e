"""The systemd service of a peer: its texts, its files, and what is left when systemd refuses."""

from __future__ import annotations

import shutil
import stat
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.cli.app import run as swarm
from peers.console.words import CommandError
from peers.exit_codes import FINAL
from peers.invites.invite import Invite
from peers.options.model import PeerOptions
from peers.options.reading import read_invocation, read_peer_options
from peers.sharing import systemd_unit as service
from peers.sharing.systemd_unit import ServiceFiles, install, service_status, uninstall, unit_text
from swarm.errors import ConfigError
from swarm.ids import RunId

PEER = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"
INVITE = Invite(run=RunId("5a" * 32), name="tiny", at=(f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER}",)).text()


class Systemd:
    """A ``systemctl --user`` that notes what it is asked, and fails at some words."""

    def __init__(self, *fails: str, version: str = "systemd 252 (252.38)\n") -> None:
        self.fails, self.version, self.asked = fails, version, list[str]()
        self.timeouts_s: list[float] = []

    def __call__(self, words: Sequence[str], timeout_s: float = service.CALL_S) -> subprocess.CompletedProcess[str]:
        self.asked.append(" ".join(words))
        self.timeouts_s.append(timeout_s)
        failed = words[0] in self.fails
        said = {"--version": self.version, "show": "ActiveState=active\nNRestarts=2\nSecret=no\n"}.get(words[0], "")
        return subprocess.CompletedProcess(words, int(failed), said, "it was refused\n" if failed else "")


@pytest.fixture
def files(tmp_path: Path) -> ServiceFiles:
    return ServiceFiles.of("swarm", tmp_path / "my home", tmp_path / "units")


def given(tmp_path: Path, **typed: object) -> PeerOptions:
    return read_peer_options("join", {"home": str(tmp_path / "my home"), **typed}, read_invocation("join", {}))


def lines(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_install_writes_the_invite_where_only_its_user_reads_it(tmp_path: Path, files: ServiceFiles) -> None:
    run = Systemd()
    typed = {"max_upload": "10mbit", "pause_when": ["battery", "hours:22-07"], "data": "texts", "grace": "20"}
    said = install(given(tmp_path, **typed), f"{INVITE}\n", files, run)
    assert any("enable-linger" in line for line in said)
    assert run.asked == ["--version", "show-environment", "daemon-reload", "enable --now swarm.service"]
    assert files.invite.read_text() == f"{INVITE}\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (files.invite, files.config, files.unit)] == [
        0o600,
        0o600,
        0o644,
    ]
    assert files.invite.stat().st_uid == files.unit.stat().st_uid
    assert stat.S_IMODE(files.invite.parent.stat().st_mode) == 0o700
    for text in (files.unit.read_text(), files.config.read_text()):
        assert INVITE[:20] not in text
    settings = tomllib.loads(files.config.read_text())
    assert settings == {
        "home": str(tmp_path / "my home"), "max_upload": "10mbit", "pause_when": ["battery", "hours:22-07"],
        "data": str(Path("texts").absolute()), "grace": 20.0, "retry": True,
    }  # fmt: skip
    again = read_peer_options("join", {}, read_invocation("join", {"config": str(files.config)}))
    assert (again.retry, again.pause_when, again.max_upload) == (True, ("battery", "hours:22-07"), "10mbit")


def test_unit_hardens_bounds_and_restarts(tmp_path: Path, files: ServiceFiles) -> None:
    unit = lines(unit_text(given(tmp_path, max_memory="6", grace="45"), files, version=252, python="/opt/a b/python"))
    assert (
        unit["ExecStart"]
        == f'"/opt/a b/python" -P -m peers.cli join --config "{files.config}" --invite-file "{files.invite}"'
    )
    assert unit["RestartPreventExitStatus"].split() == [str(code) for code in sorted(FINAL) if code]
    assert (unit["Restart"], unit["KillSignal"], unit["TimeoutStopSec"]) == ("on-failure", "SIGTERM", "75")
    assert unit["MemoryMax"] == "8000000000"
    assert unit["ReadWritePaths"] == f'"{tmp_path}/my home"'
    assert [unit[key] for key in ("NoNewPrivileges", "PrivateTmp", "ProtectSystem", "ProtectHome")] == [
        "yes", "yes", "strict", "read-only"]  # fmt: skip
    assert "RestartSteps" not in unit
    assert lines(unit_text(given(tmp_path), files, version=256))["RestartMaxDelaySec"] == "900"
    assert "MemoryMax" not in lines(unit_text(given(tmp_path, max_memory="6", device="cuda"), files, version=252))


def test_each_line_of_the_unit_has_its_paths_as_systemd_reads_them(tmp_path: Path) -> None:
    home = tmp_path / "100%h $HOME o'f"
    files = ServiceFiles.of("swarm", home, tmp_path / "units")
    options = PeerOptions(home=home, checkpoints=Path('/a "b" \\c'), report_dir=Path("/plain$"))
    unit = lines(unit_text(options, files, version=252, python="/p"))
    assert "100%%h $$HOME o'f" in unit["ExecStart"], "neither a specifier nor a variable"
    assert unit["WorkingDirectory"] == f"{tmp_path}/100%%h $HOME o'f", "no quotes, and no variables there"
    assert unit["ReadWritePaths"] == f'"{tmp_path}/100%%h $HOME o\'f" "/a "\'"\'"b"\'"\'" \\c" /plain$'


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("name", ["home", "my home", '100%h $HOME o\'f "us" \\x 😀'])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    files = ServiceFiles.of("swarm", home, tmp_path / "units")
    files.unit.parent.mkdir()
    version = service.known_version(service.systemctl)
    files.unit.write_text(unit_text(given(tmp_path, home=str(home), max_memory="6"), files, version=version))
    command = ["systemd-analyze", "--user", "verify", str(files.unit)]
    environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(home)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    mine = [line for line in found.stderr.splitlines() if files.unit.name in line]
    assert (found.returncode, mine) == (0, []), found.stderr


def test_settings_are_valid_toml_with_any_character_in_a_path(tmp_path: Path, files: ServiceFiles) -> None:
    text = service.config_text(given(tmp_path, home=str(tmp_path / "🦊 ü"), data="my\ttexts 😀"))
    settings = tomllib.loads(text)
    assert (settings["home"], settings["data"]) == (str(tmp_path / "🦊 ü"), str(Path("my\ttexts 😀").absolute()))


@pytest.mark.parametrize("fails", ["daemon-reload", "enable"])
def test_service_that_cannot_start_leaves_no_file(tmp_path: Path, files: ServiceFiles, fails: str) -> None:
    run = Systemd(fails)
    with pytest.raises(CommandError, match=f"systemctl --user {fails}") as caught:
        install(given(tmp_path), INVITE, files, run)
    assert caught.value.check == "it was refused"
    assert run.asked[-1] == "daemon-reload", "it is told that the unit is gone"
    assert not any(path.exists() for path in (files.unit, files.config, files.invite))


@pytest.mark.parametrize("run", [Systemd("show-environment"), Systemd(version="")])
def test_without_systemd_it_says_what_to_do_in_its_place(tmp_path: Path, files: ServiceFiles, run: Systemd) -> None:
    with pytest.raises(CommandError, match="systemd does not answer") as caught:
        install(given(tmp_path), INVITE, files, run)
    assert "nohup" in caught.value.next
    assert "--retry" in caught.value.next
    assert not files.unit.parent.exists()


def test_second_service_of_a_name_is_refused_and_the_first_stays(tmp_path: Path, files: ServiceFiles) -> None:
    install(given(tmp_path), INVITE, files, Systemd())
    with pytest.raises(CommandError, match="already"):
        install(given(tmp_path), "another", files, Systemd())
    assert files.invite.read_text() == INVITE


def test_uninstall_stops_the_peer_first_and_keeps_the_files_where_it_cannot(
    tmp_path: Path, files: ServiceFiles
) -> None:
    install(given(tmp_path), INVITE, files, Systemd())
    assert service_status(files, Systemd()) == {"ActiveState": "active", "NRestarts": "2"}
    with pytest.raises(CommandError, match="disable"):
        uninstall(files, Systemd("disable"))
    assert files.unit.exists()
    run = Systemd()
    uninstall(files, run)
    assert run.asked == ["disable --now swarm.service", "daemon-reload"]
    assert run.timeouts_s[0] > PeerOptions().grace + service.STOP_MARGIN_S, "a peer may take that long to leave"
    assert not any(path.exists() for path in (files.unit, files.config, files.invite))
    for look in (uninstall, service_status):
        with pytest.raises(CommandError, match="the service swarm does not exist"):
            look(files, run)


def test_name_of_a_service_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="small letters"):
        ServiceFiles.of("../swarm", tmp_path, tmp_path)


def test_dry_run_prints_the_unit_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    words = ["service", "install", INVITE, "--home", str(tmp_path / "h"), "--max-upload", "10mbit", "--dry-run"]
    assert swarm(words) == 0
    said = capsys.readouterr().out
    assert lines(said)["Restart"] == "on-failure"
    assert INVITE not in said
    assert not (tmp_path / "config").exists()
    assert not (tmp_path / "h").exists()
    assert swarm(["service", "install", "--dry-run", "--home", str(tmp_path / "h")]) == 2
    assert swarm(["service", "install", INVITE, "--max-upload", "10", "--dry-run"]) == 2
