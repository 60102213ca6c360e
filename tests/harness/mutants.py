"""Change one thing in a function that decides, and see whether its tests notice: ``python -m tests.harness.mutants``.

Draws mutants with a fixed seed from :data:`DECIDERS`, by what their sources say alone: two checkouts of one product
with other tests have the same mutants, so that their tests can be compared (``--root DIR``). A module's tests are those
of its folders that need no network and no process: those that import it, then the others, the cheapest first, as many
as take ``--limit-s`` seconds of computing when nothing is changed.

No file is ever changed. A process imports the tests of some folders; for each mutant it forks, and the fork gives the
living functions the changed code (``__code__``) and runs the tests until one fails. So only what functions do is
changed: no constant at a module's top, no default, and nothing that is computed while modules are imported.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

PLANNING = ("tests/unit/planning",)
DECIDERS: dict[str, tuple[str, ...]] = {
    f"swarm/consensus/{name}.py": ("tests/unit/consensus", "tests/properties")
    for name in ("acceptor", "admissions", "ballot", "branches", "changes", "committed", "copies", "ledger")
    + ("placement", "rebalance", "records", "roster")
} | {
    "swarm/step/leader/exclusion.py": ("tests/unit/step",),
    "swarm/pipeline/trainer/journey_state.py": ("tests/unit/pipeline",),
    "swarm/pipeline/wiring.py": ("tests/unit/pipeline",),
    "swarm/averaging/allreduce/plan.py": ("tests/unit/averaging",),
    "swarm/planning/search.py": PLANNING,
    "swarm/planning/predict.py": PLANNING,
    "swarm/planning/cover.py": PLANNING,
    "swarm/network/rpc/meter.py": ("tests/unit/network",),
    "swarm/membership/access.py": ("tests/unit/membership",),
    "peers/dashboard/access.py": ("tests/unit/peers/dashboard",),
}
"""Module → the folders in which its tests are."""
_SELECTED = "not (root or docker or nemesis or long or smoke or browser or extras or network or process)"
_FLAGS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0", "-m", _SELECTED)
_MEMORY = 6 * 1024**3  # of a mutant: one that never stops must not take the machine's
_LONGEST_S = 1800.0  # of whole folders, unchanged
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_SWAPPED: dict[type, type] = {}
for _one, _other in (*_PAIRS, (ast.And, ast.Or), (ast.Add, ast.Sub)):
    _SWAPPED |= {_one: _other, _other: _one}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the bytes from ``start`` to ``end`` of a module become ``new``."""

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        """Return the module with the change in it; lines keep their numbers."""
        lost = "\n" * source[self.start : self.end].count(b"\n")
        new = f"{self.new[:-1]}{lost})" if self.new.endswith(")") else self.new + lost
        return source[: self.start] + new.encode() + source[self.end :]


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    """Return every change to a module's functions that the draw may take, in the order of its text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, other in _changes(ast.parse(source), inside=False):
        new = f"({ast.unparse(other)})" if isinstance(other, ast.expr) else ast.unparse(other)
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(source[start:end].decode().split())
        found.setdefault((start, end, new), Mutant(module, node.lineno, start, end, old, new))
    return [found[key] for key in sorted(found)]


def _changes(node: ast.AST, *, inside: bool) -> Iterator[tuple[Any, ast.AST]]:
    """Return nodes in functions' bodies with what may stand in their place. Wording is left as it is."""
    below: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if not inside and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        below, inside = node.body, True
    for child in below:
        if not isinstance(child, ast.JoinedStr | ast.Raise):
            if inside:
                yield from _changes_at(child)
            yield from _changes(child, inside=inside)


