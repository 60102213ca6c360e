"""Everything that must hold before a change is kept, in the time there is: ``python -m tests.harness.ci``, which
``.ci/run`` calls when ``.venv`` is made.

First what is always run; then the rest, of which the commit draws what there is time for (:mod:`tests.harness.budget`).
A phase of the rest that is over its time is ended: what it had not run is listed as *not run*, and what had failed by
then has failed. After each phase nothing of ours may be left: no process, socket, shared memory, namespace or file.
Exits 0 if nothing that was run has failed, 1 if something has, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.harness import browser, in_engine, namespaces
from tests.harness.budget import MARGIN, Phase, measure, share, slowness
from tests.harness.drawn import OUTCOMES, commit, told
from tests.harness.processes import SHARED_MEMORY, children_of, mapped_by_others
from tests.harness.sources import ROOT

PYTHON = str(ROOT / ".venv/bin/python")
TOTAL_S = 45 * 60.0
"""What a run may take, of what is drawn."""
CLOSING_S = 30.0
"""Kept for what comes after the last phase."""
END_S = 180.0
"""How long a phase that is ended may take for it: longer than what it started has time to end in."""
HANGS_S = 900.0
"""A test that is under way for so long on a good machine, when its phase is ended, hangs: no other takes half of it."""
_SHARED = ((SHARED_MEMORY, "*"), (Path("/tmp"), "hivemind-*"))
"""The machine's own places for temporary things, and how what we make is called there."""

now = time.monotonic


@dataclass(frozen=True, slots=True)
class Step:
    """A phase with its command, what tells it its minutes and seed where it can draw, and why it cannot run here.
    ``needs``: for each marker of tests that it runs beside each other, why they cannot."""

    phase: Phase
    command: tuple[str, ...]
    draws: tuple[str, ...] = ()
    why_not: Callable[[], str] = lambda: ""
    needs: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    clear: Callable[[], list[str]] = list
    """Takes away what it made elsewhere, and names what should not have been there any more."""


