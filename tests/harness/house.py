"""The house rules that ruff does not know: docstrings on what is public, sizes that a reader can hold, and modules that
are neither fragments nor entangled.

``python -m tests.harness.house [ROOT] [--json]`` prints the figures of a checkout, by default this one.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.layers import imports
from tests.harness.sources import PACKAGES, ROOT, Source, read_tree

Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_FILE_LINES = 400
"""Of a file that does not say why it has more, in its docstring or a comment above its code: ``Over 400 lines: …``."""
MAX_FILE_LINES_WITH_REASON = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7

# Ratchets: what our sources are held to. They are only ever tightened.
MIN_MEAN_LINES = 150
MAX_FRAGMENTS = 5
MAX_CIRCLES = 0
MAX_AMBIGUOUS_CLASSES = 0
MAX_HEAVY_OBJECTS = 0

MAX_ATTRIBUTES = 12
"""Set by a constructor: an object with more holds several things in one."""
FRAGMENT_LINES = 60
"""A module with fewer lines and a single importer is a fragment of it."""

_REASON = re.compile(rf"\W*Over {MAX_FILE_LINES} lines: *\w")


@dataclass(frozen=True, slots=True)
class Fragment:
    """A small module and the only one of ours that imports it."""

    module: Source
    importer: Source


def undocumented(sources: Iterable[Source]) -> list[str]:
    """Public modules, classes, functions and methods without a docstring. An empty ``__init__.py`` needs none."""
    found = []
    for source in sources:
        if _private(source.name.rpartition(".")[2]):
            continue
        if source.tree.body and not ast.get_docstring(source.tree):
            found.append(f"{source.path}: module")
        found.extend(f"{source.path}:{line}: {name}" for name, line in _undocumented_in(source.tree, ""))
    return found


def oversized(sources: Iterable[Source]) -> list[str]:
    """Files, functions (their docstring not counted) and signatures (``self`` not counted) that are too large.

    A file may be longer than the soft limit with a stated reason. A command of ``peers.cli`` has one parameter for each
    option it offers, and is let off the last.
    """
    found = []
    for source in sources:
        if source.lines > MAX_FILE_LINES_WITH_REASON:
            found.append(f"{source.path}: {source.lines} lines")
        elif source.lines > MAX_FILE_LINES and not _states_reason(source):
            found.append(f"{source.path}: {source.lines} lines without a stated reason")
        for function in _functions(source.tree):
            where = f"{source.path}:{function.lineno}: {function.name}"
            if _length(function) > MAX_FUNCTION_LINES:
                found.append(f"{where}: {_length(function)} lines")
            if _parameters(function) > MAX_PARAMETERS and not source.name.startswith("peers.cli"):
                found.append(f"{where}: {_parameters(function)} parameters")
    return found


def mean_length(sources: Sequence[Source]) -> float:
    """Return lines by module. Every file counts, an empty ``__init__.py`` too: it is one more to look into."""
    return sum(source.lines for source in sources) / len(sources) if sources else 0.0


def fragments(sources: Sequence[Source]) -> list[Fragment]:
    """Return modules of less than :data:`FRAGMENT_LINES` lines that one other module imports, wherever in it. What is
    run by name or gathered by a package's ``__init__`` is none: an ``__init__`` and a ``__main__`` are left out."""
    by_name = {source.name: source for source in sources}
    importers: dict[str, list[Source]] = {name: [] for name in by_name}
    for name, targets in _import_graph(sources).items():
        for target in targets:
            importers[target].append(by_name[name])
    return [
        Fragment(source, importers[source.name][0])
        for source in sources
        if source.lines < FRAGMENT_LINES and len(importers[source.name]) == 1 and not _is_entrance(source)
    ]