def _changes_at(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    match node:
        case ast.Compare(left, signs, others):
            for index, sign in enumerate(signs):
                swapped = [*signs[:index], _SWAPPED[type(sign)](), *signs[index + 1 :]]
                yield node, ast.Compare(left, swapped, others)
        case ast.BoolOp(sign, values):
            yield node, ast.BoolOp(_SWAPPED[type(sign)](), values)
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            yield node, ast.BinOp(left, _SWAPPED[type(sign)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield node, operand
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            yield node, ast.Constant(number + 1)
            yield node, ast.Constant(number - 1)
        case ast.Return(ast.Constant(bool() as said)):
            yield node, ast.Return(ast.Constant(not said))
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield node, ast.Return(ast.Constant(None))
        case ast.If(test) | ast.IfExp(test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Continue() | ast.Break():
            yield node, ast.Pass()


def draw(sources: Mapping[str, bytes], count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` mutants, of each module as many as of any other while it has some left."""
    chance = random.Random(seed)
    left = {module: mutants_of(module, source) for module, source in sorted(sources.items())}
    for mutants in left.values():
        chance.shuffle(mutants)
    drawn: list[Mutant] = []
    while len(drawn) < count and any(left.values()):
        drawn += [mutants.pop() for mutants in left.values() if mutants]
    return drawn[:count]


def chosen_files(imports: Callable[[str], bool], cost: Mapping[str, float], limit_s: float) -> list[str]:
    """Return the test files that together take no more than a limit: those that import the module first, then the rest,
    each from the cheapest to the dearest."""
    chosen: list[str] = []
    left = limit_s
    for file in sorted(cost, key=lambda file: (not imports(file), cost[file], file)):
        if cost[file] <= left:
            chosen.append(file)
            left -= cost[file]
    return chosen


def swap(path: Path, source: bytes, functions: Iterable[Any]) -> int:
    """Give functions that were made from a file the code that its changed source has for them, and return how many."""
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compile(source, str(path), "exec"))}
    swapped = 0
    for function in functions:
        if type(function) is FunctionType and function.__code__.co_filename == str(path):
            new = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno), function.__code__)
            if new != function.__code__:
                with suppress(ValueError):  # a closure that lost a variable: the one who makes it has the new code
                    function.__code__ = new
                    swapped += 1
    return swapped


def _codes(code: CodeType) -> Iterator[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    yield from (code, *(found for one in inner for found in _codes(one)))


class _Judge:
    """A plugin of pytest that, in place of running what was collected, forks for each mutant."""

    def __init__(self, mutants: Sequence[Mutant], limit_s: float, out: Path) -> None:
        self.mutants, self.limit_s, self.out = mutants, limit_s, out
        self.cost: Counter[str] = Counter()
        self.failed: list[str] = []
        self.before = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep what a file costs, and which tests fail."""
        now = time.process_time()
        self.cost[report.nodeid.partition("::")[0]] += now - self.before
        self.before = now
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run all that was collected once; then judge the mutants, and write a line for each."""
        whole = self._forked(session, None, None, _LONGEST_S, _LONGEST_S)
        broken = {test.partition("::")[0] for test in whole["failed"]}
        cost = {file: spent for file, spent in whole["cost"].items() if file not in broken}
        if not cost:
            raise ValueError("none of these tests passes on what is unchanged")
        pace = 1 + whole["wall_s"] / max(whole["cpu_s"], 0.1)
        with self.out.open("w") as out:
            for mutant in self.mutants:
                files = chosen_files(_importing(mutant.module), cost, self.limit_s)
                usual = sum(cost[file] for file in files)
                saw = self._forked(session, files, mutant, 20 + 4 * usual, (60 + 4 * usual) * pace)
                found = {"by": "survived" if saw["code"] == 0 else "hangs" if saw["code"] < 0 else saw["failed"][0]}
                found |= {"killed": saw["code"] != 0, "cpu_s": round(saw["cpu_s"], 2), "usual_s": round(usual, 2)}
                found |= {"files": len(files), "broken": sorted(broken)}
                print(json.dumps(asdict(mutant) | found, ensure_ascii=False), file=out, flush=True)
        return True

    def _forked(self, session: Any, files: list[str] | None, mutant: Mutant | None, cpu_s: float, wall_s: float) -> Any:
        """Run tests in a fork, ended when it takes too long; ``code`` is 1 if one failed, -1 if it was ended."""
        told = self.out.with_suffix(".told")
        told.unlink(missing_ok=True)
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), math.ceil(cpu_s) + 1))
                self._run(session, files, mutant)
                seen = {"code": int(bool(self.failed)), "failed": self.failed, "cost": self.cost}
                told.write_text(json.dumps(seen))
            finally:
                os._exit(0)
        handle = os.pidfd_open(pid)
        select.select([handle], [], [], wall_s)
        os.close(handle)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with all that it started
        usage = os.wait4(pid, 0)[2]
        said = json.loads(told.read_text()) if told.exists() else {"code": -1, "failed": [], "cost": {}}
        return said | {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": time.monotonic() - began}

    def _run(self, session: Any, files: list[str] | None, mutant: Mutant | None) -> None:
        from _pytest.main import pytest_runtestloop

        if mutant and files is not None:
            path = Path(mutant.module).resolve()
            swap(path, mutant.applied(path.read_bytes()), gc.get_objects())
            by_file: dict[str, list[Any]] = {file: [] for file in files}
            for item in session.items:
                by_file.get(item.nodeid.partition("::")[0], []).append(item)
            session.items[:] = [item for file in files for item in by_file[file]]
            session.config.option.maxfail = 1
        self.before = time.process_time()
        with suppress(session.Failed, session.Interrupted):
            pytest_runtestloop(session)


def _importing(module: str) -> Callable[[str], bool]:
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    imported = re.compile(rf"(from|import) {package}\.{name}\b|from {package} import .*\b{name}\b")
    return lambda file: bool(imported.search(Path(file).read_text()))


def _report(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return who survived, and a summary by module."""
    for of in found:
        if not of["killed"]:
            yield f"survived {of['module']}:{of['line']}: {of['old']}  →  {of['new']}"
    yield from sorted({f"left out, fails unchanged: {file}" for of in found for file in of["broken"]})
    for module in sorted({of["module"] for of in found}):
        mine = [of for of in found if of["module"] == module]
        figures = f"{sum(of['killed'] for of in mine):4} of {len(mine):3} killed"
        yield f"{figures} by {mine[0]['files']:2} files, {mine[0]['usual_s']:4.1f} s  {module}"
    yield f"{sum(of['killed'] for of in found):4} of {len(found):3} killed"


def main(arguments: Sequence[str]) -> None:
    """Draw, judge and report; survivors are no error."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="a checkout (this one)")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=20.0)
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)  # the mutants of some folders, in a process
    chosen = parser.parse_args(arguments)
    if chosen.judge:
        import pytest

        mutants = [Mutant(**found) for found in json.loads(chosen.judge.read_text())]
        judge = _Judge(mutants, chosen.limit_s, chosen.judge.with_suffix(".jsonl"))
        raise SystemExit(pytest.main([*_FLAGS, *DECIDERS[mutants[0].module]], plugins=[judge]))
    drawn = draw({module: (chosen.root / module).read_bytes() for module in DECIDERS}, chosen.count, chosen.seed)
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in drawn:
        groups.setdefault(DECIDERS[mutant.module], []).append(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as above, ThreadPoolExecutor(chosen.jobs) as pool:
        tasks = [(Path(above) / f"{number}.json", mutants) for number, mutants in enumerate(groups.values())]
        found = [
            of
            for told in pool.map(lambda task: _judged(task[0], task[1], chosen.root, chosen.limit_s), tasks)
            for of in told
        ]
    print("\n".join(_report(found)))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1, ensure_ascii=False))


def _judged(task: Path, mutants: Sequence[Mutant], root: Path, limit_s: float) -> list[dict[str, Any]]:
    """Judge the mutants whose tests are in the same folders, in a process that knows no checkout but ``root``."""
    task.write_text(json.dumps([asdict(mutant) for mutant in mutants]))
    command = [sys.executable, "-P", __file__, "--judge", str(task), "--limit-s", str(limit_s)]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root.resolve())}, stdout=subprocess.DEVNULL
    )
    results = task.with_suffix(".jsonl")
    if done.returncode or not results.exists():
        raise SystemExit(f"{root}: the tests in {', '.join(DECIDERS[mutants[0].module])} do not start: {command}")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    print(
        "\n".join(f"{of['module']}:{of['line']}: {of['old']}  →  {of['new']}: {of['by']}" for of in found), flush=True
    )
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
