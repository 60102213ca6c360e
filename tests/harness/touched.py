"""Name the tests of the layers that a change touches: ``python -m tests.harness.touched [BASE]``, one path a line.

What differs between BASE (default HEAD) and the working tree, untracked files included, is looked at by folder: a
package's change asks for its unit tests and, where peers would notice, for one short training among simulated peers; a
changed test file asks for itself. The rules about our own sources are always among them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.harness.sources import ROOT

ALWAYS = tuple(f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py")))
TRAINING = "tests/swarms/test_training.py"
SEAM = "tests/conformance"
LOCAL = frozenset({"data_shards", "swarm/models", "swarm/compression", "swarm/monitoring", "peers/chaos", "peers/cli"})
"""Packages whose change no simulated training needs to be asked about."""


def touched(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and folders to run for changed paths.

    Args:
        changed: Paths below the repository, with slashes; deleted ones count for their package.
        root: The repository in which the tests are looked for.
    """
    found = set(ALWAYS)
    for name in changed:
        path = PurePosixPath(name)
        if path.suffix != ".py":
            continue
        if path.parts[0] == "tests":
            if path.name.startswith("test_") and "benchmarks" not in path.parts and (root / name).exists():
                found.add(name)
            continue
        if path.parts[0] not in ("swarm", "peers", "data_shards"):
            continue
        package = "/".join(path.parts[:2]) if path.parts[0] == "swarm" and len(path.parts) > 2 else path.parts[0]
        folders = [f"tests/unit/{path.parts[at]}" for at in range(min(2, len(path.parts) - 1))]
        found.update(folder for folder in folders if (root / folder).is_dir())
        if path.parts[:2] in (("swarm", "network"), ("swarm", "sim")):
            found.add(SEAM)
        if package not in LOCAL and "/".join(path.parts[:2]) not in LOCAL:
            found.add(TRAINING)
    return sorted(found)


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from ``base``; raises CalledProcessError outside a clone or for an unknown base."""
    lines: list[str] = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        lines += done.stdout.splitlines()
    return lines


if __name__ == "__main__":
    print("\n".join(touched(changed_since(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
