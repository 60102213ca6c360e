"""Programs that must not outlive the one who started them."""

from __future__ import annotations

import signal
import subprocess
import threading

from peers.local.launcher import CANNOT_RUN, launched


def test_program_ends_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[str]] = []
    go_on = threading.Event()

    def start() -> None:
        command = launched(["sh", "-c", "echo there; exec sleep 600"])
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "there\n"
        go_on.wait()

    thread = threading.Thread(target=start)
    thread.start()
    go_on.set()
    thread.join()
    with started[0] as process:
        assert process.wait(timeout=300) == -signal.SIGKILL


def test_program_that_cannot_be_run_says_why() -> None:
    done = subprocess.run(launched(["/nowhere/at-all"]), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (CANNOT_RUN, "\0No such file or directory")
