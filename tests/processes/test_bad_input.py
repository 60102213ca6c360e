"""What the real command answers to bad input that only shows once a peer is called, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_shards.build import build_shard
from data_shards.tokenize import train_tokenizer
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.place_state import read_state
from peers.invites.invite import Invite, parse_invite
from swarm.ids import RunId
from swarm.security.signing import PrivateIdentity

LIMIT_S = 120.0
TEXT = "A text of some words, enough for a tokenizer and for very little else. " * 30
RUN_TOML = """
[run]
name = "refusals"
start_when = { stage_hosts = 2, trainers = 1 }
[model]
vocab_size = 300
dim = 32
layers = 2
heads = 2
context = 16
[batch]
microbatch_size = 2
"""

pytestmark = pytest.mark.process


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "peers.cli", *arguments]


def _environment(home: Path) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("SWARM_") or "TEST" in key} | {
        "SWARM_HOME": str(home),
        "SWARM_LISTEN": "/ip4/127.0.0.1/tcp/0",
    }


@dataclass(frozen=True, slots=True)
class Swarm:
    """A run that waits for its peers, and another home for those who try to join it."""

    home: Path
    invite: Invite

    def join(self, invite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``swarm join``, to its end."""
        return subprocess.run(
            _command("join", invite, *arguments),
            env=_environment(self.home / "joiner"), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    home = Path(tempfile.mkdtemp(prefix="h-"))
    files = tmp_path_factory.mktemp("run")
    (files / "run.toml").write_text(RUN_TOML)
    (files / "text.txt").write_text(TEXT)
    with subprocess.Popen(
        _command("new", str(files / "run.toml"), "--text", str(files / "text.txt")),
        env=_environment(home / "founder"), stdout=subprocess.PIPE, text=True,
    ) as founder:  # fmt: skip
        assert founder.stdout is not None
        try:
            invite = next(line.strip() for line in founder.stdout if line.startswith("swarm1:"))
            yield Swarm(home, parse_invite(invite))
        finally:
            founder.send_signal(signal.SIGINT)
            founder.stdout.read()
            founder.wait(LIMIT_S)
    shutil.rmtree(home)


def _refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    error = result.stderr
    assert result.returncode == code, result.stdout + error
    assert "Traceback" not in error
    lines = error.splitlines()
    assert lines[0].startswith("error: ")
    assert any(line.startswith("  check: ") for line in lines)
    assert any(line.startswith("  next: ") for line in lines)
    for word in words:
        assert word in error


def test_join_bootstrap_that_is_not_there_cannot_be_reached(swarm: Swarm) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{PrivateIdentity(bytes(32)).peer}"
    _refused(swarm.join(address), EXIT_UNREACHABLE, f"cannot reach {address}", "is that peer running")


def test_join_invite_to_another_run_is_incompatible(swarm: Swarm) -> None:
    other = Invite(run=RunId("0" * 64), name="refusals", at=swarm.invite.at)
    _refused(swarm.join(other.text()), EXIT_INCOMPATIBLE, "does not serve the run", "000000000000")


def test_join_shard_of_another_tokenizer_is_incompatible(swarm: Swarm, tmp_path: Path) -> None:
    build_shard(tmp_path / "shard", [TEXT], train_tokenizer([TEXT.upper()], 300))
    result = swarm.join(swarm.invite.text(), "--data", str(tmp_path / "shard"))
    _refused(result, EXIT_INCOMPATIBLE, "--data", "the run's tokenizer", "data build TEXT --tokenizer")


def test_join_too_little_text_is_refused_and_noted_in_the_place(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    result = swarm.join(swarm.invite.text(), "--data", str(tmp_path / "short.txt"), "--place", "short")
    _refused(result, EXIT_USAGE, "--data", "at least 33 tokens")
    state = read_state(swarm.home / "joiner" / "short")
    assert state is not None
    assert state.end is not None
    assert state.end.exit_code == EXIT_USAGE


def test_join_port_that_the_founder_has_is_taken(swarm: Swarm) -> None:
    port = swarm.invite.at[0].split("/")[4]
    result = swarm.join(swarm.invite.text(), "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    _refused(result, EXIT_USAGE, f"{port} is taken by p2pd (pid ", "--listen /ip4/0.0.0.0/tcp/0")


def test_join_stage_that_the_run_does_not_have_is_wrong_usage_of_who_named_it(swarm: Swarm, tmp_path: Path) -> None:
    config = tmp_path / "peer.toml"
    config.write_text('# mine\nrole = "stage"\nstage = 9\n')
    result = swarm.join(swarm.invite.text(), "--config", str(config))
    _refused(result, EXIT_USAGE, f"{config}:3: stage = 9", "0 to 1")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_join_told_to_stop_while_its_contact_does_not_answer_stops_at_once(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as undo:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{PrivateIdentity(bytes(32)).peer}"
        home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="h-")))
        peer = undo.enter_context(subprocess.Popen(
            _command("join", address, "--role", "stage"), env=_environment(home), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
        undo.callback(peer.kill)
        silent.settimeout(LIMIT_S)
        called, _ = silent.accept()  # the daemon dials: the endpoint is being opened
        undo.callback(called.close)
        peer.send_signal(number)
        _, error = peer.communicate(timeout=LIMIT_S)
        assert peer.returncode == code, error
        assert "Traceback" not in error
        assert "callback" not in error
        state = read_state(home / "1")
        assert state is not None
        assert state.end is not None
        assert (state.end.exit_code, "was stopped by" in state.end.reason) == (code, True)
        assert not list(home.rglob("*.sock"))


def test_founder_outlives_all_of_them(swarm: Swarm) -> None:
    result = subprocess.run(
        _command("status"), env=_environment(swarm.home / "founder"), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == EXIT_OK, result.stderr
    assert "0 of 2 stage hosts" in result.stdout
