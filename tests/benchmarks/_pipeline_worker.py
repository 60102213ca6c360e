"""Processes of the benchmark ``pipeline``: started as modules, asked in JSON lines, ended with their input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from tests.benchmarks._supervised import unlink_shared
from tests.benchmarks.runner import ROOT

_START_S = 180.0
_ANSWER_S = 240.0
_END_S = 15.0
_MAX_LINE_BYTES = 1 << 20


class Worker:
    """A process of ours. It prints one line when it is ready, then one for each order."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self._process = process
        self.hello = hello
        self._owes = False
        self._family = {process.pid}

    @classmethod
    async def start(cls, module: str, *arguments: str, within_s: float = _START_S) -> Worker:
        """Raises RuntimeError when it ends before it is ready, TimeoutError when it takes too long. Cancelled, it
        leaves no process."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT, limit=_MAX_LINE_BYTES,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        worker = cls(process, {})
        try:
            worker.hello = await worker._hear(within_s)
        except BaseException:
            await worker.stop()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._process.pid

    def descendants(self) -> list[int]:
        """Of everything it has started, the daemon for one."""
        found = [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        self._family.update(found)
        return found

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give an order and wait for the answer. Raises RuntimeError when the process ended instead."""
        assert self._process.stdin is not None
        self._owes = True
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._hear(_ANSWER_S)
        self._owes = False
        return answer

    async def stop(self, *, at_once: bool = False) -> None:
        """End it with its input, and with a signal when that does not help, or when it owes an answer that nobody waits
        for any more; what it started goes too."""
        family = [psutil.Process(pid) for pid in self.descendants()] if self._process.returncode is None else []
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(0 if at_once or self._owes else _END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        for process in family:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        unlink_shared(self._family)

    async def _hear(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(deadline_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} of the benchmark ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer


def say(answer: Mapping[str, Any]) -> None:
    """What a worker answers with."""
    print(json.dumps(answer), flush=True)
