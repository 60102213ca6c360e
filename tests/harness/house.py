"""The house rules that ruff does not know: docstrings on what is public, and sizes that a reader can hold."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.harness.sources import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7


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

    A command of ``peers.cli`` has one parameter for each option it offers, and is let off the last.
    """
    found = []
    for source in sources:
        if source.lines > MAX_FILE_LINES:
            found.append(f"{source.path}: {source.lines} lines")
        for function in _functions(source.tree):
            where = f"{source.path}:{function.lineno}: {function.name}"
            if _length(function) > MAX_FUNCTION_LINES:
                found.append(f"{where}: {_length(function)} lines")
            if _parameters(function) > MAX_PARAMETERS and not source.name.startswith("peers.cli"):
                found.append(f"{where}: {_parameters(function)} parameters")
    return found


def attributes_read(sources: Iterable[Source]) -> set[str]:
    """Every name read as ``something.name`` in these sources."""
    return {
        node.attr
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


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