@dataclass(slots=True)
class Outcome:
    """What became of a phase. ``cut``: it was over its time. ``tests``: outcomes of tests and how many were not run."""

    phase: Phase
    code: int
    seconds: float
    cut: bool = False
    tests: Counter[str] = field(default_factory=Counter)
    not_run: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether something that was run is not as it must be."""
        return bool(self.left or self.tests["failed"] or (self.code and not self.cut))

    def row(self) -> str:
        """For people."""
        how = "FAILED" if self.failed else "ended for want of time" if self.cut else "passed"
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.tests.items()))
        return (
            f"{self.phase.name:24} {self.seconds:6.0f} s  {how}{f' (exit {self.code})' if self.code else ''}  {counts}"
        )


def steps() -> list[Step]:
    """Return all there is to run. The seconds are those of a good machine."""
    contained = (PYTHON, "-m", "tests.harness.contained")
    make = (*contained, "make", "--no-print-directory")
    pytest = (*contained, PYTHON, "-m", "pytest")
    two = (*pytest, "-n", "2", "--dist", "loadgroup", "--fired")
    drawing = ("--budget", "{minutes}", "--draw", "{seed}")
    quiet = ("-o", "faulthandler_timeout=0")
    return [
        Step(Phase("lint", 45, always=True), (*make[3:], "lint")),
        Step(Phase("manual", 5, always=True), (*make[3:], "docs"), why_not=_no_manual),
        Step(Phase("tests: always", 210, always=True), (*make, "test", "ARGS=--part always --fired --durations=15")),
        Step(Phase("tests: the rest", 100, least_s=15), (*two, "--part", "rest", "--durations=15"), drawing),
        Step(Phase("long tests", 350, least_s=15), (*two, "-m", "long", "--durations=15"), drawing),
        Step(
            Phase("benchmarks", 190, least_s=15), (*two, "-m", "smoke", *quiet, "--durations=0"), drawing,
        ),
        Step(
            Phase("golden", 90, least_s=30), (*contained, PYTHON, "-m", "tests.golden", "--seeds", "1"),
            ("--minutes", "{minutes}", "--draw", "{seed}"),
        ),
        Step(
            Phase("root, Docker, browser", 340, least_s=30), (*two, *quiet, "--durations=15"), drawing,
            needs={"root": _no_namespaces, "docker": _no_engine, "browser": _no_browser}, clear=_clear_engine,
        ),
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.ci")
    parser.add_argument("--elapsed", type=float, default=0.0, help="seconds that setting up has taken")
    parser.add_argument("--minutes", type=float, default=TOTAL_S / 60, help="of a whole run")
    parser.add_argument("--plan", type=float, metavar="TIMES", help="run nothing: the plan of a machine so much slower")
    chosen = parser.parse_args(arguments)
    end = now() - chosen.elapsed + 60 * chosen.minutes - CLOSING_S
    if chosen.plan:
        print("\n".join(plan(steps(), end - now(), chosen.plan)))
        return 0
    found = measure()
    meters = ", ".join(f"{name} {rate:.0f}" for name, rate in found.items())
    print(f"{slowness(found):.2f} times as slow as a good machine ({meters} turns a second)")
    return run_all(steps(), end, slowness(found), chosen.elapsed)


def run_all(every: Sequence[Step], end: float, slow: float, elapsed: float) -> int:
    """Run what there is time for until ``end`` (of :func:`now`) on a machine so many times slower than a good one, and
    print what came of it. Returns the exit code."""
    seed = commit() or "no commit"
    here, never = _possible(every)
    needed, left = slow * sum(step.phase.good_s for step in here), end - now()
    print(f"all of it would take {needed:.0f} s here, {left:.0f} s are left: ", end="")
    print("all is run" if needed <= left else f"the rest is drawn by {seed}", flush=True)
    outcomes = []
    for number, step in enumerate(here):
        least_s = slow * step.phase.least_s
        limit_s = _limit(step, here[number + 1 :], end - now(), slow)
        if limit_s is not None and limit_s < least_s:
            never.append(f"{step.phase.name}: its first test ends after {least_s:.0f} s, and it has {limit_s:.0f}")
            continue
        outcome = run_phase(step, limit_s, seed, HANGS_S * slow)
        print(f"=== {outcome.row()}", flush=True)
        outcomes.append(outcome)
    return _tell(outcomes, never, elapsed)


def plan(every: Sequence[Step], left_s: float, slow: float) -> list[str]:
    """Return for people what :func:`run_all` makes of the time left on a machine so many times slower than a good one,
    where nothing is missing and each phase takes what it does on the good one, so many times."""
    told = [f"{slow:g} times as slow as a good machine, {left_s:.0f} s are left"]
    for number, step in enumerate(every):
        needs_s = slow * step.phase.good_s
        limit_s = _limit(step, every[number + 1 :], left_s, slow)
        has_s = needs_s if limit_s is None else min(needs_s, limit_s)
        if limit_s is not None and limit_s < slow * step.phase.least_s:
            has_s = 0.0
        how = "always run" if step.phase.always else "whole" if has_s == needs_s else "drawn" if has_s else "not begun"
        told.append(f"{step.phase.name:24} {has_s:6.0f} s of {needs_s:5.0f}  {how}")
        left_s -= has_s
    return [*told, f"{'not used':24} {left_s:6.0f} s"]


def _limit(step: Step, after: Sequence[Step], left_s: float, slow: float) -> float | None:
    return None if step.phase.always else share(step.phase, [one.phase for one in after], left_s, slow)


def _possible(every: Sequence[Step]) -> tuple[list[Step], list[str]]:
    """What can be run here, and what cannot, with the reason."""
    here, never = [], []
    for step in every:
        why_nots = {marker: why() for marker, why in step.needs.items()} or {"": step.why_not()}
        for marker, why in why_nots.items():
            never += [": ".join(filter(None, (step.phase.name, marker, why)))] if why else []
        markers = [marker for marker, why in why_nots.items() if not why]
        selected = ("-m", " or ".join(markers)) if step.needs else ()
        here += [replace(step, command=(*step.command, *selected))] if markers else []
    return here, never


def run_phase(step: Step, limit_s: float | None, seed: str, hangs_s: float = HANGS_S) -> Outcome:
    """Run one to its end, or to that of its time: then a test that had been under way for ``hangs_s`` has failed."""
    command = list(step.command)
    if limit_s is not None:
        command += [part.format(minutes=f"{MARGIN * limit_s / 60:.2f}", seed=seed) for part in step.draws]
    has = "" if limit_s is None else f", at most {limit_s:.0f} s"
    print(f"\n=== {step.phase.name}{has}", flush=True)
    before, started, cut = _things(), now(), False
    with tempfile.NamedTemporaryFile("r", prefix="outcomes-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as told_here:
        environment = os.environ | {OUTCOMES: told_here.name}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
        try:
            _wait(process, limit_s)
        except subprocess.TimeoutExpired:
            cut, ended_at = True, now()
            _end(process, signal.SIGINT)
        finally:
            _end(process, signal.SIGTERM)
            in_engine_left = step.clear()
        outcome = Outcome(step.phase, process.returncode, now() - started, cut)
        _read(told_here.read().splitlines(keepends=True), outcome, ended_at - hangs_s if cut else None)
    outcome.left = [*in_engine_left, *_left(before)]
    if cut:  # what was ended cleans up nothing: we do
        _remove(outcome.left)
        outcome.left.clear()
        for thing in _left(before):
            print(f"still there of what was ended: {thing}")
    for thing in outcome.left:
        print(f"left behind: {thing}")
    return outcome


def _wait(process: subprocess.Popen[bytes], limit_s: float | None) -> None:
    process.wait(limit_s)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Ours, with everything below it, if it is still there. The one who ends us waits for that."""
    if process.poll() is not None:
        return
    usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process.send_signal(number)
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        while left := children_of(process.pid):
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    finally:
        signal.signal(signal.SIGTERM, usual)


