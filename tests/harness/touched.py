"""Name the tests of the layers that a change touches: ``python -m tests.harness.touched [BASE]``, one path a line.

What differs between BASE (default HEAD) and the working tree, untracked files included, is looked at by folder: a
package's change asks for its unit tests and, where peers would notice, for one short training among simulated peers; a
changed test file asks for itself, a layer's rig for the tests that import it, directly or by way of another rig, and
another file that tests lean on for those next to it. What all modules or all tests stand on asks for every unit test.
The rules about our own sources are always among them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.harness.layers import load_rules
from tests.harness.sources import ROOT

ALWAYS = tuple(f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py")))
TRAINING = "tests/swarms/test_training.py"
STORIES = "tests/swarms/test_stories.py"
SEAM = "tests/conformance"
UNITS = "tests/unit"
HARNESS = "tests/harness"
RIGS = f"{HARNESS}/rigs"
SHARED = frozenset({"__init__", "clocks", "common"})
"""What all rigs stand on."""
BOTTOM = frozenset(load_rules(ROOT / "pyproject.toml").order[0])
"""Modules and packages that any other may import."""
LOCAL = frozenset({"data_shards", "swarm/models", "swarm/compression", "swarm/monitoring", "peers/chaos", "peers/cli"})
"""Packages whose change no simulated training needs to be asked about."""
_IMPORTED = re.compile(r"^ *(?:from|import) tests\.harness\.rigs\.(\w+)", re.MULTILINE)


def touched(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and folders to run for changed paths.

    Args:
        changed: Paths below the repository, with slashes; deleted ones count for their package.
        root: The repository in which the tests are looked for.
    """
    found: set[str] = set()
    for name in changed:
        path = PurePosixPath(name)
        if name == "pyproject.toml":
            found |= {UNITS, TRAINING}
        elif path.suffix == ".py" and path.parts[0] == "tests":
            found |= _for_tests(path, root)
        elif path.suffix == ".py" and path.parts[0] in ("swarm", "peers", "data_shards"):
            found |= _for_product(path)
    there = {name for name in found if (root / name).exists()}
    return sorted({*ALWAYS, *(name for name in there if there.isdisjoint(map(str, PurePosixPath(name).parents)))})


def _for_product(path: PurePosixPath) -> set[str]:
    """Return where the tests of a module would be."""
    top, second = path.parts[:2]
    found = {f"{UNITS}/{folder}" for folder in path.parts[:-1][:2]}
    if top == "swarm":
        found.add(f"{UNITS}/test_{second}")  # of a module that is in no package
        if f"swarm.{PurePosixPath(second).stem}" in BOTTOM:
            found.add(UNITS)
        if second in ("network", "sim"):
            found.add(SEAM)
    return found if LOCAL & {top, f"{top}/{second}"} else found | {TRAINING}


def _for_tests(path: PurePosixPath, root: Path) -> set[str]:
    """Return a test file itself, and those that lean on another file below ``tests`` where that ends in minutes."""
    folder = str(path.parent)
    if path.is_relative_to(RIGS) and (rig := _rig_of(path)) not in SHARED:
        return _leaning_on(rig, root)
    if path.is_relative_to(RIGS):
        folder = HARNESS
    if path.name.startswith("test_"):
        return set() if "benchmarks" in path.parts else {str(path)}
    if folder in ("tests", HARNESS):
        return {HARNESS, UNITS, TRAINING}
    if folder == "tests/swarms":
        return {TRAINING, STORIES}
    return {folder} if folder.startswith(UNITS) or folder in (SEAM, "tests/golden") else set()


def _rig_of(path: PurePosixPath) -> str:
    """Return the layer of a file of the rigs, which is a module or lies in a package of that name."""
    return PurePosixPath(path.relative_to(RIGS).parts[0]).stem


def _leaning_on(rig: str, root: Path) -> set[str]:
    """Return the folders of unit and conformance tests that import a rig, or one that stands on it."""
    files = sorted((root / "tests").rglob("*.py"))
    imported = {PurePosixPath(file.relative_to(root).as_posix()): _IMPORTED.findall(file.read_text()) for file in files}
    rigs, before = {rig}, set[str]()
    while rigs != before:
        before = set(rigs)
        rigs |= {_rig_of(path) for path, names in imported.items() if path.is_relative_to(RIGS) and rigs & {*names}}
    folders = {str(path.parent) for path, names in imported.items() if rigs & {*names}}
    return {folder for folder in folders if folder.startswith(UNITS) or folder == SEAM}


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from ``base``; raises CalledProcessError outside a clone or for an unknown base."""
    lines: list[str] = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        lines += done.stdout.splitlines()
    return lines


if __name__ == "__main__":
    print("\n".join(touched(changed_since(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
