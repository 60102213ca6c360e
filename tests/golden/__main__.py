"""Golden runs: does this checkout do, to the bit, what the base commit does? ``python -m tests.golden``.

Both live through the same stories (:mod:`tests.swarms.stories`) on this machine, since matrix products differ between
processors; what the base made of them is kept (:mod:`tests.golden.lives`), and a second comparison costs this side
alone. Exits with 0 when they are equal, 1 when they are not, 2 when they cannot be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.golden.compare import Report, Runs, compare, table
from tests.golden.expected import BASE, EXPECTED
from tests.golden.lives import Lives, default_place, key
from tests.harness.budget import drawn_first
from tests.harness.drawn import OUTCOMES
from tests.swarms.stories import STORIES

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 8
SAME = ("tests/golden/side.py", "tests/swarms/playing.py", "tests/swarms/stories.py")
"""What both sides run; ``tests/golden/names.py`` is each one's own."""
PROCESSES = 2
UNTIL = "GOLDEN_UNTIL"

Run = tuple[str, int]
"""A story and its seed."""


class CannotCompare(Exception):
    """Why, and the next command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    chosen = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs = [(story, seed) for story in chosen.stories.split(",") for seed in range(chosen.seeds)]
    if chosen.minutes is not None:
        os.environ[UNTIL] = str(time.monotonic() + 60 * chosen.minutes)
        drawn = drawn_first([f"{story}:{seed}" for story, seed in runs], chosen.draw)
        runs = [(run.partition(":")[0], int(run.partition(":")[2])) for run in drawn]
    try:
        base, ours = both_sides(commit_of(chosen.base, ROOT), runs, chosen.lives)
        not_run = [run for run in runs if chosen.minutes is not None and not (run in base and run in ours)]
        played = [{run: each[run] for run in each if run not in not_run} for each in (base, ours)]
        whole = len(played[1]) >= len(STORIES) * SEEDS
        report = compare(played[0], played[1], EXPECTED, whole=whole)
    except CannotCompare as problem:
        print(f"cannot compare with {chosen.base}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _tell(report, chosen.base[:12], as_json=chosen.json)
    note_outcomes(played[1], not_run)
    if not_run:
        print(f"not run: out of time: {', '.join(f'{story}:{seed}' for story, seed in not_run)}", file=sys.stderr)
    return 1 if report.differences else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--stories", default=",".join(STORIES), help="names, comma-separated; all of them by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each story, from 0 on (default {SEEDS})")
    parser.add_argument(
        "--base",
        default=os.environ.get("GOLDEN_BASE") or BASE,
        metavar="REV",
        help=f"what to compare with (default {BASE[:12]}, see expected.py; or GOLDEN_BASE)",
    )
    parser.add_argument(
        "--lives",
        type=Path,
        default=default_place(),
        metavar="DIR",
        help="where the base's are kept (default %(default)s)",
    )
    parser.add_argument("--minutes", type=float, help="begin no story after that time, in an order that --draw draws")
    parser.add_argument("--draw", default="", metavar="SEED", help="of that order")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.stories.split(",")) - set(STORIES))
    if unknown:
        parser.error(f"no stories {', '.join(unknown)}; there are {', '.join(STORIES)}")
    if chosen.seeds < 1:
        parser.error("--seeds: at least 1")
    return chosen


def both_sides(commit: str, runs: Sequence[Run], place: Path) -> tuple[Runs, Runs]:
    """Let the base, as far as its lives are not kept in ``place``, and this checkout live through all of it. Raises
    CannotCompare."""
    lives = Lives(place, key(commit, [ROOT / name for name in SAME]))
    kept = {run: found for run in runs if (found := lives.find(*run)) is not None}
    wanted = [run for run in runs if run not in kept]
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary, contextlib.ExitStack() as stack:
        out, shares = Path(temporary), PROCESSES
        jobs: dict[str, tuple[Path, Sequence[Run]]] = {}
        if wanted:
            shares = max(1, PROCESSES // 2)
            base = stack.enter_context(base_checkout(commit, out / "base"))
            jobs |= {f"base-{share}": (base, wanted[share::shares]) for share in range(shares)}
        jobs |= {f"this-{share}": (ROOT, runs[share::shares]) for share in range(shares)}
        record(jobs, out)
        lives.keep((made := read_runs(out.glob("base-*.jsonl"))).values())
        return kept | made, read_runs(out.glob("this-*.jsonl"))


def note_outcomes(played: Iterable[Run], not_run: Iterable[Run]) -> None:
    """As the tests do, for whoever started this. That stories differ is told by the exit code."""
    if OUTCOMES not in os.environ:
        return
    lines: list[dict[str, Any]] = [{"collected": [f"{story}:{seed}" for story, seed in [*played, *not_run]]}]
    lines += [{"test": f"{story}:{seed}", "outcome": "passed"} for story, seed in played]
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def read_runs(paths: Iterable[Path]) -> dict[Run, Mapping[str, Any]]:
    """What sides wrote."""
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {(run["story"], run["seed"]): run for run in found}


@contextlib.contextmanager
def base_checkout(commit: str, place: Path, root: Path = ROOT) -> Iterator[Path]:
    """A git worktree of ``root``'s repository in which the stories can be recorded; removed afterwards. Raises
    CannotCompare."""
    _git(root, "worktree", "prune")
    _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(place), commit)
    try:
        for name in SAME:
            shutil.copy(ROOT / name, place / name)
        yield place
    finally:
        _git(root, "worktree", "remove", "--force", "--force", str(place))


def commit_of(revision: str, root: Path) -> str:
    """The hash of a commit in ``root``'s repository. Raises CannotCompare with the next command."""
    if shutil.which("git") is None:
        raise CannotCompare("there is no git here; install it")
    try:
        inside = _git(root, "rev-parse", "--show-toplevel")
    except CannotCompare as problem:
        raise CannotCompare(f"{root} is no clone of the repository ({problem}); git clone it") from None
    if Path(inside).resolve() != root.resolve():
        raise CannotCompare(f"{root} is no clone of the repository; git clone it")
    with contextlib.suppress(CannotCompare):
        return _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    then = "git fetch --unshallow" if shallow else "git fetch --all --tags"
    raise CannotCompare(f"this{' shallow' if shallow else ''} clone does not have the commit; next: {then}")


