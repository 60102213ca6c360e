"""The pages of ``docs/reference``, made of the code: ``python -m tests.harness.reference`` renews them.

Settings and options come from the models of :mod:`peers.options` and from typer's own help; keys of the manifest from
the sections of :mod:`swarm.config`; events from their classes; metrics from what the exporter says of itself; and exit
codes from :mod:`peers.exit_codes`.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import PydanticUndefined

from peers import exit_codes
from peers.cli.app import app
from peers.manifest_file import markdown, meanings
from peers.options.fields import PREFIX, Setting, settings_of
from peers.options.model import PeerOptions
from swarm.config import Manifest
from swarm.events import Event
from swarm.models.hf.hf_config import HfConfig
from swarm.monitoring.recorder import ENVELOPE
from swarm.schema import Section
from tests.harness.rigs.dashboard import eventful_exposition
from tests.harness.sources import ROOT

FOLDER = ROOT / "docs" / "reference"
MADE = "Made of the code by `python -m tests.harness.reference`: do not edit it.\n"
GROUPS = {
    "invite": "The run and the part in it",
    "data": "Data of a trainer",
    "model_files": "The model's files",
    "stage": "Part and name",
    "place": "Place on this machine",
    "listen": "Network",
    "device": "Device and limits",
    "checkpoints": "Checkpoints",
    "max_in_flight": "Work under way",
    "grace": "Leaving and coming back",
    "dashboard": "Showing and reporting",
}
"""Headings of the settings, each above the setting with which it begins."""


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    made = {
        "settings": _settings(),
        "manifest": _manifest(),
        "events": _events(),
        "metrics": _metrics(),
        "exit-codes": _exit_codes(),
        "commands": _commands(),
    }
    return {f"{name}.md": "\n".join((*lines, "")) for name, lines in made.items()}


# --- lines of Markdown -----------------------------------------------------------------------------------------------


def _head(title: str, *said: str) -> list[str]:
    return [f"# {title}", "", MADE, *(f"{line}\n" for line in said)]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table, whose cells are Markdown already, and the empty line behind it."""
    lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Return a text of the command line, in which nothing is markup."""
    return re.sub(r"([*\[\]])", r"\\\1", html.escape(text, quote=False))


# --- settings --------------------------------------------------------------------------------------------------------


def _settings() -> list[str]:
    lines = _head(
        "Settings of a peer",
        "Give a setting as an option of `swarm join` or `swarm new`, as an environment variable, or as a key of a TOML "
        "file (`--config FILE`). An option overrides the variable, which overrides the file.",
        f"The key of `--data-field` is `data_field`; its variable is `{PREFIX}DATA_FIELD`. An empty variable counts as "
        "unset. Write a list as TOML in a file, with commas or spaces in a variable (`pause_when`: with semicolons), "
        "and by repeating the option.",
        f"An unusable value is an error that names its source, and so is an unknown `{PREFIX}` variable or key. `swarm "
        f"new` ignores what it does not offer: `{PREFIX}NAME` names a founder's peer, `--name` of `swarm new` its run. "
        "[Commands](commands.md) has the options that are no settings.",
    )
    groups: dict[str, list[Setting]] = {}
    for key, setting in settings_of(PeerOptions).items():
        heading = GROUPS.get(key) or next(reversed(groups))
        groups.setdefault(heading, []).append(setting)
    for heading, settings in groups.items():
        rows = [
            (
                _code(", ".join(one.names)),
                _plain(one.allowed),
                _plain(one.said_default) or ("off" if one.flag else "–"),
                " and ".join(one.option.of),
                _plain(one.option.help),
            )
            for one in settings
        ]
        lines += [f"## {heading}", "", *_table(("option", "type", "default", "of", "what it does"), rows)]
    return lines[:-1]


# --- the manifest ----------------------------------------------------------------------------------------------------


def _manifest() -> list[str]:
    lines = _head(
        "Keys of the manifest",
        "A run has a manifest, on which all its peers agree: `swarm new RUN.toml` takes one, and fills in what is left "
        "out. The run's id is its digest.",
        "`swarm new --print-config` prints the manifest with every key, where each value comes from, and what it is. "
        "`speed.profile` is no key of it: a profile replaces values when the run is founded.",
        "The founder refuses combinations that cannot work, with key, value, what is allowed and the remedy.",
    )
    own: list[tuple[str, ...]] = []
    for name, field in Manifest.model_fields.items():
        if inner := _section_of(field):
            lines += _tables(name, inner)
            lines += _tables(name, HfConfig, ' with `family = "hf"`') if name == "model" else []
        else:
            own.append(_key(name, name, field, meanings(Manifest)[name]))
    return [*lines, "## Files", "", *_table(_COLUMNS, own)][:-1]


_COLUMNS = ("key", "type", "default", "what it does")


def _tables(above: str, section: type[Section], beside: str = "") -> Iterator[str]:
    """The table of a section, and those of the sections in it."""
    said, inner, rows = meanings(section), [], []
    for name, field in section.model_fields.items():
        if below := _section_of(field):
            inner.append((f"{above}.{name}", below))
        else:
            rows.append(_key(f"{above}.{name}", name, field, said[name]))
    yield from (f"## `[{above}]`{beside}", "")
    for paragraph in markdown(section.__doc__ or ""):
        told = re.sub(r"^`[\w\[\].]+`(?: of `\[\w+\]`)?[:,] ", "", paragraph)
        yield from (told[0].upper() + told[1:] if told[0] != "`" else told, "")
    yield from _table(_COLUMNS, rows)
    for name, below in inner:
        if not (beside and above == "model"):  # an adapter's keys are those of any family
            yield from _tables(name, below)


def _key(key: str, name: str, field: Any, meaning: str) -> tuple[str, ...]:
    default = field.get_default(call_default_factory=True)
    shown = "–" if default in (None, PydanticUndefined) else _code(json.dumps(default))
    return _code(key), _type(field.annotation, field.metadata), shown, meaning


def _section_of(field: Any) -> type[Section] | None:
    """Return the section that a field is, that of our own model where it may be one of several."""
    if isinstance(field.default, Section):
        return type(field.default)
    kinds = (field.annotation, *get_args(field.annotation))
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Section)), None)


def _type(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """Say what values a type has."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [part for one in more for part in getattr(one, "metadata", [one])])
    if get_origin(annotation) in (Union, types.UnionType):
        return _type(next(one for one in get_args(annotation) if one is not types.NoneType))
    if get_origin(annotation) is Literal:
        return ", ".join(_code(json.dumps(one)) for one in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list: {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is not None:
        return f"table: {_type(get_args(annotation)[1])}"
    found = ((sign, getattr(one, name, None)) for one in limits for name, sign in _SIGNS.items())
    return ", ".join([_KINDS[annotation], *(f"{sign} {bound:.12g}" for sign, bound in found if bound is not None)])


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


# --- events ----------------------------------------------------------------------------------------------------------


def _events() -> list[str]:
    lines = _head(
        "Events",
        "Each peer appends its events to `events.jsonl`, one JSON object a line. Programs read these, never the log.",
        f"A line has the keys {', '.join(map(_code, ENVELOPE))}: wall-clock and monotonic seconds, the peer's id, the "
        "event's kind, and, only where it is not 0, how many events before it found no room. The others are the fields "
        "below.",
        "A microbatch is the list `[trainer, shard, epoch, position]`. A value behind a field is its default.",
    )
    groups: dict[str, list[type[Event]]] = {}
    for kind in Event.kinds().values():
        if kind.__module__.startswith("swarm.events."):
            groups.setdefault(kind.__module__, []).append(kind)
    for module, kinds in sorted(groups.items()):
        told = " ".join((inspect.getmodule(kinds[0]).__doc__ or "").split())
        lines += [f"## {module.rpartition('.')[2].capitalize()}", "", " ".join(markdown(told)), ""]
        rows = [
            (_code(kind.__name__), ", ".join(_fields(kind)), " ".join(markdown(kind.__doc__ or "")))
            for kind in sorted(kinds, key=lambda kind: kind.__name__)
        ]
        lines += _table(("kind", "fields", "meaning"), rows)
    return lines[:-1]


def _fields(kind: type[Event]) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        stored = f"{field.name}_" if field.name in ENVELOPE else field.name
        has = "" if field.default is dataclasses.MISSING else f" = {json.dumps(field.default)}"
        yield _code(f"{stored}: {field.type}{has}")


# --- metrics ---------------------------------------------------------------------------------------------------------


def _metrics() -> list[str]:
    lines = _head(
        "Metrics",
        "`swarm dashboard`, and a peer with `--dashboard`, serve these at `/metrics` in the text format of Prometheus. "
        "A figure that nobody knows is left out.",
    )
    rows = [
        (
            _code(family.name + ("_total" if family.type == "counter" else "")),
            family.type,
            ", ".join(map(_code, sorted({label for sample in family.samples for label in sample.labels}))),
            family.documentation,
        )
        for family in text_string_to_metric_families(eventful_exposition())
    ]
    return [*lines, *_table(("name", "type", "labels", "meaning"), rows)][:-1]


# --- exit codes ------------------------------------------------------------------------------------------------------


def _exit_codes() -> list[str]:
    lines = _head(
        "Exit codes",
        "With `--retry` a peer starts again after the codes of the last column, and after death by the signals "
        f"{', '.join(sorted(one.name for one in exit_codes.CRASHES))}; a supervisor may do the same.",
    )
    source = inspect.getsource(exit_codes)
    rows = [
        (
            str(getattr(exit_codes, name)),
            " ".join(markdown(said)),
            "yes" if exit_codes.worth_a_retry(getattr(exit_codes, name)) else "",
        )
        for name, said in _said_below(ast.parse(source)).items()
        if name.startswith("EXIT_") and name != "EXIT_CODES"
    ]
    return [*lines, *_table(("code", "meaning", "`--retry` starts again"), rows)][:-1]


def _said_below(module: ast.Module) -> dict[str, str]:
    """Return the texts below constants, by their names."""
    return {
        above.targets[0].id: below.value.value
        for above, below in zip(module.body, module.body[1:], strict=False)
        if isinstance(above, ast.Assign)
        and isinstance(above.targets[0], ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


# --- commands --------------------------------------------------------------------------------------------------------


def _commands() -> list[str]:
    root: Any = typer.main.get_command(app)
    lines = _head(
        "Commands", "`swarm COMMAND --help` says the same. [Exit codes](exit-codes.md) are those of all of them."
    )
    for path, command, context in _every(root, ["swarm"], None):
        lines += _command(path, command, context)
    return lines[:-1]


def _every(command: Any, path: list[str], parent: Any) -> Iterator[tuple[list[str], Any, Any]]:
    """A command, and those below it."""
    context = typer.Context(command, info_name=path[-1], parent=parent)
    yield path, command, context
    below: Mapping[str, Any] = getattr(command, "commands", None) or {}
    for name in below:
        yield from _every(below[name], [*path, name], context)


def _command(path: list[str], command: Any, context: Any) -> Iterator[str]:
    usage = " ".join((*path, *command.collect_usage_pieces(context)))
    yield from (f"## `{' '.join(path)}`", "", "```", usage, "```", "")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```", *paragraph.splitlines()[1:], "```", "")
        else:
            yield from (_plain(" ".join(paragraph.split())), "")
    of_peer = [one for one in command.get_params(context) if _is_setting(one, path)]
    others = [one for one in command.get_params(context) if one not in of_peer and one.name != "help"]
    rows = [(_code(name), _plain(said)) for name, said in (one.get_help_record(context) for one in others)]
    if rows:
        yield from _table(("option", "what it does"), rows)
    if of_peer:
        yield from (f"[Settings of a peer](settings.md): {', '.join(_code(one.opts[0]) for one in of_peer)}.", "")


def _is_setting(parameter: Any, path: Sequence[str]) -> bool:
    """Whether it is one of those that the settings' page describes, and that this command has all of."""
    command = {"swarm service install": "join"}.get(" ".join(path), path[-1])
    setting = settings_of(PeerOptions).get(parameter.name)
    return command in ("join", "new") and setting is not None and command in setting.option.of


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
