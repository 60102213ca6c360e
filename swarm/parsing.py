"""TOML and JSON that somebody else wrote: what is none, or nests without end, is a ValueError in words."""

from __future__ import annotations

import json
import tomllib
from typing import Any

MAX_NESTED = 100
"""Levels of tables and lists in one another."""
_TOO_DEEP = f"it nests more than {MAX_NESTED} levels"


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML says. Raises ValueError where it is none, or nests more than :data:`MAX_NESTED` levels."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_nested(found)
    return found


def parse_json(data: str | bytes) -> Any:
    """Return what JSON says. Raises as :func:`parse_toml`."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_nested(found)
    return found


def _check_nested(found: Any) -> None:
    level = [found]
    for _ in range(MAX_NESTED):
        below = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [inner for inners in below for inner in inners if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
