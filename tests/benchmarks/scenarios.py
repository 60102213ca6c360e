"""Scenarios that come with the project, played one after the other as people play them: what each came to.

In containers where a Docker engine answers (``make image`` and ``docker/base-image.sh --nemesis`` first), else among
processes. ``SCENARIOS="kill-storm nat"`` in the environment plays these only, ``ROUNDS=20`` so many times. What each
play left lies in ``out/scenarios-TIME/NAME-ROUND``; Ctrl-C or SIGTERM ends the play and tells what was before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.runner import ROOT, Result, Size

ROUNDS_IN_FULL = 3
LEAVE_S = 120.0
SMOKE = """
name = "smoke"
proves = "A play goes from its first peer to its report."
seed = 1
[swarm]
stages = 1
replicas = 2
trainers = 1
[until]
steps = 6
[[fault]]
do = "kill"
peers = ["host-0-1"]
on = { event = "StepClosed", where = { step = 2 } }
[expect]
at_most = { digest_mismatches = 0, lost = 0, duplicated = 0, unexpected_deaths = 0 }
"""
"""The shortest play there is with a fault in it; among processes, so that neither an engine nor an image is needed."""
KEYS = ("plays", "kept", "not_kept", "faults", "lost", "duplicated", "digest_mismatches")
FIGURES = (
    "faults", "steps", "seconds", "max_gap_s", "throughput_retained", "throughput_retained_raw", "participation",
    "lost", "duplicated", "digest_mismatches",
)  # fmt: skip
COLUMNS = ("scenario", "on", "verdict", *FIGURES, "load", "whole_s", "what was wrong")


async def run(size: Size) -> Result:
    """Every scenario of docker/scenarios played with faults, its verdict and figures; --full: three times in a row."""
    if size is Size.SMOKE:
        with tempfile.TemporaryDirectory(prefix="scenarios-") as scratch:
            path = Path(scratch) / "smoke.toml"
            path.write_text(SMOKE, encoding="utf-8")
            return to_result(await _play_all([path], 1, Path(scratch) / "out", "--on", "processes"))
    paths = sorted((ROOT / "docker" / "scenarios").glob("*.toml"))
    only = os.environ.get("SCENARIOS", "").split()
    chosen = [path for path in paths if not only or path.stem in only]
    rounds = int(os.environ.get("ROUNDS", ROUNDS_IN_FULL if size is Size.FULL else 1))
    root = ROOT / "out" / f"scenarios-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    return to_result(await _play_all(chosen, rounds, root))


async def _play_all(chosen: Sequence[Path], rounds: int, root: Path, *flags: str) -> list[dict[str, Any]]:
    """Their reports, up to the one that is interrupted."""
    plays: list[dict[str, Any]] = []
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):  # what was played counts
        for number in range(1, rounds + 1):
            for path in chosen:
                plays.append(await play(path, root / f"{path.stem}-{number}", *flags))
                print(
                    f"scenarios: {path.stem} {number}: {plays[-1]['verdict']} {plays[-1]['problems']}", file=sys.stderr
                )
    return plays


async def play(path: Path, out: Path, *flags: str) -> dict[str, Any]:
    """One play; its report. On cancel it ends in order first. Raises RuntimeError for one that left no report."""
    load, began = round(os.getloadavg()[0], 1), time.monotonic()
    command = (sys.executable, "-m", "peers.cli", "chaos", str(path), "--json", "--out", str(out), *flags)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), LEAVE_S)
    lines = said.splitlines()
    if not lines:
        raise RuntimeError(f"{path.stem} could not be played: {complained.decode()[-2000:]}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report | {"load": load, "whole_s": round(time.monotonic() - began, 1)}


def to_result(plays: Sequence[dict[str, Any]]) -> Result:
    """A row for each play; how many of each scenario were kept, and what was lost in all of them."""
    rows = [
        [play["scenario"], play["world"], play["verdict"], *(play[name] for name in FIGURES),
         play["load"], play["whole_s"],
         " ".join("; ".join(play["problems"]).split())[:200]]
        for play in plays
    ]  # fmt: skip
    kept = Counter(play["scenario"] for play in plays if play["verdict"] == "kept")
    played = Counter(play["scenario"] for play in plays)
    summary: dict[str, Any] = {
        "plays": len(plays),
        "kept": sum(kept.values()),
        "not_kept": {name: count - kept[name] for name, count in sorted(played.items()) if count > kept[name]},
    }
    for name in ("faults", "lost", "duplicated", "digest_mismatches"):
        summary[name] = sum(play[name] or 0 for play in plays)
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=NOTES)


NOTES = (
    "each scenario by `swarm chaos FILE --json`, one after the other; load: of the machine when the play began; "
    "whole_s: with start and end",
    "throughput: committed tokens a second since the first fault ÷ before; divided by the share of capacity left but "
    "for _raw",
)
