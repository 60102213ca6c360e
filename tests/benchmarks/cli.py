"""How long a person waits for the commands that are typed all day."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.runner import ROOT, Cell, Result, Size
from tests.harness.standing_peer import running

TARGET_MS = 300
MEMBERS = 64
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 12, Size.FULL: 30}
KEYS = ("help_ms", "status_ms", "peers_ms", "help_target_ms", "status_target_ms", "peers_target_ms")
COMMANDS = {"help": ("--help",), "status": ("status",), "peers": ("peers", "--json")}


def run(size: Size) -> Result:
    """Milliseconds of swarm --help, status and peers --json, with a live peer of a swarm of 64 to ask."""
    with tempfile.TemporaryDirectory(prefix="cli-") as scratch, running(Path(scratch), "--members", str(MEMBERS)):
        return result(measure(_runner(Path(scratch)), ROUNDS[size]))


def measure(once: Callable[[Sequence[str]], float], rounds: int) -> dict[str, list[float]]:
    """Seconds of every command, in turns; ``once`` runs one. A first round only warms the file cache."""
    found: dict[str, list[float]] = {name: [] for name in ("python", *COMMANDS)}
    for number in range(rounds + 1):
        for name in found:
            seconds = once(COMMANDS.get(name, ()))
            if number:
                found[name].append(seconds)
    return found


def result(found: Mapping[str, Sequence[float]]) -> Result:
    """Medians beside the target, in milliseconds."""
    rows: list[list[Cell]] = []
    for name, seconds in found.items():
        words = " ".join(("swarm", *COMMANDS[name])) if name in COMMANDS else "python -c pass"
        rows.append([words, *(round(1000 * value, 1) for value in (median(seconds), min(seconds), max(seconds)))])
    summary = {f"{name}_ms": round(1000 * median(found[name]), 1) for name in COMMANDS}
    targets = {f"{name}_target_ms": TARGET_MS for name in COMMANDS}
    return Result(
        columns=("command", "median_ms", "min_ms", "max_ms"),
        rows=rows,
        summary=summary | targets,
        notes=(
            f"a whole process each time, from its start to its exit; {len(found['help'])} rounds, commands in turns",
            f"the peer asked is a process of its own with a real control socket, in a swarm of {MEMBERS}; it trains "
            "nothing: a busy one may answer later",
        ),
    )


def _runner(home: Path) -> Callable[[Sequence[str]], float]:
    program = Path(sys.executable).with_name("swarm")
    swarm = [str(program)] if program.is_file() else [sys.executable, "-m", "peers.cli"]
    environment = os.environ | {"SWARM_HOME": str(home)}

    def once(arguments: Sequence[str]) -> float:
        command = [*swarm, *arguments] if arguments else [sys.executable, "-c", "pass"]
        started = time.perf_counter()
        # No time-out: with one, subprocess looks for the end every 50 ms only, and that would be measured.
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - started

    return once
