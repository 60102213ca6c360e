"""Bodies that a hostile peer may send: for each method those of its form, and those that are corrupted somehow.

Each is plain data, as msgpack gives it; :func:`frames` packs them to at most a size, :func:`oversized` makes those that
only members may send, :func:`well_formed` those that a method may answer. Everything is drawn from one seed.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

import swarm
from swarm.network.protocols import MAX_BODY_BYTES, Rpc
from swarm.schema import Message

AnyRpc = Rpc[Any, Any]

_TEXTS = ("", "Q" * 46, "0" * 16, "0" * 64, "0" * 128, "ends", "stage-0", "unreachable", "x" * 300)
_NUMBERS = (0, 1, -1, 2**53 - 2, 2**63 - 1, 1.0, 0.0, -1.5)
_FEW = 3


@functools.cache
def all_rpcs() -> list[AnyRpc]:
    """Return every method that the library defines, by name."""
    found: dict[str, AnyRpc] = {}
    root = Path(swarm.__path__[0])
    for path in root.rglob("*.py"):
        if "= Rpc(" not in path.read_text(encoding="utf-8"):
            continue  # importing everything takes seconds
        module = ".".join(("swarm", *path.relative_to(root).with_suffix("").parts))
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Rpc):
                found[value.name] = value
    return [found[name] for name in sorted(found)]


def frames(rpc: AnyRpc, count: int, seed: int, most_bytes: int = MAX_BODY_BYTES) -> Iterator[bytes]:
    """Yield packed request bodies of one method, of at most a size, a quarter of them near it."""
    rng = random.Random(f"{seed} {rpc.name}")
    for number in range(count):
        many = most_bytes // 128 if number % 4 == 0 else _FEW
        plain = _like(schema_of(rpc.request), rng, many)
        for _ in range(rng.choice((0, 1, 1, 2))):
            plain = _corrupt(plain, rng, many)
        packed = msgpack.packb(plain, use_bin_type=True)
        while len(packed) > most_bytes:
            many //= 2
            plain = _corrupt(_like(schema_of(rpc.request), rng, many), rng, many)
            packed = msgpack.packb(plain, use_bin_type=True)
        yield packed


def well_formed(rpc: AnyRpc, rng: random.Random, known: Mapping[str, Any]) -> dict[str, Any]:
    """A body of a method's form; fields whose names are ``known`` have what is known, so that it may be answered."""
    plain = _like(schema_of(rpc.request), rng, _FEW)
    return {name: known.get(name, value) for name, value in plain.items()}


def oversized(rng: random.Random) -> Iterator[Any]:
    """Yield bodies of 0.5 to 4 MiB, without end: of unknown keys, of over-long lists, of one long text."""
    while True:
        yield {f"key-{number}": number for number in range(rng.randrange(100_000, 160_000))}
        yield {"started": ((),) * rng.randrange(1 << 19, 3 << 20)}
        yield {"reason": "x" * rng.randrange(1 << 19, 3 << 20)}


def schema_of(message: type[Message]) -> Any:
    """Return pydantic's schema of a message, with what it refers to by name in place."""
    return _inlined(message.__pydantic_core_schema__, {})


def _inlined(schema: Any, known: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(one, known) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "definitions":
        return _inlined(schema["schema"], known | {one["ref"]: one for one in schema["definitions"]})
    if schema.get("type") == "definition-ref":
        return _inlined(known[schema["schema_ref"]], known)
    return {key: _inlined(value, known) for key, value in schema.items()}


def _like(schema: Any, rng: random.Random, many: int) -> Any:
    """A value of a schema's form, its lists as long as ``many`` where that is allowed."""
    kind = schema["type"]
    if kind == "model-fields":
        return {name: _like(field["schema"], rng, many) for name, field in schema["fields"].items()}
    if kind == "named-tuple":
        return ("Q" * 46, "0" * 16, 1, 2)
    if kind == "nullable" and rng.random() < 0.3:
        return None
    if "schema" in schema:
        return _like(schema["schema"], rng, many)
    if kind == "tuple" and "variadic_item_index" not in schema:
        return tuple(_like(item, rng, 1) for item in schema["items_schema"])
    if kind in ("tuple", "dict"):
        count = min(rng.choice((0, 1, many)), schema.get("max_length", many) + rng.choice((0, 0, 1)))
        if kind == "tuple":
            return (_like(schema["items_schema"][0], rng, 2),) * count
        return {f"Q{number}": _like(schema["values_schema"], rng, 1) for number in range(count)}
    return _scalar(schema, rng)


def _scalar(schema: Any, rng: random.Random) -> Any:
    kind = schema["type"]
    if kind == "literal":
        return rng.choice(list(schema["expected"]))
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "bytes":
        return b"s" * schema.get("min_length", 8)
    if kind == "float":
        return rng.random() * 10
    return rng.choice(_TEXTS) if kind == "str" else rng.choice((0, 1, 7))


def _corrupt(plain: Any, rng: random.Random, many: int) -> Any:
    """The same with something wrong in it."""
    wrong = rng.choice(_WRONGS)(rng, many)
    if not isinstance(plain, dict) or not plain or rng.random() < 0.2:
        return wrong
    key = rng.choice(sorted(map(str, plain)))
    if rng.random() < 0.3:
        return plain | {f"{key}{number}": wrong for number in range(min(many, 2000))}
    inner = plain.get(key)
    if isinstance(inner, tuple) and inner and rng.random() < 0.5:
        return plain | {key: (*inner[: rng.randrange(len(inner))], wrong, *inner)}
    return plain | {key: _corrupt(inner, rng, many) if isinstance(inner, dict) and rng.random() < 0.7 else wrong}


def _nest(rng: random.Random, many: int) -> Any:
    value: Any = ()
    for _ in range(rng.randrange(40)):
        value = (value,) if rng.random() < 0.5 else {"a": value}
    return value


_WRONGS = (
    lambda rng, many: rng.choice(_TEXTS),
    lambda rng, many: rng.choice(_NUMBERS),
    lambda rng, many: None,
    lambda rng, many: (rng.choice(_NUMBERS),) * (4 * many),
    lambda rng, many: ((),) * (2 * many),
    lambda rng, many: ({"a": 1},) * many,
    lambda rng, many: {str(number): number for number in range(many)},
    lambda rng, many: b"\x00" * many,
    _nest,
)
