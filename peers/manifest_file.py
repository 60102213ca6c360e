"""A run manifest as a TOML file that a person can read and change, and as a contact sends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.config import Manifest, parse_manifest
from swarm.disk import write_whole
from swarm.errors import ConfigError, Incompatible
from swarm.parsing import parse_json

_BARE = re.compile("[A-Za-z0-9_-]+")


def render_manifest(manifest: Manifest) -> str:
    """TOML with every value written out; reading it back gives the same run id. Values that are None are left out."""
    return f"# run {manifest.run_id}\n" + render_tables(manifest.model_dump(mode="json"))


def render_tables(tables: Mapping[str, dict[str, Any]]) -> str:
    """TOML of tables of plain values; what is None is left out."""
    return "".join(_section(name, values) for name, values in tables.items())


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
