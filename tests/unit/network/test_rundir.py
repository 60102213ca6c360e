"""What a killed process leaves in its run directory, and who clears it away."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.network.libp2p import rundir
from swarm.network.libp2p.rundir import SocketDirectory, sweep_temporary
from tests.harness.expect import wait_until

HOLDER = """
import sys
from pathlib import Path
from swarm.network.libp2p.rundir import SocketDirectory
held = SocketDirectory(Path(sys.argv[1]))
held.control.touch()
held.client.touch()
if sys.argv[2:]:
    held.note_daemon(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a directory, killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(path), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def stopped_program(home: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A stopped process of this name, as a daemon that its peer's death cannot end."""
    (home / name).symlink_to("/bin/sleep")
    with subprocess.Popen([home / name, "600"]) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_until(lambda: comm.read_text().strip() == name, what="the program")
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_directory_of_a_killed_process_is_swept_by_one_that_starts_beside_it(home: Path) -> None:
    with holder(home / "old") as process:
        assert names(home / "old") == {"endpoint.lock", "p2pd.sock", "client.sock"}
        SocketDirectory(home / "new").close()
        assert names(home / "old") == {"endpoint.lock", "p2pd.sock", "client.sock"}, "its owner lives"
        process.kill()
        process.wait()
    (home / "old" / "events.jsonl").write_text("kept")
    SocketDirectory(home / "new").close()
    assert names(home / "old") == {"events.jsonl"}


def test_directory_of_a_killed_process_is_taken_and_swept_by_the_next(home: Path) -> None:
    with holder(home / "a") as process, pytest.raises(ConfigError, match="no other running peer"):
        SocketDirectory(home / "a")
    assert process.returncode == -signal.SIGKILL
    taken = SocketDirectory(home / "a")
    assert names(home / "a") == {"endpoint.lock"}
    taken.close()
    assert names(home / "a") == set()


@pytest.mark.parametrize("next_one", ["old", "beside"])
def test_daemon_that_outlived_its_peer_is_ended_by_the_next_that_starts(home: Path, next_one: str) -> None:
    with stopped_program(home, "p2pd") as daemon:
        with holder(home / "old", str(daemon.pid)):
            SocketDirectory(home / "beside").close()
            assert daemon.poll() is None, "its peer lives"
        SocketDirectory(home / next_one).close()
        assert daemon.wait(60) == -signal.SIGKILL


def test_process_that_got_the_pid_of_a_daemon_is_left_alone(home: Path) -> None:
    with stopped_program(home, "other") as other:
        with holder(home / "old", str(other.pid)):
            pass
        SocketDirectory(home / "old").close()
        assert other.poll() is None
        lock = home / "old" / "endpoint.lock"
        lock.write_text(f"{os.getpid()}:1 {other.pid}:1")  # began at another time
        SocketDirectory(home / "beside").close()
        assert other.poll() is None
        assert not lock.exists()


@pytest.mark.parametrize("content", ["", "\0" * 300, "x y z", "1", "{pid}:", "99999999999:1 -1:1", "é"])
def test_lock_with_anything_in_it_is_no_obstacle(home: Path, content: str) -> None:
    for name in ("a", "b"):
        (home / name).mkdir()
        (home / name / "endpoint.lock").write_text(content.format(pid=os.getpid()))
    SocketDirectory(home / "a").close()


def test_directories_taken_side_by_side_never_meet_one_that_sweeps(home: Path) -> None:
    """Each start looks at all the others' locks: none may find its own directory taken."""
    failures: list[ConfigError] = []
    begin = threading.Barrier(8)

    def start_often(name: str) -> None:
        begin.wait()
        for _ in range(40):
            try:
                held = SocketDirectory(home / name)
            except ConfigError as error:
                failures.append(error)
                return
            held.control.touch()
            held.client.touch()
            os.pwrite(held._lock, b"1:1 1:1", 0)
            os.close(held._lock)  # as a kill leaves it: everybody tries to sweep it while we start again

    threads = [threading.Thread(target=start_often, args=(f"d{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    SocketDirectory(home / "last").close()
    assert [path for path in home.rglob("*") if not path.is_dir()] == []


def test_short_directory_is_left_alone_while_its_process_lives_whatever_its_pid_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container next to this one, with the same temporary directory, ours is nobody's pid."""
    held = SocketDirectory(home / ("a" * 120))
    held.control.touch()
    monkeypatch.setattr("swarm.network.libp2p.rundir._stamp", lambda pid: "")
    sweep_temporary()
    assert held.control.exists()
    assert held._short is not None
    fcntl.flock(held._short.lock, fcntl.LOCK_UN)  # as its death does
    sweep_temporary()
    assert not held.control.parent.exists()
    held.close()


def test_short_directory_that_is_swept_before_it_is_locked_is_made_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, swept = rundir._open_directory, []

    def sweep_first(path: Path) -> int:
        if len(swept) < 2:
            descriptor = opened(path) if swept else -1
            swept.append(path)
            path.rmdir()
            return descriptor if descriptor >= 0 else opened(path)
        return opened(path)

    monkeypatch.setattr("swarm.network.libp2p.rundir._open_directory", sweep_first)
    held = SocketDirectory(home / ("a" * 120))
    assert held.control.parent.is_dir()
    assert held.control.parent not in swept
    held.close()
    assert not held.control.parent.exists()
