"""What decoding a hostile body costs: how many elements it has, how many errors are collected, how deep a form is."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from peers.chaos.strangers.bodies import AnyRpc
from swarm.errors import Violation
from swarm.network.rpc.bodies import BYTES_AN_ELEMENT, FREE_ELEMENTS, check_extent, decode, unpack


def elements(plain: Any) -> int:
    """How many elements plain data has, at every depth."""
    level, count = [plain], 0
    while level:
        inner = [
            item
            for one in level
            if isinstance(one, (tuple, dict))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        count += len(inner)
        level = inner
    return count


def problems_of(rpc: AnyRpc, packed: bytes) -> int:
    """Decode a body in steps, count what each may look at; return how many errors pydantic has collected, 0 for a body
    that was refused before, or is good."""
    try:
        plain = unpack(packed)
    except Violation:
        return 0
    assert elements(plain) <= FREE_ELEMENTS + len(packed) // BYTES_AN_ELEMENT
    try:
        check_extent(rpc.request, plain)
    except Violation:
        return 0
    try:
        rpc.request.model_validate(plain)
    except ValidationError as error:
        return error.error_count()
    decode(rpc.request, plain)  # raises nothing
    return 0


def fields_of(schema: Any) -> int:
    """How many fields a message has, with those of messages in it."""
    if schema["type"] == "model-fields":
        return sum(1 + fields_of(field["schema"]) for field in schema["fields"].values())
    inner = [schema[key] for key in ("schema", "values_schema") if key in schema] + schema.get("items_schema", [])
    return 4 + sum(map(fields_of, inner))
