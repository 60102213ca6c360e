"""The commit that this program was made from. Standard library only, and no other module of ours: ``hatch_build.py``
runs it, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""Beside this module, in what was installed from a wheel: see ``hatch_build.py``."""


def commit() -> str:
    """Return the commit of the wheel, else of the checkout; "" where neither is known."""
    try:
        return (Path(__file__).parent / COMMIT_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return commit_of_checkout(Path(__file__).parents[1])


def commit_of_checkout(root: Path) -> str:
    """Return the commit of a checkout, with ``-changed`` where its tracked files differ from that; "" where git cannot
    say. Some milliseconds."""
    if not (root / ".git").exists():  # or git would find a checkout that this directory happens to lie in
        return ""
    ask = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=-changed"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