def _read(lines: Sequence[str], outcome: Outcome, long_ago: float | None) -> None:
    """What was written of its tests. Who had begun ``long_ago``, and was under way when it was ended, has failed."""
    collected: dict[str, None] = {}
    became: dict[str, str] = {}
    began: dict[str, float] = {}
    whole = (line for line in lines if line.endswith("\n"))  # a killed one may have begun another one
    for line in map(json.loads, whole):
        collected |= dict.fromkeys(line.get("collected", ()))
        if "began" in line:
            began[line["began"]] = line["at"]
        elif "test" in line and became.get(line["test"]) != "failed":
            became[line["test"]] = line["outcome"]
    for node in began.keys() - became.keys():
        if long_ago is not None and began[node] < long_ago:
            print(f"hangs: {node}")
            became[node] = "failed"
    outcome.tests = Counter(became.values())
    outcome.not_run = [node for node in collected | began if node not in became]
    if outcome.not_run:
        outcome.tests["not run"] = len(outcome.not_run)


def _things() -> set[str]:
    """What may outlive a test: in our temporary directory, which is ours alone, and in the machine's shared places."""
    ours = {str(path) for path in Path(tempfile.gettempdir()).iterdir()}
    return ours.union(namespaces.left(), *({str(path) for path in place.glob(name)} for place, name in _SHARED))


def _left(before: set[str]) -> list[str]:
    """What was not there before, without shared memory that others use meanwhile."""
    new = map(Path, sorted(_things() - before))
    return [str(path) for path in new if not (path.parent == SHARED_MEMORY and mapped_by_others(path.name))]


def _remove(things: Sequence[str]) -> None:
    """What is ours alone: in our temporary directory, and namespaces."""
    ours = Path(tempfile.gettempdir())
    for path in map(Path, things):
        if path.parent == ours:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    namespaces.sweep()


def _no_manual() -> str:
    """What builds it is installed beside ``.venv`` where an index, or a folder of wheels, has it."""
    environment = os.environ | {"PIP_RETRIES": "1"}
    make = ["make", "--no-print-directory", ".venv-docs/.lock"]
    try:
        asked = subprocess.run(
            make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return "what builds it was not installed in 300 s"
    said = asked.stderr.strip().splitlines() or ["pip said nothing"]
    first = next((line for line in said if line.startswith("ERROR: ")), said[-1])
    return f"what builds it is not installed: {first}" if asked.returncode else ""


def _no_namespaces() -> str:
    return namespaces.why_not() or ""


def _no_engine() -> str:
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "no Docker engine answers"
    return "no Docker engine answers" if asked.returncode else ""


def _clear_engine() -> list[str]:
    return [] if _no_engine() else in_engine.clear()


def _no_browser() -> str:
    """Debian's Chromium is installed where we may: on a container or a machine of our own."""
    if browser.missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["apt-get", "-qq", *command], env=environment, capture_output=True, timeout=300, check=False
                )
    return browser.missing()


def _tell(outcomes: Sequence[Outcome], never: Sequence[str], elapsed: float) -> int:
    print(f"\n{'set-up':24} {elapsed:6.0f} s  passed")
    for outcome in outcomes:
        print(outcome.row())
    for line in never:
        print(f"not run: {line}")
    for outcome in outcomes:
        if outcome.not_run:
            print(f"not run: {outcome.phase.name}: {len(outcome.not_run)} tests: {told(outcome.not_run)}")
        elif outcome.cut:
            print(f"not run: {outcome.phase.name}: what came after {outcome.seconds:.0f} s")
    if not never and not any(outcome.cut or outcome.not_run for outcome in outcomes):
        print("all of it was run")
    failed = [outcome.phase.name for outcome in outcomes if outcome.failed]
    total = elapsed + sum(outcome.seconds for outcome in outcomes)
    print(f"FAILED: {', '.join(failed)} after {total:.0f} s" if failed else f"all passed after {total:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