def _git(root: Path, *command: str) -> str:
    ended = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True)
    if ended.returncode:
        raise CannotCompare(f"git {' '.join(command)}: {ended.stderr.strip() or f'exit {ended.returncode}'}")
    return ended.stdout.strip()


def record(jobs: Mapping[str, tuple[Path, Sequence[Run]]], out: Path) -> None:
    """Let each checkout live through its stories, in a process of its own. Raises CannotCompare when one does not come
    to its end."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for side, (tree, runs) in jobs.items():
            command = [sys.executable, "-m", "tests.golden.side", str(out / f"{side}.jsonl")]
            command += [f"{story}:{seed}" for story, seed in runs]
            with (out / f"{side}.log").open("w") as log:
                running[side] = subprocess.Popen(
                    command, cwd=tree, env=_environment(tree, out), stdout=log, stderr=log, text=True
                )
        for side, process in running.items():
            if process.wait():
                log_text = (out / f"{side}.log").read_text()
                raise CannotCompare(f"the recording of {side} ended with {process.returncode}:\n{log_text[-4000:]}")
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _environment(tree: Path, temporary: Path) -> dict[str, str]:
    """Modules come from this tree alone, nothing is left in it, and sets of strings have the same order everywhere."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    fixed = {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "TMPDIR": str(temporary)}
    return os.environ | threads | fixed


def _tell(report: Report, base: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"base": base, **dataclasses.asdict(report)}, indent=1))
        return
    print(table(report.rows))
    told: set[str] = set()
    for difference in report.differences:
        where, _, rest = difference.partition(":")
        story = where.partition(",")[0]
        print(difference if story not in told else f"{where}:{rest.splitlines()[0]}")
        told.add(story)
    for expected in EXPECTED:
        print(f"expected: {expected.what} of {expected.name} in {expected.story}: {expected.reason}")
    print(f"{len(report.differences)} differences from {base}" if report.differences else f"equal to {base}")


if __name__ == "__main__":
    sys.exit(main())
