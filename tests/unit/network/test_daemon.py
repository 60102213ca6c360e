"""Reading what a daemon prints, with programs that print what we want."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path

import pytest

from swarm.errors import BugError, Unreachable
from swarm.network.daemon import Daemon, DaemonConfig, signal_name


async def _printing(script: str) -> Daemon:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", script, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    return Daemon(process)


async def test_daemon_that_prints_endless_lines_is_drained_and_gets_ready() -> None:
    daemon = await _printing(
        "import sys\nprint('x' * 1_000_000)\nprint('{\"logger\": \"a\", \"msg\": \"b\"}')\nprint('Peer ID: Q', flush=True)\n"
        "sys.stdin.read()\nwhile True: print('y' * 100_000)"
    )
    async with asyncio.timeout(10):
        await daemon._wait_ready()
    assert daemon.running
    assert "a: b" in daemon._tail()
    await daemon.stop()
    await daemon.stop()
    assert not daemon.running


async def test_daemon_that_ends_before_it_is_ready_tells_its_last_words() -> None:
    daemon = await _printing("print('no such port'); raise SystemExit(3)")
    with pytest.raises(Unreachable, match=r"exit code 3; it said: .*no such port"):
        await daemon._wait_ready()
    await daemon.stop()


async def test_daemon_that_ignores_sigterm_is_killed() -> None:
    daemon = await _printing(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('Peer ID: Q', flush=True)\n"
        "while True: signal.pause()"
    )
    await daemon._wait_ready()
    await daemon.stop()
    assert await daemon.wait() == -signal.SIGKILL


def test_daemon_started_from_another_thread_is_our_bug() -> None:
    config = DaemonConfig(key_file=Path("k"), control=Path("c"), listen=())
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(Daemon.start(config))
        except BugError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(failures[0])


def test_exit_code_is_told_in_words() -> None:
    assert (signal_name(-9), signal_name(1)) == ("killed by SIGKILL", "exit code 1")
