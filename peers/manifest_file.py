"""A run manifest as a TOML file that a person can read and change, and as a contact sends it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter

from swarm.config import Manifest, parse_manifest
from swarm.disk import write_whole
from swarm.errors import ConfigError, Incompatible
from swarm.models.spec import MAX_VARIANTS
from swarm.parsing import parse_json
from swarm.schema import BINS, Section

PENDING = "0" * 64
"""The digest of a tokenizer that is still to come."""
PENDING_CENTRES = tuple((*(0,) * number, 1, *(0,) * (BINS - number - 1)) for number in range(MAX_VARIANTS))
"""Those of kinds of text that are still to be learnt."""
_BARE = re.compile("[A-Za-z0-9_-]+")


def render_manifest(manifest: Manifest) -> str:
    """TOML with every value written out; reading it back gives the same run id. Values that are None are left out."""
    return f"# run {manifest.run_id}\n" + render_tables(manifest.model_dump(mode="json"))


def render_tables(tables: Mapping[str, dict[str, Any]]) -> str:
    """TOML of tables of plain values; what is None is left out."""
    return "".join(_section(name, values) for name, values in tables.items())


def render_config(manifest: Manifest, origins: Mapping[str, str]) -> str:
    """TOML with every key of a manifest, also those that a run's leaves out where they say nothing: above each table
    and each key what it is, behind each value where it comes from and what it may be, all from the models. What has no
    value is a comment, and so is a tokenizer that is still to come. Reading it back gives the same manifest.

    Args:
        manifest: The run's.
        origins: Where values come from, in words, by dotted key; the others are defaults.
    """
    return "\n".join(_tables(manifest, "", origins)) + "\n"


def _tables(section: Section, above: str, origins: Mapping[str, str]) -> Iterator[str]:
    """The lines of a table, and of those in it."""
    inner, values, meaning = list[tuple[str, Section]](), list[str](), meanings(type(section))
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{above}.{name}" if above else name
        if isinstance(value, Section):
            inner.append((key, value))
            continue
        choices = [one for one in get_args(field.annotation) if get_origin(field.annotation) is Literal]
        said = [origins.get(key, "default"), " or ".join(map(json.dumps, choices)) if len(choices) > 1 else ""]
        plain = TypeAdapter(Any).dump_python(value, mode="json")
        empty = value in (None, {}, PENDING) or (name == "centres" and value == PENDING_CENTRES[: len(value)])
        values += (f"# {line}" for line in textwrap.wrap(meaning.get(name, ""), 116))
        values.append(f"# {name} has no value" if empty else f"{_pair(name, plain)}  # {'; '.join(filter(None, said))}")
    if above:
        unknown = getattr(section, "digest", "") == PENDING
        yield ""
        paragraphs = markdown(type(section).__doc__ or "")
        yield from (f"# {line}" for paragraph in paragraphs for line in textwrap.wrap(paragraph, 116))
        yield f"# [{above}] is made by swarm new" if unknown else f"[{above}]"
        yield from () if unknown else values
    for key, value in inner:
        yield from _tables(value, key, origins)


def meanings(section: type[Section]) -> dict[str, str]:
    """Return what each key of a section is: the text below the field. Read from the source here, since pydantic would
    read it whenever the section is imported."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {
        above.target.id: " ".join(markdown(str(below.value.value)))
        for above, below in zip(body, body[1:], strict=False)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }  # fmt: skip


def markdown(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring, without the markup of docstrings."""
    text = re.sub(r" \(:\w+:`[^`]*`\)", "", inspect.cleandoc(docstring)).replace("``", "`")
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Have :func:`render_manifest` on the disk under that name, whole, whenever the power fails. Raises OSError when
    the disk refuses."""
    write_whole(path, [render_manifest(manifest).encode()])


def manifest_sent(document: bytes) -> Manifest:
    """Return the manifest that a contact sent. Raises Incompatible for one that cannot be used: what a peer of another
    version may well accept is not a mistake of this machine's user."""
    try:
        return parse_manifest(parse_json(document), "the manifest that the contact sent")
    except ConfigError as error:
        remedy = "The run was made with another version of swarm: compare swarm --version here and there, and update."
        raise Incompatible(error.key, error.value, error.allowed, remedy, why=error.why) from error


def _section(name: str, values: dict[str, Any]) -> str:
    return f"\n[{name}]\n" + "".join(_lines(values))


def _lines(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            yield f"{_pair(key, value)}\n"


def _pair(key: str, value: Any) -> str:
    named = key if _BARE.fullmatch(key) else json.dumps(key)  # names of files have dots
    return f"{named} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_pair(key, item) for key, item in value.items() if item is not None) + " }"
    # JSON's strings, integers, booleans and lists of them are TOML's; its floats too, once they show a point. Its
    # escapes of characters beyond 16 bits are not, and a DEL must be escaped.
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    text = repr(value)
    return text if set(text) & set(".einf") else text + ".0"
