"""Message bodies: pydantic models to msgpack and back, with every way a hostile body could hurt closed.

A request is a head of fixed form, then the body. Who may not call is told so by the head alone: the body stays as it
came until somebody wants it.

```
 name's length  remaining seconds  most bytes of answer  name    body
 1              8 (a double)       8                     1-80    the rest; big endian
```

Size is checked before decoding; extension types do not exist here; map keys are strings; nesting is bounded twice, by
the C decoder's own stack (an error, not a crash) and by :data:`MAX_DEPTH` before the schema sees anything, and so is
the number of elements, by its size. Then keys that a message does not have, and lists longer than it may
have, are refused (:func:`check_extent`) before anything is validated, which ends at the first thing that is wrong.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack
from pydantic import ValidationError

from swarm.errors import PEER_ERRORS, PeerError, Violation
from swarm.network.protocols import MAX_BODY_BYTES, MAX_METHOD_NAME
from swarm.schema import Message

MAX_DEPTH = 16
"""Nesting no honest body comes near: a close record uses five levels."""

FREE_ELEMENTS, BYTES_AN_ELEMENT = 64, 8
"""How many elements a body may hold in all: so many, and one more for so many bytes. An honest one has an element in
some twenty bytes. Without a limit one body of 4 MiB of nothing would hold the loop up for a second."""
MAX_ELEMENTS = FREE_ELEMENTS + MAX_BODY_BYTES // BYTES_AN_ELEMENT

MAX_REASON = 400
MAX_TIMEOUT_S = 24 * 3600.0

_HEAD = struct.Struct(">BdQ")
MAX_HEAD_BYTES = _HEAD.size + MAX_METHOD_NAME

MessageT = TypeVar("MessageT", bound=Message)


class Envelope(NamedTuple):
    """What a request frame carries: whom it is for, how long the caller still listens, and the body as it came."""

    method: str
    remaining_s: float
    max_reply_bytes: int
    body: bytes | memoryview


def pack(value: Any) -> bytes:
    """msgpack of plain data. Raises Violation when it is larger than MAX_BODY_BYTES (ours, so a bug or too big a
    step)."""
    data: bytes = msgpack.packb(value, use_bin_type=True)
    if len(data) > MAX_BODY_BYTES:
        raise Violation(f"a body of {len(data)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return data


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Plain data of a msgpack body: arrays are tuples. Raises Violation for anything malformed, too large or too
    deep."""
    if len(data) > MAX_BODY_BYTES:
        raise Violation(f"a body of {len(data)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    most = FREE_ELEMENTS + len(data) // BYTES_AN_ELEMENT
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=most,
            max_map_len=most,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Violation(f"malformed body: {type(error).__name__}") from error
    _check_shape(value, most)
    return value


def decode(model: type[MessageT], plain: Any) -> MessageT:
    """The message that plain data stands for. Raises Violation naming the first field that is wrong."""
    check_extent(model, plain)
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(_printable(str(part)[:40]) for part in first["loc"][:6])  # keys of the body among them
        raise Violation(f"{model.__name__}.{where}: {first['type']}") from error


# --- how much a message may hold -------------------------------------------------------------------------------------


class Extent(NamedTuple):
    """How much the plain data of a field may hold: ``most`` elements, of this extent each (None: not looked into); or
    those ``keys`` and no other, where the field is a message."""

    most: int
    each: Extent | None = None
    keys: Mapping[str, Extent | None] | None = None


def check_extent(model: type[Message], plain: Any) -> None:
    """Raise Violation where plain data has a key that the message has not, or more elements than a list may have.

    Costs a look at each container, not at what no container holds: less than validating the same, whatever it is.
    """
    extent = _extent_of(model)
    if extent is not None:
        _check_extent(extent, plain, model.__name__)


def _check_extent(extent: Extent, plain: Any, where: str) -> None:
    if not isinstance(plain, (tuple, dict)):
        return  # validation says what it should be
    if extent.keys is not None:
        if not isinstance(plain, dict):
            return
        for key, value in plain.items():
            if key not in extent.keys:
                raise Violation(f"{where}.{_printable(str(key)[:40])}: extra_forbidden")
            inner = extent.keys[key]
            if inner is not None:
                _check_extent(inner, value, f"{where}.{key}")
        return
    if len(plain) > extent.most:
        raise Violation(f"{where}: too_long")
    if extent.each is not None:
        for value in plain.values() if isinstance(plain, dict) else plain:
            _check_extent(extent.each, value, where)


@functools.cache
def _extent_of(model: type[Message]) -> Extent | None:
    return _extent(model.__pydantic_core_schema__, {})


def _extent(schema: Any, known: Mapping[str, Any]) -> Extent | None:
    """Return what pydantic's own schema of a message says; ``known`` are schemas that it refers to by name."""
    kind = schema["type"]
    if kind == "definitions":
        return _extent(schema["schema"], {**known, **{one["ref"]: one for one in schema["definitions"]}})
    if kind == "definition-ref":
        return _extent(known[schema["schema_ref"]], known)
    if kind == "json-or-python":
        return _extent(schema["python_schema"], known)
    if kind == "model-fields":
        return Extent(0, keys={name: _extent(field["schema"], known) for name, field in schema["fields"].items()})
    if kind == "tuple" and "variadic_item_index" in schema:
        return Extent(schema.get("max_length", MAX_ELEMENTS), _extent(schema["items_schema"][0], known))
    if kind == "tuple":
        return Extent(len(schema["items_schema"]))
    if kind == "dict":
        return Extent(schema.get("max_length", MAX_ELEMENTS), _extent(schema["values_schema"], known))
    if kind == "named-tuple":
        return Extent(MAX_NAMED)
    if kind == "union":
        choices = [_extent(one[0] if isinstance(one, tuple) else one, known) for one in schema["choices"]]
        return functools.reduce(_either, choices)
    return _extent(schema["schema"], known) if "schema" in schema else Extent(0)


def _either(one: Extent | None, other: Extent | None) -> Extent | None:
    """Return the extent of what is one or the other: validation says whether it is either."""
    if one is None or other is None:
        return None
    keys = None
    if one.keys is not None and other.keys is not None:
        both = one.keys.keys() & other.keys.keys()
        keys = {**one.keys, **other.keys, **{key: _either(one.keys[key], other.keys[key]) for key in both}}
    return Extent(max(one.most, other.most), _either(one.each, other.each), keys)


MAX_NAMED = 8
"""Elements of a named tuple: more than any has."""


def pack_request(method: str, remaining_s: float, max_reply_bytes: int, body: Message) -> tuple[bytes, bytes]:
    """Return what a request frame holds, one after the other: head and body."""
    return _HEAD.pack(len(method), remaining_s, max_reply_bytes) + method.encode("ascii"), pack(body.to_wire())


def unpack_request(data: bytes | memoryview) -> Envelope:
    """Read a request's head; nothing of its body is looked at. Raises Violation."""
    if len(data) < _HEAD.size:
        raise Violation("malformed request")
    length, remaining_s, max_reply_bytes = _HEAD.unpack_from(data)
    begins = _HEAD.size + length
    name = bytes(data[_HEAD.size : begins])
    if not 0 < length <= MAX_METHOD_NAME or len(name) < length or not name.isascii():
        raise Violation("malformed method name")
    if not 0 < remaining_s <= MAX_TIMEOUT_S:  # which no NaN is either
        raise Violation("a deadline that is not within a day")
    return Envelope(name.decode("ascii"), remaining_s, max_reply_bytes, data[begins:])


def pack_error(error: PeerError) -> bytes:
    """The body of an error frame: code and reason, without the peer (the receiver knows whom it asked)."""
    return pack((error.code, error.reason[:MAX_REASON]))


def unpack_error(data: bytes | bytearray | memoryview, peer: str) -> PeerError:
    """The error another peer reports, as the same type. Raises Violation when it is malformed."""
    value = unpack(data)
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise Violation("malformed error")
    code, reason = value
    return PEER_ERRORS.get(code, PeerError)(_printable(reason[:MAX_REASON]), peer=peer)


def _printable(text: str) -> str:
    """Another peer's words as a log can have them: on one line, and without a terminal's commands."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError("extension types are not used")


def _check_shape(value: Any, most: int) -> None:
    """Level by level, so that the cost is one look at each element, of which each level is counted first, and the check
    itself cannot recurse."""
    level = [value] if isinstance(value, (tuple, dict)) else []
    elements = 0
    for _ in range(MAX_DEPTH):
        if not level:
            return
        elements += sum(map(len, level))
        if elements > most:
            raise Violation(f"a body of more than {most} elements")
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (tuple, dict))
        ]
    if level:
        raise Violation(f"a body nested deeper than {MAX_DEPTH}")
