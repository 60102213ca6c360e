"""The house rules that ruff does not know: docstrings on what is public, no import circles, one meaning for each name
of a class.

``python -m tests.harness.house [ROOT] [--json]`` prints the figures of a checkout, by default this one.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.layers import imports
from tests.harness.sources import PACKAGES, ROOT, Source, read_tree

Function = ast.FunctionDef | ast.AsyncFunctionDef

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


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


def _private(name: str) -> bool:
    return name.startswith("_")


def _overload(node: ast.ClassDef | Function) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


def code_lines(source: Source) -> int:
    """Return the lines that are neither empty nor comment nor docstring."""
    text = iter(source.text.splitlines(keepends=True))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(lambda: next(text, "")):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes(sources: Iterable[Source]) -> dict[str, dict[str, int]]:
    """Return for each package (``swarm`` and ``peers`` by what is right below them) how much there is of it."""
    found: dict[str, dict[str, int]] = {}
    for source in sources:
        within = source.path.parts[: min(2, len(source.path.parts) - 1)]
        of = found.setdefault(".".join(within), {"modules": 0, "lines": 0, "code_lines": 0, "classes": 0})
        of["modules"] += 1
        of["lines"] += source.lines
        of["code_lines"] += code_lines(source)
        of["classes"] += sum(isinstance(node, ast.ClassDef) for node in ast.walk(source.tree))
    return dict(sorted(found.items()))


def _figures(sources: Sequence[Source]) -> dict[str, Any]:
    by_package = sizes(sources)
    return {
        **{name: sum(of[name] for of in by_package.values()) for name in ("modules", "lines", "code_lines", "classes")},
        "packages": by_package,
        "circles": [[str(source.path) for source in circle] for circle in circles(sources)],
        "ambiguous_classes": ambiguous_classes(sources),
    }


def _report(figures: dict[str, Any]) -> Iterator[str]:
    """Return the figures as lines for a reader."""
    yield "modules   lines    code classes"
    for name, of in [*figures["packages"].items(), ("all", figures)]:
        yield f"{of['modules']:7} {of['lines']:7} {of['code_lines']:7} {of['classes']:7}  {name}"
    yield f"{len(figures['circles'])} import circles"
    for files in figures["circles"]:
        yield f"  {len(files)} files: {', '.join(files)}"
    yield f"{len(figures['ambiguous_classes'])} public class names with more than one meaning"
    for name, modules in figures["ambiguous_classes"].items():
        yield f"  {name}: {', '.join(modules)}"


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
