"""``place.json``: a place's record of the process that holds it, or held it last.

Read by commands that must start fast, hence checked by hand and not by pydantic.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.parsing import parse_json

STATE_FILE = "place.json"
SCHEMA = 1

_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceEnd:
    """The end of a peer: in words, as an exit code, and its time (seconds since the epoch)."""

    reason: str
    exit_code: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceState:
    """The last peer of a place. Empty text is what is not known yet; ``session`` is the path of its directory;
    ``data`` is the digest of what a trainer was given, empty for what comes with Python.

    ``keeper`` is the process that starts it again after a pause or a crash, 0: none.

    ``started`` is seconds since the epoch. ``end`` is None while it runs, and for ever when it was killed.
    """

    schema: int = SCHEMA
    pid: int
    started: float
    name: str = ""
    peer: str = ""
    role: str = ""
    run: str = ""
    run_name: str = ""
    session: str = ""
    data: str = ""
    keeper: int = 0
    end: PlaceEnd | None = None


def read_state(place: Path) -> PlaceState | None:
    """The state in a place's directory; None when there is none, or none that can be read."""
    try:
        with (place / STATE_FILE).open("rb") as file:
            document = parse_json(file.read(_MAX_BYTES))
        return _state(document)
    except (OSError, ValueError, TypeError):
        return None


def write_state(place: Path, state: PlaceState) -> None:
    """Replace the state in a place's directory, whole or not at all. Only for who holds the place's lock.

    Raises OSError when the disk refuses; the old state is there then.
    """
    # One name for ever: only one process writes here, and what a killed one left is written over.
    temporary = place / f".{STATE_FILE}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(state), file, indent=1)
        file.write("\n")
    os.replace(temporary, place / STATE_FILE)


def _state(document: Any) -> PlaceState:
    """Raises ValueError or TypeError for what is no state of ours; keys of a later version are passed over."""
    known = _checked(PlaceState, document)
    end = document.get("end")
    return PlaceState(**known | {"end": None if end is None else PlaceEnd(**_checked(PlaceEnd, end))})


def _checked(kind: type[PlaceState] | type[PlaceEnd], document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError(f"not a set of fields but {document!r:.60}")
    types: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float)}
    found = {}
    for field in dataclasses.fields(kind):
        if field.name in document and str(field.type) in types:
            value = document[field.name]
            if not isinstance(value, types[str(field.type)]):
                raise TypeError(f"{field.name} is {value!r}")
            found[field.name] = value
    return found
