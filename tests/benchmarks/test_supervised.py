"""A benchmark that is interrupted ends with one line, and whatever it started with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.benchmarks.runner import ROOT
from tests.harness.contained import EXIT_LEFTOVERS
from tests.harness.expect import wait_until

PROGRAM = """
import os, signal, subprocess, sys
from tests.benchmarks._supervised import supervised

def work():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    stray = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
    stray.stdout.readline()
    print(stray.pid, flush=True)
    print("measuring", file=sys.stderr)
    {work}

sys.exit(supervised("plain", work, {grace_s}))
"""
ENDS_IN_ORDER = "signal.pause()"
IGNORES_IT = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
LONG_S = 600.0

Start = Callable[[str, float], tuple["subprocess.Popen[str]", int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the program; afterwards it is gone, whatever the test found."""
    begun: list[subprocess.Popen[str]] = []

    def start(work: str, grace_s: float) -> tuple[subprocess.Popen[str], int]:
        program = PROGRAM.format(work=work, grace_s=grace_s)
        one = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, stdout=-1, stderr=-1)
        begun.append(one)
        assert one.stdout is not None
        return one, int(one.stdout.readline())

    yield start
    for one in begun:
        one.kill()
        one.communicate()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_benchmark_ends_with_one_line_and_leaves_nothing(start: Start, number: int, code: int) -> None:
    one, stray = start(ENDS_IN_ORDER, LONG_S)
    assert one.stderr.readline() == "measuring\n"
    one.send_signal(number)
    _, said = one.communicate()
    assert (one.returncode, said) == (code, "plain was interrupted\n")
    assert gone(stray)


def test_benchmark_that_does_not_end_in_order_is_killed_after_its_grace(start: Start) -> None:
    one, stray = start(IGNORES_IT, 0.2)
    assert one.stdout.readline() == "deaf\n"
    one.send_signal(signal.SIGINT)
    assert one.communicate()[1].endswith("plain was interrupted\n")
    assert (one.returncode, gone(stray)) == (130, True)


def test_second_interruption_waits_for_nothing(start: Start) -> None:
    one, stray = start(IGNORES_IT, LONG_S)
    assert one.stdout.readline() == "deaf\n"
    one.send_signal(signal.SIGINT)
    wait_until(lambda: not _pending(one.pid), what="the first to be taken")
    one.send_signal(signal.SIGINT)
    one.communicate()
    assert (one.returncode, gone(stray)) == (130, True)


def _pending(pid: int) -> bool:
    """Whether a signal waits to be taken."""
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))


def test_what_outlives_a_benchmark_is_named_and_killed_and_its_exit_code_says_so(start: Start) -> None:
    one, stray = start("return 0", 0.2)
    said = one.communicate()[1]
    assert one.returncode == EXIT_LEFTOVERS
    assert f"left behind: process {stray} " in said
    assert gone(stray)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_of_the_grace_after_the_end_waits_for_nothing(start: Start, number: int, code: int) -> None:
    one, stray = start("print(os.getpid(), flush=True); return 0", LONG_S)
    child = int(one.stdout.readline())
    assert one.stderr.readline() == "measuring\n"  # what is not passed on by then, nobody hears
    wait_until(lambda: gone(child), what="the child's end")
    one.send_signal(number)
    assert one.communicate()[1] == "plain was interrupted\n"
    assert (one.returncode, gone(stray)) == (code, True)


@pytest.mark.parametrize(("work", "code"), [("stray.kill(); stray.wait(); return 7", 7), ("stray.kill(); 1 / 0", 1)])
def test_benchmark_that_ends_by_itself_gives_its_exit_code(start: Start, work: str, code: int) -> None:
    one, _ = start(work, LONG_S)
    said = one.communicate()[1]
    assert one.returncode == code
    assert ("ZeroDivisionError" in said) == (code == 1)
