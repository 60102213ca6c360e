"""Plays each case of a benchmark in a process of its own, as many at a time as there are cores."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def play_cases(benchmark: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play all cases, those that come first first, in processes forked from one that has imported what they need.

    Args:
        benchmark: Its module's name; ``play(root, **case)`` of ``tests.benchmarks._{benchmark}_case`` plays one, in an
            empty directory, and returns its figures.
        cases: What each is given.

    Returns:
        The figures of each case, in order. Raises what the first case raised that failed.
    """
    forks = multiprocessing.get_context("forkserver")
    module = f"tests.benchmarks._{benchmark}_case"
    forks.set_forkserver_preload([module])
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=forks, max_tasks_per_child=1) as pool:
        return list(pool.map(functools.partial(_play, module), cases))


def _play(module: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    print(f"{module}: {case} begins", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="case-") as root:
        figures: dict[str, Any] = importlib.import_module(module).play(Path(root), **case)
    print(f"{module}: {case} is done", file=sys.stderr, flush=True)
    return figures
