"""The few messages of libp2p's circuit relay, version 2, that a relay sends and receives: bytes to messages and back.

Written by hand rather than generated: two messages with three fields that we need (libp2p's specification,
``relay/circuit-v2.md``). Both are protobuf, each behind its length as a varint. Fields that we do not know are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from swarm.errors import Violation

HOP = "/libp2p/circuit/relay/0.2.0/hop"
"""What a caller speaks with the relay."""
STOP = "/libp2p/circuit/relay/0.2.0/stop"
"""What the relay speaks with the peer that is called."""

MAX_MESSAGE_BYTES = 4096
_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class HopType(IntEnum):
    """Kinds of hop messages."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """Kinds of stop messages."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """The outcome of a request."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class CircuitMessage:
    """A hop or a stop message. ``peer`` is the binary id of who is called (hop) or who calls (stop)."""

    kind: int
    peer: bytes | None = None
    status: int | None = None


def encode_hop(message: CircuitMessage) -> bytes:
    """A hop message with its length before it. It carries no limit, which says: as long and as much as you like."""
    return _encode(message, status_field=5)


def encode_stop(message: CircuitMessage) -> bytes:
    """A stop message with its length before it."""
    return _encode(message, status_field=4)


def decode_hop(body: bytes) -> CircuitMessage:
    """A hop message without its length. Raises Violation."""
    return _decode(body, status_field=5)


def decode_stop(body: bytes) -> CircuitMessage:
    """A stop message without its length. Raises Violation."""
    return _decode(body, status_field=4)


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The next message's bytes and nothing of what follows. Raises Violation when it is longer than 4096 bytes,
    EOFError or OSError when the stream ends first. Waits as long as its caller does."""
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MAX_MESSAGE_BYTES or shift > 7 * _VARINT_BYTES:
            raise Violation(f"a circuit message of more than {MAX_MESSAGE_BYTES} bytes")
        if byte < 0x80:
            return await reader.readexactly(length)


def _encode(message: CircuitMessage, *, status_field: int) -> bytes:
    body = b"\x08" + _varint(message.kind)
    if message.peer is not None:
        inner = b"\x0a" + _varint(len(message.peer)) + message.peer
        body += b"\x12" + _varint(len(inner)) + inner
    if message.status is not None:
        body += _varint(status_field << 3) + _varint(message.status)
    return _varint(len(body)) + body


def _decode(body: bytes, *, status_field: int) -> CircuitMessage:
    kind, peer, status = 0, None, None
    for field, value in _fields(body):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 2 and isinstance(value, bytes):
            peer = next((inner for number, inner in _fields(value) if number == 1 and isinstance(inner, bytes)), None)
        elif field == status_field and isinstance(value, int):
            status = value
    return CircuitMessage(kind, peer, status)


def _fields(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(body):
        key, at = _read_varint(body, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _read_varint(body, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _read_varint(body, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise Violation(f"a circuit message with wire type {wire}")
        if size > len(body) - at:
            raise Violation("a circuit message that ends early")
        yield key >> 3, body[at : at + size]
        at += size


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index in range(_VARINT_BYTES):
        if at + index >= len(body):
            break
        byte = body[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise Violation("a circuit message with a broken number")
