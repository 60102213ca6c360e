"""Processes of a benchmark: forked from one that has imported what they need, asked in lines, ended with their input.

A worker's module has ``main``, plain or a coroutine function; it says one line when it is ready, then one for each line
of its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psutil

from tests.benchmarks._supervised import unlink_shared

PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "hivemind", "uvloop", "swarm.network.endpoint")
_START_S = 180.0
_ANSWER_S = 240.0
_END_S = 15.0
_MAX_LINE_BYTES = 1 << 20
_FORKS = multiprocessing.get_context("forkserver")


class Worker:
    """A process of ours. It prints one line when it is ready, then one for each order."""

    def __init__(self, process: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.hello: dict[str, Any] = {}
        self._owes = False
        self._family = {self.pid}

    @classmethod
    async def start(cls, module: str, *arguments: str, within_s: float = _START_S) -> Worker:
        """Raises RuntimeError when it ends before it is ready, TimeoutError when it takes too long. Cancelled, it
        leaves no process."""
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        _FORKS.set_forkserver_preload([*PRELOAD])
        ours, theirs = socket.socketpair()
        with theirs:
            process = _FORKS.Process(target=_live, args=(theirs, module, arguments))
            process.start()
        worker = cls(process, *await asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES))
        try:
            worker.hello = await worker._hear(within_s)
        except BaseException:
            await worker.stop()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return int(self._process.pid)

    def descendants(self) -> list[int]:
        """Of everything it has started, the daemon for one."""
        found = [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        self._family.update(found)
        return found

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give an order and wait for the answer. Raises RuntimeError when the process ended instead."""
        self._owes = True
        self._writer.write(json.dumps(order).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: anyone who hears says so
            await self._writer.drain()
        answer = await self._hear(_ANSWER_S)
        self._owes = False
        return answer

    async def ended(self, within_s: float) -> int | None:
        """Return its exit code, None where it still lives then."""
        await asyncio.to_thread(self._process.join, within_s)
        code: int | None = self._process.exitcode
        return code

    async def stop(self, *, at_once: bool = False) -> None:
        """End it with its input, and with a signal when that does not help, or when it owes an answer that nobody waits
        for any more; what it started goes too."""
        family = [psutil.Process(pid) for pid in self.descendants()] if self._process.exitcode is None else []
        self._writer.close()
        if await self.ended(0 if at_once or self._owes else _END_S) is None:
            self._process.kill()
            await self.ended(_END_S)
        for process in family:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        unlink_shared(self._family)

    async def _hear(self, deadline_s: float) -> dict[str, Any]:
        async with asyncio.timeout(deadline_s):
            line = await self._reader.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} of the benchmark ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer


def say(answer: Mapping[str, Any]) -> None:
    """What a worker answers with."""
    print(json.dumps(answer), flush=True)


async def orders() -> AsyncIterator[dict[str, Any]]:
    """What a worker with a loop is asked, until its input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _live(channel: socket.socket, module: str, arguments: tuple[str, ...]) -> None:
    """In the worker: its ``main``, with the channel for input and output."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # hivemind's own, as where nobody forked it
    for number in (0, 1):
        os.dup2(channel.fileno(), number)
    channel.close()
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    found = importlib.import_module(module).main(*arguments)
    if inspect.isawaitable(found):
        import uvloop

        uvloop.run(found)
    sys.stdout.flush()
