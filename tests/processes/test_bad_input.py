"""What the command answers to bad input that only shows once a peer is called, and that it leaves nothing."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_shards.build import build_shard
from data_shards.tokenize import train_tokenizer
from peers.chaos.forks import Forked, Forks
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.places import read_state
from peers.invites.invite import Invite, parse_invite
from swarm.ids import RunId
from swarm.security.signing import PrivateIdentity
from tests.harness.by_hand import LOCAL, Started
from tests.harness.expect import LONG_S, wait_until

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


@dataclass(frozen=True, slots=True)
class Swarm:
    """A run that waits for its peers, and another home for those who try to join it."""

    home: Path
    forks: Forks
    invite: Invite

    def begin(self, home: Path, *arguments: str) -> tuple[Forked, Path]:
        """``swarm ARGUMENTS``, and where what it says goes."""
        output = self.home / f"{uuid.uuid4().hex}.log"
        return self.forks.begin([*arguments, "--home", str(home)], output), output

    def refuses(self, code: int, words: Sequence[str], invite: str, *arguments: str) -> None:
        """``swarm join`` ends so, and says so: what is wrong, what was checked, and what to do."""
        listen = () if "--listen" in arguments else LOCAL
        peer, output = self.begin(self.home / "joiner", "join", invite, *arguments, *listen)
        ended = peer.wait(LONG_S)
        wait_until(lambda: "\n  next: " in output.read_text(), what="what to do")
        said = output.read_text()
        assert ended == code, said
        assert "Traceback" not in said
        assert "\nerror: " in f"\n{said}"
        assert "\n  check: " in said
        for word in words:
            assert word in said


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    home = Path(tempfile.mkdtemp(prefix="h-"))
    forks = Forks(home / "forks.log")
    (home / "run.toml").write_text(RUN_TOML)
    (home / "text.txt").write_text(TEXT)
    words = ["new", str(home / "run.toml"), "--text", str(home / "text.txt"), "--json", *LOCAL]
    founder = forks.begin([*words, "--home", str(home / "founder")], home / "founder.log")
    try:
        told = Started(founder, home / "founder.log").wait_event("Invited")
        yield Swarm(home, forks, parse_invite(told["invite"]))
        founder.send_signal(signal.SIGINT)
        founder.wait(LONG_S)
    finally:
        forks.close()
    shutil.rmtree(home)


def test_join_bootstrap_that_is_not_there_cannot_be_reached(swarm: Swarm) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{PrivateIdentity(bytes(32)).peer}"
    swarm.refuses(EXIT_UNREACHABLE, [f"cannot reach {address}", "is that peer running"], address)


def test_join_invite_to_another_run_is_incompatible(swarm: Swarm) -> None:
    other = Invite(run=RunId("0" * 64), name="refusals", at=swarm.invite.at)
    swarm.refuses(EXIT_INCOMPATIBLE, ["does not serve the run", "000000000000"], other.text())


def test_join_shard_of_another_tokenizer_is_incompatible(swarm: Swarm, tmp_path: Path) -> None:
    build_shard(tmp_path / "shard", [TEXT], train_tokenizer([TEXT.upper()], 300))
    words = ["--data", "the run's tokenizer", "data build TEXT --tokenizer"]
    swarm.refuses(EXIT_INCOMPATIBLE, words, swarm.invite.text(), "--data", str(tmp_path / "shard"))


def test_join_too_little_text_is_refused_and_noted_in_the_place(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    options = ["--data", str(tmp_path / "short.txt"), "--place", "short"]
    swarm.refuses(EXIT_USAGE, ["--data", "at least 33 tokens"], swarm.invite.text(), *options)
    state = read_state(swarm.home / "joiner" / "short")
    assert state is not None
    assert state.end is not None
    assert state.end.exit_code == EXIT_USAGE


def test_join_port_that_the_founder_has_is_taken(swarm: Swarm) -> None:
    port = swarm.invite.at[0].split("/")[4]
    words = [f"{port} is taken by p2pd (pid ", "--listen /ip4/0.0.0.0/tcp/0"]
    swarm.refuses(EXIT_USAGE, words, swarm.invite.text(), "--listen", f"/ip4/127.0.0.1/tcp/{port}")


def test_join_stage_that_the_run_does_not_have_is_wrong_usage_of_who_named_it(swarm: Swarm, tmp_path: Path) -> None:
    config = tmp_path / "peer.toml"
    config.write_text('# mine\nrole = "stage"\nstage = 9\n')
    words = [f"{config}:3: stage = 9", "0 to 1"]
    swarm.refuses(EXIT_USAGE, words, swarm.invite.text(), "--config", str(config))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_join_told_to_stop_while_its_contact_does_not_answer_stops_at_once(
    swarm: Swarm, number: signal.Signals, code: int
) -> None:
    home = swarm.home / number.name
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{PrivateIdentity(bytes(32)).peer}"
        peer, output = swarm.begin(home, "join", address, "--role", "stage", *LOCAL)
        silent.settimeout(LONG_S)
        called, _ = silent.accept()  # the daemon dials: the endpoint is being opened
        with called:
            peer.send_signal(number)
            assert peer.wait(LONG_S) == code, output.read_text()
    assert "Traceback" not in output.read_text()
    assert "callback" not in output.read_text()
    state = read_state(home / "1")
    assert state is not None
    assert state.end is not None
    assert (state.end.exit_code, "was stopped by" in state.end.reason) == (code, True)
    assert not list(home.rglob("*.sock"))


def test_founder_outlives_all_of_them(swarm: Swarm) -> None:
    peer, output = swarm.begin(swarm.home / "founder", "status")
    assert peer.wait(LONG_S) == EXIT_OK
    wait_until(lambda: "0 of 2 stage hosts" in output.read_text(), what="who is there")
