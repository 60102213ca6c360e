"""``swarm doctor`` as it is typed, on machines with something wrong, and what ``swarm join`` makes of the same."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.cli.app import run
from peers.exit_codes import EXIT_DOCTOR, EXIT_OK, EXIT_USAGE
from peers.invites.invite import Invite
from swarm.ids import RunId
from tests.harness.rigs.peers import printed

HEAVY = ("torch", "hivemind", "transformers", "pydantic", "numpy", "uvloop", "rich", "asyncio")
PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
QUICK = ("python", "torch", "memory", "disk", "open files", "device", "port", "invite")

pytestmark = pytest.mark.usefixtures("clean_environment", "elsewhere")


@pytest.fixture
def closed() -> Iterator[int]:
    """A port at which nobody listens, and which nobody else takes."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def invite(closed: int) -> str:
    """An invite whose peer is gone."""
    return Invite(run=RunId("ab" * 32), name="mine", at=(f"/ip4/127.0.0.1/tcp/{closed}/p2p/{PEER}",)).text()


def failed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The causes of the checks that failed, as ``--json`` has them."""
    return {one["name"]: one["cause"] for one in printed(capsys)["checks"] if one["level"] == "fail"}


def limited(*words: str) -> subprocess.CompletedProcess[str]:
    """``swarm WORDS`` in a process that may open few files."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    return subprocess.run(
        [sys.executable, "-m", "peers.cli", *words],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)),
    )  # fmt: skip


def test_doctor_quick_finds_nothing_wrong_with_an_invite_whose_peer_is_gone(
    invite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--quick", invite]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line[2:14].strip() for line in lines[:-1] if line[0] != " "] == list(QUICK)


def test_doctor_a_taken_port_fails_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert run(["doctor", "--quick", "--port", str(port)]) == EXIT_DOCTOR
    shown = capsys.readouterr().out
    assert f"✗ port         cannot listen on /ip4/0.0.0.0/tcp/{port}" in shown
    assert f"    check: expected a free port; {port} is taken" in shown
    assert "    next:  Stop that process, or take any free port" in shown
    assert shown.splitlines()[-1] == "this machine cannot join as it is: for port see above"


def test_doctor_an_absent_device_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.commands.preflight.GPU_TRACES", ())
    assert run(["doctor", "--quick", "--json", "--device", "cuda"]) == EXIT_DOCTOR
    assert "no GPU driver" in failed(capsys)["device"]


def test_doctor_few_open_files_fail_and_keep_a_peer_from_starting(invite: str) -> None:
    looked = limited("doctor", "--quick")
    assert (looked.returncode, "✗ open files   128 at a time" in looked.stdout) == (EXIT_DOCTOR, True), looked.stdout
    joined = limited("join", invite)
    assert joined.returncode == EXIT_DOCTOR, joined.stderr
    assert joined.stderr.startswith("error: open files: 128 at a time; a peer and its daemon take 256\n")
    assert "  next:  Raise the limit: LimitNOFILE=65536" in joined.stderr
    founded = limited("new", "--preset", "tiny")
    assert founded.returncode == EXIT_DOCTOR, founded.stderr


@pytest.mark.parametrize("typed", ["swarm1:abc", "hello", "/ip4/192.0.2.7/tcp/1", ""])
def test_doctor_a_broken_invite_fails_with_the_words_of_join(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", "--json", typed]) == EXIT_DOCTOR
    assert list(failed(capsys)) == ["invite"]


def test_doctor_reads_an_invite_from_standard_input_and_the_environment(
    invite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(invite + "\n"))
    assert run(["doctor", "--quick", "-"]) == EXIT_OK
    assert "✓ invite       to mine (abababababab), 1 address" in capsys.readouterr().out
    monkeypatch.setenv("SWARM_INVITE", invite)
    monkeypatch.setenv("SWARM_LISTEN", "/ip4/127.0.0.1/tcp/0,/ip4/127.0.0.1/udp/0/quic-v1")
    assert run(["doctor", "--quick", "--json"]) == EXIT_OK
    checks = {check["name"]: check for check in printed(capsys)["checks"]}
    assert checks["invite"]["found"] == "to mine (abababababab), 1 address"
    assert len(checks["port"]["facts"]["listen"]) == 2


def test_doctor_of_a_run_that_is_gone_says_so_and_what_it_could_not_ask(
    invite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", invite]) == EXIT_DOCTOR
    shown = capsys.readouterr().out
    assert "✗ contact      nobody answers: " in shown
    assert "(Connection refused)" in shown
    assert "✓ computes     cpu" in shown
    assert "- of the run   skipped: it could not be asked" in shown
    assert shown.splitlines()[-1] == "this machine cannot join as it is: for contact see above"


def test_doctor_without_an_invite_tries_the_device_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == EXIT_OK
    checks = {check["name"]: check["level"] for check in printed(capsys)["checks"]}
    assert list(checks) == [*QUICK, "computes"]
    assert checks["invite"] == "skipped"


@pytest.mark.parametrize("words", [["--timeout", "soon"], ["--timeout", "1"], ["--threads", "none"], ["--port", "0"]])
def test_doctor_wrong_numbers_are_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *words]) == EXIT_USAGE
    assert words[0] in capsys.readouterr().err


def test_doctor_leaves_nothing_behind(tmp_path: Path, invite: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--quick", invite])
    run(["doctor", "--json", invite])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is False
    assert list(tmp_path.iterdir()) == []
