"""Plays each case of a benchmark in a process of its own, as many at a time as there are cores."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.runner import ROOT


async def play_cases(benchmark: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play all cases, those that come first first; they are killed on cancel.

    Args:
        benchmark: Its module's name; ``tests.benchmarks._{benchmark}_case`` takes a case as JSON, and prints its
            figures as the last line of stdout.
        cases: What each is given.

    Returns:
        The figures of each case, in order. Raises RuntimeError, in a group, with what a case said when it fails.
    """
    free = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_play(benchmark, case, free)) for case in cases]
    return [task.result() for task in tasks]


async def _play(benchmark: str, case: dict[str, Any], free: asyncio.Semaphore) -> dict[str, Any]:
    async with free:
        print(f"{benchmark}: {case} begins", file=sys.stderr)
        command = (sys.executable, "-m", f"tests.benchmarks._{benchmark}_case", json.dumps(case))
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            said, complained = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"{case} ended with {process.returncode}: {complained.decode()[-2000:]}")
        figures: dict[str, Any] = json.loads(said.splitlines()[-1])
        print(f"{benchmark}: {case} is done", file=sys.stderr)
        return figures
