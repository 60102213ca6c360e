"""Which module may import what: the rules of ``[tool.layers]`` in pyproject.toml applied to parsed sources.

A *unit* is a module or package named in ``order``; a module belongs to the longest unit that is a prefix of its
name. A unit imports from itself, from units of lower layers, and from where ``sideways`` says. Two refinements:

* A package's ``__init__`` runs whenever anything inside the package is imported, so it belongs to the lowest layer
  inside: ``swarm/network/__init__.py`` may not import what ``swarm.network.protocols`` may not see.
* An import under ``if TYPE_CHECKING:`` is knowledge too and is held to the same order, except that it may name a
  type of another unit of the same layer.

Imports inside functions count like those at the top, and so does ``importlib.import_module`` of a literal.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.sources import Source

_SEEDED = {"Random", "SystemRandom", "default_rng", "Generator", "SeedSequence", "PCG64", "Philox", "BitGenerator"}
"""What may be used of ``random`` and ``numpy.random``: generators with a state of their own."""

_IMPORTING_CALLS = ("importlib.import_module", "import_module", "__import__")


@dataclass(frozen=True, slots=True)
class Rules:
    """``[tool.layers]``.

    ``order``: layers of units, lowest first. ``sideways``: unit → units of the same layer that it may import.
    ``sees``: unit → the only units of ours that it may import, beside the packages around it. ``foreign``: top-level
    package of somebody else → the units that may import it. ``banned``: dotted name → the units that may use it all the
    same.
    """

    order: tuple[tuple[str, ...], ...]
    sideways: Mapping[str, Sequence[str]]
    sees: Mapping[str, Sequence[str]]
    foreign: Mapping[str, Sequence[str]]
    banned: Mapping[str, Sequence[str]]

    @property
    def layer_of(self) -> dict[str, int]:
        """Unit → number of its layer."""
        return {unit: number for number, units in enumerate(self.order) for unit in units}


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the full dotted ``target``, and whether only type checkers execute it."""

    target: str
    line: int
    typing_only: bool


def load_rules(pyproject: Path) -> Rules:
    """The rules as they stand in pyproject.toml. Raises KeyError for a missing table."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["layers"]
    order = tuple(tuple(units) for units in table["order"])
    return Rules(order, table["sideways"], table["sees"], table["foreign"], table["banned"])


def violations(sources: Sequence[Source], rules: Rules) -> list[str]:
    """One line per broken rule: ``path:line: what, and why not``."""
    modules = {source.name for source in sources}
    found = []
    for source in sources:
        for item in imports(source):
            reason = _refusal(source, item, modules, rules)
            if reason:
                found.append(f"{source.path}:{item.line}: {reason}")
        found.extend(f"{source.path}:{line}: {reason}" for line, reason in _banned_uses(source, rules))
    return list(dict.fromkeys(found))  # several names taken from one module are one fault


def imports(source: Source) -> Iterator[Import]:
    """Every import of a module, wherever in it; ``from a import b`` gives ``a.b``."""
    guarded = {id(node) for block in _typing_blocks(source.tree) for node in ast.walk(block)}
    for node in ast.walk(source.tree):
        for target in _targets(node, source):
            yield Import(target, getattr(node, "lineno", 0), id(node) in guarded)


def _typing_blocks(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from node.body


def _targets(node: ast.AST, source: Source) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source.name.split(".") if source.package else source.name.split(".")[:-1]
            kept = package[: len(package) - (node.level - 1)]
            base = ".".join([*kept, *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTING_CALLS:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _refusal(source: Source, item: Import, modules: set[str], rules: Rules) -> str:
    """Why an import is not allowed, or nothing."""
    top = item.target.partition(".")[0]
    if top not in {name.partition(".")[0] for name in modules}:
        allowed = rules.foreign.get(top)
        if allowed is None or _inside(source.name, allowed):
            return ""
        return f"{source.name} imports {top}, which only {_listed(allowed)} may"
    target = _module(item.target, modules)
    unit, other = _unit(source.name, rules), _unit(target, rules)
    layer, below = _layer(source, rules), _layer_named(target, rules)
    if layer is None or below is None:
        return f"{source.name if layer is None else target} has no layer in pyproject.toml"
    enclosing = _inside(source.name, [target])  # Python runs it before us, asked or not
    if unit in rules.sees and not enclosing and not _inside(target, [unit, *rules.sees[unit]]):
        return f"{source.name} imports {target}, but {unit} sees only {_listed(rules.sees[unit])}"
    own_package = unit == other and layer == rules.layer_of.get(unit)
    if own_package or enclosing or below < layer or _inside(target, rules.sideways.get(unit, ())):
        return ""
    if item.typing_only and below == layer:
        return ""
    return f"{source.name} (layer {layer}) imports {target} (layer {below})"


def _banned_uses(source: Source, rules: Rules) -> Iterator[tuple[int, str]]:
    names = _imported_names(source)
    for node in ast.walk(source.tree):
        dotted = _dotted(node, names)
        if dotted is None:
            continue
        line = getattr(node, "lineno", 0)
        if dotted in rules.banned and not _inside(source.name, rules.banned[dotted]):
            yield line, f"{source.name} uses {dotted}"
        module, _, attribute = dotted.rpartition(".")
        if module in ("random", "numpy.random") and attribute not in _SEEDED:
            yield line, f"{source.name} uses {dotted}: take a seeded generator as an argument"


def _imported_names(source: Source) -> dict[str, str]:
    """Local name → what it stands for, for everything imported anywhere in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _dotted(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """The full name that an attribute chain or a bare name stands for, if it begins with an import."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _module(target: str, modules: set[str]) -> str:
    """The module that holds a target: the target itself, or what it is taken from."""
    while target not in modules and "." in target:
        target = target.rpartition(".")[0]
    return target


def _unit(name: str, rules: Rules) -> str:
    fitting = [unit for unit in rules.layer_of if _inside(name, [unit])]
    return max(fitting, key=len, default=name)


def _layer(source: Source, rules: Rules) -> int | None:
    own = rules.layer_of.get(_unit(source.name, rules))
    if not source.package:
        return own
    within = [layer for unit, layer in rules.layer_of.items() if _inside(unit, [source.name])]
    return min([*within, *([] if own is None else [own])], default=None)


def _layer_named(target: str, rules: Rules) -> int | None:
    """Layer of an import's target: a package that only contains units counts as the lowest of them."""
    own = rules.layer_of.get(_unit(target, rules))
    within = [layer for unit, layer in rules.layer_of.items() if _inside(unit, [target])]
    return own if own is not None else min(within, default=None)


def _inside(name: str, units: Sequence[str]) -> bool:
    return any(name == unit or name.startswith(unit + ".") for unit in units)


def _listed(units: Sequence[str]) -> str:
    return ", ".join(units) or "nobody"
