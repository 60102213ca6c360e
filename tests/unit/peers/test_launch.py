from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peers.local.fork_client import sweep_scratch
from peers.local.launch import PeerExit, PeerGroup
from peers.settings import PeerSettings
from swarm.errors import StateError
from tests.harness.expect import wait_until
from tests.harness.rigs.peers import FAKE_PEER, SLOW_IMPORT, START_S, gone


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerGroup]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    group = PeerGroup(tmp_path / "server.log", entry=FAKE_PEER, preload=())
    try:
        group.open()
        yield group
    finally:
        group.stop(0.2)
    assert not list(tmp_path.glob("swarm-*"))


def _settings(tmp_path: Path, name: str) -> PeerSettings:
    return PeerSettings(home=tmp_path / name, role="stage", name=name)


def _exits(group: PeerGroup, count: int) -> dict[str, PeerExit]:
    exits: dict[str, PeerExit] = {}

    def told() -> bool:
        exits.update({exit_.name: exit_ for exit_ in group.poll(0.2)})
        return len(exits) >= count

    wait_until(told, deadline_s=START_S, what="the exits")
    return exits


def test_group_peers_that_end_are_told_with_their_codes(group: PeerGroup, tmp_path: Path) -> None:
    for name in ("exit-0", "exit-7", "crash", "raise"):
        group.start(_settings(tmp_path, name))
    exits = _exits(group, 4)
    assert {name: exit_.code for name, exit_ in exits.items()} == {
        "exit-0": 0,
        "exit-7": 7,
        "crash": -signal.SIGSEGV,
        "raise": 1,
    }
    assert "killed by SIGSEGV" in str(exits["crash"])
    assert "a bug in the peer" in (tmp_path / "raise" / "peer.log").read_text()
    assert "exit-0 starts" in (tmp_path / "exit-0" / "peer.log").read_text()
    assert group.running == ()


def test_group_stop_asks_first_and_kills_what_remains(group: PeerGroup, tmp_path: Path) -> None:
    for name in ("obey", "stubborn"):
        group.start(_settings(tmp_path, name))
        wait_until((tmp_path / name / "ready").exists, deadline_s=START_S)
    pids = [int((tmp_path / name / "pid").read_text()) for name in ("obey", "stubborn")]
    group.stop(0.3)
    assert all(gone(pid) for pid in pids)


def test_group_stop_during_preload_asks_nobody_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    group = PeerGroup(tmp_path / "server.log", entry=FAKE_PEER, preload=(SLOW_IMPORT,))
    group.open()
    group.start(_settings(tmp_path, "obey"))
    waited: list[float | None] = []
    receive = group._client.receive

    def receiving(timeout_s: float | None) -> list[dict[str, Any]] | None:
        waited.append(timeout_s)
        return receive(timeout_s)

    monkeypatch.setattr(group._client, "receive", receiving)
    monkeypatch.setattr(group._client, "send", lambda command: pytest.fail(f"it would not be read: {command}"))
    group.stop()
    assert waited == [0.0]
    assert not list(tmp_path.glob("swarm-*"))
    assert not (tmp_path / "obey").exists()


def test_group_preload_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    group = PeerGroup(tmp_path / "server.log", entry=FAKE_PEER, preload=("no_such_module",))
    group.open()
    try:
        with pytest.raises(StateError, match="no_such_module"):
            group.poll(10)
    finally:
        group.stop()


def test_group_server_killed_takes_every_peer_along(group: PeerGroup, tmp_path: Path) -> None:
    group.start(_settings(tmp_path, "stubborn"))
    wait_until((tmp_path / "stubborn" / "ready").exists, deadline_s=START_S)
    pid = int((tmp_path / "stubborn" / "pid").read_text())
    server = psutil.Process(pid).parent()
    assert server is not None
    server.kill()
    with pytest.raises(
        StateError, match="the process that starts the peers .* was killed by SIGKILL, and every peer with it"
    ):
        _exits(group, 1)
    wait_until(lambda: gone(pid), deadline_s=START_S)


STARTER = """
import signal, sys, threading
from pathlib import Path
from peers.local.launch import PeerGroup
from peers.settings import PeerSettings
home = Path(sys.argv[1])
group = PeerGroup(home / "server.log", entry=sys.argv[2], preload=sys.argv[3:])
group.open()
for name in ("obey", "stubborn"):
    group.start(PeerSettings(home=home / name, role="stage", name=name))
(home / "server").write_text(str(group._client.pid))
(home / "opened").touch()
threading.Event().wait(60)
"""


def _starter(tmp_path: Path, *preload: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path), FAKE_PEER, *preload], env=environment)


@pytest.mark.parametrize("preload", [(), (SLOW_IMPORT,)])
def test_group_starter_killed_leaves_no_process_and_no_directory(tmp_path: Path, preload: tuple[str, ...]) -> None:
    starter = _starter(tmp_path, *preload)
    try:
        wait_until((tmp_path / "opened").exists, deadline_s=START_S)
        pids = [int((tmp_path / "server").read_text())]
        if not preload:
            for name in ("obey", "stubborn"):
                wait_until((tmp_path / name / "ready").exists, deadline_s=START_S)
                pids.append(int((tmp_path / name / "pid").read_text()))
    finally:
        starter.kill()
        starter.wait()
    wait_until(lambda: all(gone(pid) for pid in pids))
    sweep_scratch(tmp_path)
    assert not list(tmp_path.glob("swarm-*"))


def test_sweep_scratch_living_owner_is_left_alone(group: PeerGroup, tmp_path: Path) -> None:
    assert sweep_scratch(tmp_path) == []
    assert len(list(tmp_path.glob("swarm-*"))) == 1
