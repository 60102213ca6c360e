"""Our own source files, parsed: what the tests about structure look at."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

PACKAGES = ("swarm", "peers", "data_shards")
"""The packages of the distribution."""


@dataclass(frozen=True, slots=True)
class Source:
    """One module: dotted ``name``, where it lies, its ``text`` and syntax tree. ``package`` is true for an
    ``__init__.py``."""

    name: str
    path: Path
    lines: int
    package: bool
    tree: ast.Module
    text: str


def parse(name: str, text: str, *, path: Path = Path("toy.py"), package: bool = False) -> Source:
    """A source from its text; raises SyntaxError."""
    return Source(name, path, text.count("\n"), package, ast.parse(text, filename=str(path)), text)


def read_tree(root: Path, packages: Iterable[str]) -> tuple[Source, ...]:
    """All modules of ``packages`` under ``root``, in order of their names."""
    found = []
    for package in packages:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found.append(parse(name, path.read_text(encoding="utf-8"), path=path.relative_to(root), package=is_package))
    return tuple(sorted(found, key=lambda source: source.name))


@cache
def our_sources() -> tuple[Source, ...]:
    """All modules of the distribution, parsed once per test process."""
    return read_tree(ROOT, PACKAGES)
