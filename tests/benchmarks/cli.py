"""How long a person waits for the commands that are typed all day."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

from peers.exit_codes import EXIT_DOCTOR
from swarm.network.addresses import GREETING
from tests.benchmarks._cli_page import VIEWERS, page_figures
from tests.benchmarks.runner import ROOT, Cell, Result, Size
from tests.harness.standing_peer import running

TARGET_MS = {"help": 150, "status": 150, "peers": 150, "doctor_quick": 300}
DOCTOR_TARGET_S = 15
MEMBERS = 64
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 12, Size.FULL: 30}
DOCTOR_ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 3, Size.FULL: 10}
COMMANDS = {
    "help": ("--help",),
    "status": ("status",),
    "peers": ("peers", "--json"),
    "doctor_quick": ("doctor", "--quick"),
}
KEYS = (
    *(f"{name}_ms" for name in COMMANDS), *(f"{name}_target_ms" for name in COMMANDS), "doctor_s", "doctor_target_s",
    "viewers_core_share", "viewers_core_share_target", "serving_core_share", "viewers_step_ratio", "page_bytes_s",
    "first_paint_ms", "first_paint_target_ms", "first_run_ms",
)  # fmt: skip
PAGE_S = {Size.SMOKE: 2.0, Size.DEFAULT: 15.0, Size.FULL: 60.0}
PAGE_LOADS = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 20}
PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"


def run(size: Size) -> Result:
    """Milliseconds of swarm --help, status, peers, doctor --quick; seconds of swarm doctor; what a dashboard costs."""
    with tempfile.TemporaryDirectory(prefix="cli-") as scratch, running(Path(scratch), "--members", str(MEMBERS)):
        once = _runner(Path(scratch))
        found = measure(once, ROUNDS[size])
        with silent_peer() as address:
            told = result(found, [once(("doctor", address)) for _ in range(DOCTOR_ROUNDS[size])])
    return with_page(told, page_figures(seconds=PAGE_S[size], loads=PAGE_LOADS[size]))


def with_page(told: Result, page: Mapping[str, float | None]) -> Result:
    """Add what a dashboard costs."""
    targets = {"viewers_core_share_target": 0.05, "first_paint_target_ms": 1000}
    notes = (
        f"viewers_core_share: core-seconds a second of a peer of a small swarm that serves its dashboard to {VIEWERS} "
        "viewers on this machine, less those without; viewers_step_ratio: the swarm's steps a second with them over "
        "those without",
        "first_paint_ms of a fresh page in a headless browser, first_run_ms until the run is on it; null without one",
    )
    return dataclasses.replace(told, summary=told.summary | page | targets, notes=(*told.notes, *notes))


@contextmanager
def silent_peer() -> Iterator[str]:
    """The address of somebody who greets as a peer does, and says nothing more: what one waits for the longest."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as kept:

        def greet() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    caller, _ = listener.accept()
                    kept.enter_context(caller).sendall(GREETING)

        greeter = threading.Thread(target=greet)
        greeter.start()
        try:
            yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{PEER}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            greeter.join()


def measure(once: Callable[[Sequence[str]], float], rounds: int) -> dict[str, list[float]]:
    """Seconds of every command, in turns; ``once`` runs one. A first round only warms the file cache."""
    found: dict[str, list[float]] = {name: [] for name in ("python", *COMMANDS)}
    for number in range(rounds + 1):
        for name in found:
            seconds = once(COMMANDS.get(name, ()))
            if number:
                found[name].append(seconds)
    return found


def result(found: Mapping[str, Sequence[float]], doctor: Sequence[float]) -> Result:
    """Medians beside the target, in milliseconds; of ``doctor`` the worst, in seconds."""
    rows: list[list[Cell]] = []
    for name, seconds in found.items():
        words = " ".join(("swarm", *COMMANDS[name])) if name in COMMANDS else "python -c pass"
        rows.append([words, *(round(1000 * value, 1) for value in (median(seconds), min(seconds), max(seconds)))])
    milliseconds = (round(1000 * value, 1) for value in (median(doctor), min(doctor), max(doctor)))
    rows.append(["swarm doctor INVITE", *milliseconds])
    summary: dict[str, float] = {f"{name}_ms": round(1000 * median(found[name]), 1) for name in COMMANDS}
    targets: dict[str, float] = {f"{name}_target_ms": TARGET_MS[name] for name in COMMANDS}
    targets |= {"doctor_s": round(max(doctor), 2), "doctor_target_s": DOCTOR_TARGET_S}
    return Result(
        columns=("command", "median_ms", "min_ms", "max_ms"),
        rows=rows,
        summary=summary | targets,
        notes=(
            f"a whole process each time, from its start to its exit; {len(found['help'])} rounds, commands in turns",
            f"the peer asked is a process of its own with a real control socket, in a swarm of {MEMBERS}; it trains "
            "nothing: a busy one may answer later",
            f"doctor_s is the slowest of {len(doctor)} of an invite whose peer greets and then says nothing",
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
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        took = time.perf_counter() - started
        if ended.returncode not in (0, EXIT_DOCTOR):
            raise subprocess.CalledProcessError(ended.returncode, command)
        return took

    return once
