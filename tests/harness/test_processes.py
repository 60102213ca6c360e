"""The look at what is left finds what we left, however well hidden, and nothing that is somebody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from tests.harness.contained import EXIT_LEFTOVERS
from tests.harness.expect import wait_until
from tests.harness.processes import MARKER, assert_nothing_left, children_of, leftovers, our_processes, take_snapshot
from tests.harness.sources import ROOT

STAY = "import sys; print('up', flush=True); sys.stdin.read()"
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STAY!r}], stdin=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def stdin() -> Iterator[int]:
    """The reading end of a pipe: what reads it lives until the fixture ends."""
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


def test_leftovers_of_a_child_name_it_until_it_ends() -> None:
    before = take_snapshot()
    with subprocess.Popen([sys.executable, "-c", STAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [line for line in leftovers(before) if f"process {child.pid} " in line]
        with pytest.raises(AssertionError, match=f"process {child.pid} "):
            assert_nothing_left(before, deadline_s=0.02)
    assert_nothing_left(before)


def test_our_processes_of_an_orphan_in_another_session_find_it_by_its_marker(stdin: int) -> None:
    shown = subprocess.run([sys.executable, "-c", ORPHAN], stdin=stdin, capture_output=True, text=True, check=True)
    orphan = int(shown.stdout)
    assert orphan not in [process.pid for process in children_of(os.getpid())]
    assert orphan in [process.pid for process in our_processes()]
    os.kill(orphan, 9)
    wait_until(lambda: orphan not in [process.pid for process in our_processes()])


def test_our_processes_of_an_orphan_with_another_marker_leave_it_alone(stdin: int) -> None:
    environment = os.environ | {MARKER: os.environ[MARKER] + "0"}
    shown = subprocess.run(
        [sys.executable, "-c", ORPHAN], stdin=stdin, env=environment, capture_output=True, text=True, check=True
    )
    orphan = int(shown.stdout)
    assert orphan not in [process.pid for process in our_processes()]
    os.kill(orphan, 9)


def test_leftovers_of_a_bound_socket_name_its_path(home: Path) -> None:
    before = take_snapshot()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(home / "s"))
        assert f"socket {home / 's'}" in leftovers(before)  # other tests leave theirs for a moment
    (home / "s").unlink()
    assert f"socket {home / 's'}" not in leftovers(before)


def test_leftovers_of_shared_memory_name_it() -> None:
    before = take_snapshot()
    block = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert f"shared memory {block.name}" in leftovers(before)
    finally:
        block.close()
        block.unlink()
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    assert_nothing_left(before)


def contained(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.harness.contained", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_contained_command_that_ends_alone_gives_its_exit_code() -> None:
    ended = contained(sys.executable, "-c", "raise SystemExit(5)")
    assert (ended.returncode, "0 left" in ended.stderr) == (5, True)


def test_contained_command_that_leaves_an_orphan_fails_and_ends_it() -> None:
    script = (
        "import os, subprocess, sys\n"
        "reader, writer = os.pipe()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {STAY!r}], stdin=reader, stdout=subprocess.PIPE,"
        " stderr=subprocess.DEVNULL, pass_fds=[writer], start_new_session=True, env={})\n"
        "child.stdout.readline()\n"
        "print(child.pid)\n"
    )
    ended = contained("--grace", "0.1", sys.executable, "-c", script)
    assert ended.returncode == EXIT_LEFTOVERS
    assert f"left behind: process {ended.stdout.strip()} " in ended.stderr
    assert not Path("/proc", ended.stdout.strip()).exists()
