"""What the page says about the keys of a RUN.toml is what the manifest's sections say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic_core import PydanticUndefined

from swarm.config import Manifest
from swarm.schema import Section
from tests.harness.sources import ROOT

_ROW = re.compile(r"\| `([a-z_0-9]+(?:\.[a-z_0-9]+)+)` \| (.+?) \| (.+?) \|")
_OF_ITSELF = {"run.nonce": "random"}
"""What ``swarm new`` fills in is no default of the manifest's."""
_NOT_TYPED = {"files"}
"""Digests, which ``swarm new`` writes."""


def _keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of every setting; the default of one that has none is None."""
    for name, field in section.model_fields.items():
        kind = type(field.default) if isinstance(field.default, Section) else field.annotation  # of several: our own
        inside = [one for one in get_args(kind) if isinstance(one, type) and issubclass(one, Section)]
        kind = inside[0] if type(None) in get_args(kind) and inside else kind  # a section that may be left out
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if field.default is PydanticUndefined else field.default


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, str]]:
    text = (ROOT / "peers" / "README.md").read_text(encoding="utf-8")
    return _ROW.findall(text.partition("## A run of your own")[2])


def test_run_file_table_names_every_key_in_the_manifest_s_order(rows: list[tuple[str, str, str]]) -> None:
    assert [key for key, _, _ in rows if key != "speed.profile"] == [
        key for key, _ in _keys(Manifest) if key not in _NOT_TYPED
    ]


def test_run_file_table_gives_the_defaults(rows: list[tuple[str, str, str]]) -> None:
    said = {key: default.strip("`") for key, default, _ in rows if key not in _OF_ITSELF}
    wrong = {key: said[key] for key, default in _keys(Manifest) if key in said and not _same(said[key], default)}
    assert wrong == {}
    assert {key: default for key, default, _ in rows if key in _OF_ITSELF} == _OF_ITSELF


def _same(said: str, default: object) -> bool:
    if default is None or said == "–":
        return default is None and said == "–"
    found = json.loads(said)
    found = tuple(found) if isinstance(found, list) else found
    return type(found) is type(default) and found == default
