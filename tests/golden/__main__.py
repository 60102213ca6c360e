"""Golden runs: does this checkout do, to the bit, what the base commit does? ``python -m tests.golden``.

Both live through the same stories (:mod:`tests.golden.stories`) on this machine, at the same time, in a process each;
nothing is compared with what was stored, since matrix products differ between processors. Exits with 0 when they are
equal, 1 when they are not, 2 when they cannot be compared.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.golden.compare import Report, compare, read_side, table
from tests.golden.expected import BASE, EXPECTED
from tests.golden.stories import STORIES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEEDS = 8
SAME = ("__init__.py", "stories.py", "side.py")
"""What both sides run; ``names.py`` is each one's own."""


class CannotCompare(Exception):
    """Why, and the next command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    chosen = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
            out = Path(temporary)
            with base_checkout(chosen.base, out / "base") as base:
                record({"base": base, "this": ROOT}, out, chosen.stories, chosen.seeds)
            report = compare(read_side(out / "base.jsonl"), read_side(out / "this.jsonl"), EXPECTED)
    except CannotCompare as problem:
        print(f"cannot compare with {chosen.base}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _tell(report, chosen.base, as_json=chosen.json)
    return 1 if report.differences else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--stories", default=",".join(STORIES), help="names, comma-separated; all of them by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each story, from 0 on (default {SEEDS})")
    parser.add_argument(
        "--base",
        default=os.environ.get("GOLDEN_BASE") or BASE,
        metavar="REV",
        help=f"what to compare with (default {BASE}, the last commit that changed schedules; or GOLDEN_BASE)",
    )
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.stories.split(",")) - set(STORIES))
    if unknown:
        parser.error(f"no stories {', '.join(unknown)}; there are {', '.join(STORIES)}")
    if chosen.seeds < 1:
        parser.error("--seeds: at least 1")
    return chosen


@contextlib.contextmanager
def base_checkout(revision: str, place: Path, root: Path = ROOT) -> Iterator[Path]:
    """A git worktree of ``root``'s repository in which the stories can be recorded; removed afterwards. Raises
    CannotCompare."""
    commit = _commit(revision, root)
    _git(root, "worktree", "prune")
    _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(place), commit)
    try:
        golden = place / "tests" / "golden"
        own_names = (golden / "names.py").exists()
        golden.mkdir(exist_ok=True)
        for name in SAME:
            shutil.copy(HERE / name, golden)
        if not own_names:
            shutil.copy(HERE / "names_of_base.txt", golden / "names.py")
        yield place
    finally:
        _git(root, "worktree", "remove", "--force", "--force", str(place))


def _commit(revision: str, root: Path) -> str:
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


def record(sides: dict[str, Path], out: Path, stories: str, seeds: int) -> None:
    """Let each checkout live through the stories, in a process of its own. Raises CannotCompare when one does not come
    to its end."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for side, tree in sides.items():
            command = [sys.executable, "-m", "tests.golden.side", str(out / f"{side}.jsonl")]
            command += ["--stories", stories, "--seeds", str(seeds)]
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
