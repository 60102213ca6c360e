"""Reading what a daemon prints, with programs that print what we want."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.errors import BugError, Unreachable
from swarm.network.libp2p.daemon import Daemon, DaemonConfig, signal_name


@asynccontextmanager
async def _printing(script: str) -> AsyncIterator[Daemon]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", script, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    daemon = Daemon(process)
    try:
        yield daemon
    finally:
        await daemon.stop()


async def test_daemon_that_prints_endless_lines_is_drained_and_gets_ready() -> None:
    script = """
        import signal
        for size in (1_000_000, 65_535, 65_536, 65_537, 1):
            print('x' * size)
        print('{"logger": "a", "msg": "b"}')
        print('Peer ID: Q', flush=True)
        signal.pause()
    """
    async with _printing(textwrap.dedent(script)) as daemon:
        async with asyncio.timeout(60):
            await daemon._wait_ready()
        assert daemon.running
        assert "a: b" in daemon.tail()
        await daemon.stop()
        assert not daemon.running


async def test_daemon_that_ends_before_it_is_ready_tells_its_last_words() -> None:
    async with _printing("print('no such port'); raise SystemExit(3)") as daemon:
        with pytest.raises(Unreachable, match=r"exit code 3; it said: .*no such port"):
            await daemon._wait_ready()


async def test_daemon_that_ignores_sigterm_is_killed() -> None:
    script = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('Peer ID: Q', flush=True)\nsignal.pause()"
    )
    async with _printing(script) as daemon:
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