def circles(sources: Sequence[Source]) -> list[list[Source]]:
    """Return the sets of modules that import each other, directly or by way of others of the set, largest first.

    Imports inside functions and under ``if TYPE_CHECKING:`` count. ``from package import module`` is an import of the
    module; one of a package is an import of its ``__init__``, so that it closes a circle only by what that imports.
    """
    graph = _import_graph(sources)
    reached = {name: _reachable(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    by_name = {source.name: source for source in sources}
    return sorted(
        ([by_name[name] for name in sorted(circle)] for circle in found if circle),
        key=lambda circle: (-len(circle), circle[0].name),
    )


def ambiguous_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return public classes at the top of modules whose name is also another's: name → modules."""
    homes: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not _private(node.name):
                homes.setdefault(node.name, []).append(source.name)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


def heavy_objects(sources: Iterable[Source]) -> dict[str, int]:
    """Return the classes whose ``__init__`` sets more than :data:`MAX_ATTRIBUTES` attributes: module.Class → how many,
    the most first. The fields of a dataclass are data, and do not count."""
    found: dict[str, int] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    count = len(_attributes_set(method))
                    if count > MAX_ATTRIBUTES:
                        found[f"{source.name}.{node.name}"] = count
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _attributes_set(method: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def attributes_read(sources: Iterable[Source]) -> set[str]:
    """Every name read as ``something.name`` in these sources."""
    return {
        node.attr
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def _import_graph(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return module → the modules of ``sources``, itself left out, that it imports."""
    names = {source.name for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        held = {_held_by(item.target, names) for item in imports(source)}
        graph[source.name] = {name for name in held if name and name != source.name}
    return graph


def _held_by(target: str, names: set[str]) -> str:
    """Return the module that an import's target is or is taken from, nothing where it is not ours."""
    while target and target not in names:
        target = target.rpartition(".")[0]
    return target


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return what ``start`` imports, directly or not; itself only when something leads back."""
    reached: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left.extend(graph[name])
    return reached


def _is_entrance(source: Source) -> bool:
    return source.package or source.name.endswith("__main__")


def _states_reason(source: Source) -> bool:
    body = source.tree.body[1:] if ast.get_docstring(source.tree) else source.tree.body
    above = source.text.splitlines()[: body[0].lineno - 1 if body else None]
    return any(_REASON.match(line) for line in above)


def _undocumented_in(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, int]]:
    for child in _statements(node):
        if not isinstance(child, ast.ClassDef | Function) or _private(child.name) or _overload(child):
            continue
        if not ast.get_docstring(child):
            yield prefix + child.name, child.lineno
        if isinstance(child, ast.ClassDef):
            yield from _undocumented_in(child, f"{prefix}{child.name}.")


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class, those under ``if`` and ``try`` included."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _statements(child)


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _private(name: str) -> bool:
    return name.startswith("_")


def _overload(node: ast.ClassDef | Function) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


def _length(function: Function) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def _parameters(function: Function) -> int:
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _figures(sources: Sequence[Source]) -> dict[str, Any]:
    return {
        "modules": len(sources),
        "lines": sum(source.lines for source in sources),
        "mean_lines": round(mean_length(sources), 1),
        "fragments": [
            {"file": str(found.module.path), "lines": found.module.lines, "importer": str(found.importer.path)}
            for found in fragments(sources)
        ],
        "circles": [[str(source.path) for source in circle] for circle in circles(sources)],
        "ambiguous_classes": ambiguous_classes(sources),
        "heavy_objects": heavy_objects(sources),
        "long_files": {str(source.path): source.lines for source in sources if source.lines > MAX_FILE_LINES},
    }


def _report(figures: dict[str, Any]) -> Iterator[str]:
    """Return the figures as lines for a reader."""
    yield f"{figures['modules']} modules, {figures['lines']} lines, {figures['mean_lines']} lines a module"
    yield f"{len(figures['fragments'])} modules under {FRAGMENT_LINES} lines with one importer"
    for found in figures["fragments"]:
        yield f"  {found['file']} ({found['lines']}) ← {found['importer']}"
    yield f"{len(figures['circles'])} import circles"
    for files in figures["circles"]:
        yield f"  {len(files)} files: {', '.join(files)}"
    yield f"{len(figures['ambiguous_classes'])} public class names with more than one meaning"
    for name, modules in figures["ambiguous_classes"].items():
        yield f"  {name}: {', '.join(modules)}"
    yield f"{len(figures['heavy_objects'])} objects with more than {MAX_ATTRIBUTES} attributes"
    for name, count in figures["heavy_objects"].items():
        yield f"  {name} ({count})"
    yield f"{len(figures['long_files'])} files over {MAX_FILE_LINES} lines"
    for file, lines in figures["long_files"].items():
        yield f"  {file} ({lines})"


def main(arguments: Sequence[str]) -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.house", description="Figures of the house rules.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    chosen = parser.parse_args(arguments)
    sources = read_tree(chosen.root, PACKAGES)
    if not sources:
        parser.error(f"{chosen.root} has none of {', '.join(PACKAGES)}")
    figures = _figures(sources)
    print(json.dumps(figures, indent=2) if chosen.json else "\n".join(_report(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
