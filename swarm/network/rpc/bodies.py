"""Message bodies: pydantic models to msgpack and back, with every way a hostile body could hurt closed.

A request is a head of fixed form, then the body. Who may not call is told so by the head alone: the body stays as it
came until somebody wants it.

```
 name's length  remaining seconds  most bytes of answer  name    body
 1              8 (a double)       8                     1-80    the rest; big endian
```

Size is checked before decoding; extension types do not exist here; map keys are strings; nesting is bounded twice, by
the C decoder's own stack (an error, not a crash) and by :data:`MAX_DEPTH` before the schema sees anything, and so is
the number of elements, by :data:`MAX_ELEMENTS`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack
from pydantic import ValidationError

from swarm.errors import PEER_ERRORS, PeerError, Violation
from swarm.network.protocols import MAX_BODY_BYTES, MAX_METHOD_NAME
from swarm.schema import Message

MAX_DEPTH = 16
"""Nesting no honest body comes near: a close record uses five levels."""

MAX_ELEMENTS = MAX_BODY_BYTES // 8
"""What a body may hold in all; an honest one has an element in some twenty bytes. Without a limit one body of 4 MiB of
nothing would hold the loop up for a second."""

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
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Violation(f"malformed body: {type(error).__name__}") from error
    _check_shape(value)
    return value


def decode(model: type[MessageT], plain: Any) -> MessageT:
    """The message that plain data stands for. Raises Violation naming the first field that is wrong."""
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(_printable(str(part)[:40]) for part in first["loc"][:6])  # keys of the body among them
        raise Violation(f"{model.__name__}.{where}: {first['type']}") from error


def pack_request(method: str, remaining_s: float, max_reply_bytes: int, body: Message) -> tuple[bytes, bytes]:
    """What a request frame holds, one after the other: head and body."""
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


def _check_shape(value: Any) -> None:
    """Level by level, so that the cost is one look at each element, of which each level is counted first, and the check
    itself cannot recurse."""
    level = [value] if isinstance(value, (tuple, dict)) else []
    elements = 0
    for _ in range(MAX_DEPTH):
        if not level:
            return
        elements += sum(map(len, level))
        if elements > MAX_ELEMENTS:
            raise Violation(f"a body of more than {MAX_ELEMENTS} elements")
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (tuple, dict))
        ]
    if level:
        raise Violation(f"a body nested deeper than {MAX_DEPTH}")
