"""Finds a benchmark, runs it, prints a table and, as the last line of stdout, one JSON object.

A benchmark is a module of this package with ``run(size: Size) -> Result``, plain or ``async``, and ``KEYS``, the names
of the figures in its summary, which are the same at every size. It measures its candidates in one run, in turns, and
gives medians: on a shared machine anything else compares the weather. A smoke only shows that it still runs.
Whether a target is met does not change the exit code (0); an exception does (1), and so does an unknown name (2).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests import benchmarks
from tests.benchmarks import _log

OURS = frozenset({"swarm", "peers", "data_shards", "tests"})
ROOT = Path(__file__).resolve().parents[2]

Cell = str | int | float | None


class Size(StrEnum):
    """How much is measured: whether it runs at all, in seconds; what a developer waits for; all there is."""

    SMOKE = "smoke"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns, units in the column names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark found.

    ``columns`` and ``rows`` are the table, units in the column names. ``summary`` holds the figures that count, ready
    for JSON, each target beside what was measured. ``notes`` say what a reader must know: what was not measured, what
    failed, what is noise. ``tables`` are further ones, each with its title.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    summary: dict[str, Any]
    notes: Sequence[str] = field(default=())
    tables: Sequence[Table] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A result with everything needed to repeat it."""

    name: str
    size: Size
    result: Result
    date: str
    machine: str
    commit: str
    command: str
    seconds: float

    def line(self) -> str:
        """One JSON object on one line; the summary's keys are its own, first."""
        body = {
            **self.result.summary,
            "benchmark": self.name,
            "full": self.size is Size.FULL,
            "smoke": self.size is Size.SMOKE,
            "date": self.date,
            "machine": self.machine,
            "commit": self.commit,
            "command": self.command,
            "seconds": round(self.seconds, 3),
            "columns": list(self.result.columns),
            "rows": [list(row) for row in self.result.rows],
            "notes": list(self.result.notes),
        }
        if self.result.tables:
            body["tables"] = [asdict(table) for table in self.result.tables]
        return json.dumps(body, ensure_ascii=False, allow_nan=False)

    def entry(self) -> dict[str, Any]:
        """The same for the log, see ``_log``."""
        about = ("date", "name", "size", "command", "commit", "seconds", "machine")
        return {name: getattr(self, name) for name in about} | asdict(self.result)


def discover() -> dict[str, Callable[[Size], Any]]:
    """Name → ``run`` of every benchmark; a name has hyphens where its module has underscores. Imports all modules of
    the package, so they import torch inside ``run``.

    One that needs a package which this machine lacks is left out, and stderr says so; raises ModuleNotFoundError where
    it is a module of ours that is gone.
    """
    found = {}
    for module in modules():
        try:
            run = getattr(importlib.import_module(f"{benchmarks.__name__}.{module}"), "run", None)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OURS:
                raise
            print(f"{module} cannot run here: {error}", file=sys.stderr)
            continue
        if callable(run):
            found[module.replace("_", "-")] = run
    return found


def modules() -> list[str]:
    """Return the names of the modules that are benchmarks, imported or not."""
    names = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in names if name != "runner" and not name.startswith(("_", "test_")))


def measure(name: str, run: Callable[[Size], Any], *, size: Size, command: str) -> Measurement:
    """Runs one benchmark to its end; whatever it raises passes through.

    Raises:
        ValueError: The summary has other keys than the benchmark's module declares as ``KEYS``.
    """
    started = time.monotonic()
    result = run(size)
    if inspect.isawaitable(result):
        import uvloop  # here, so that a plain benchmark needs no more than what it measures

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_awaited(result))
    declared = declared_keys(run)
    if declared is not None and set(result.summary) != set(declared):
        odd = ", ".join(sorted(set(result.summary) ^ set(declared)))
        raise ValueError(f"the summary of {name} and the KEYS of its module differ in {odd}")
    return Measurement(
        name=name,
        size=size,
        result=result,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        machine=machine(),
        commit=commit(),
        command=command,
        seconds=time.monotonic() - started,
    )


def declared_keys(run: Callable[[Size], Any]) -> tuple[str, ...] | None:
    """Return ``KEYS`` of the module that ``run`` is from, None where it has none."""
    return getattr(sys.modules[run.__module__], "KEYS", None)


async def _awaited(result: Awaitable[Result]) -> Result:
    return await result


def table(result: Result | Table) -> str:
    """The rows under their columns, numbers to the right."""
    cells = [[_log.shown(cell) for cell in row] for row in result.rows]
    widths = [max(len(text) for text in column) for column in zip(result.columns, *cells, strict=True)]
    numeric = [all(not isinstance(row[at], str) for row in result.rows) for at in range(len(widths))]
    lines = []
    for row in [list(result.columns), ["-" * width for width in widths], *cells]:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def machine() -> str:
    """The machine in one line: processor, memory, GPU, kernel, Python and torch."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{len(os.sched_getaffinity(0))} × {_processor()}", f"{memory_gib:.0f} GiB", *_gpus()]
    parts += [f"Linux {platform.release()}", f"Python {platform.python_version()}"]
    return ", ".join([*parts, f"torch {importlib.metadata.version('torch')}"])


def commit() -> str:
    """The commit measured, with ``+`` when files differ from it; ``unknown`` outside a clone."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    return head + ("+" if _output("git", "status", "--porcelain") else "") if head else "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()


def _gpus() -> list[str]:
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def _output(*command: str) -> str:
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def show(measurement: Measurement) -> None:
    """Print the machine, the table, the notes and, last, the JSON line."""
    print(f"machine: {measurement.machine}\n\n{table(measurement.result)}\n")
    for more in measurement.result.tables:
        print(f"{more.title}\n\n{table(more)}\n")
    for note in measurement.result.notes:
        print(f"note: {note}")
    print(measurement.line(), flush=True)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure something.")
    parser.add_argument("name", nargs="?", help="the benchmark; without it: a list")
    sizes = parser.add_mutually_exclusive_group()
    for size, what in ((Size.SMOKE, "as little as there is, in seconds: does it run?"), (Size.FULL, "larger, slower")):
        sizes.add_argument(f"--{size}", dest="size", action="store_const", const=size, default=Size.DEFAULT, help=what)
    parser.add_argument("--log", action="store_true", help="add the result to tests/benchmarks/log.jsonl and its page")
    parser.add_argument("--page", action="store_true", help="make the page tests/benchmarks/LOG.md anew, and no more")
    chosen = parser.parse_args(arguments)
    if chosen.log and chosen.size is Size.SMOKE:
        parser.error("a smoke measures nothing that is worth a place in the log: --smoke and --log exclude each other")
    if chosen.page:
        _log.renew()
        return 0
    known = discover()
    if chosen.name is None:
        for name, run in sorted(known.items()):
            print(f"{name:16} {(inspect.getdoc(run) or 'no description').splitlines()[0]}")
        if not known:
            print("no benchmarks yet")
        return 0
    if chosen.name not in known:
        names = ", ".join(sorted(known)) or "none yet"
        print(f"no benchmark is called {chosen.name!r}; there are: {names}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "tests.benchmarks", *arguments])
    measurement = measure(chosen.name, known[chosen.name], size=chosen.size, command=command)
    if chosen.log:
        _log.append(measurement.entry())
    show(measurement)
    return 0
