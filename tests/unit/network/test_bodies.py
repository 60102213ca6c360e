"""Bodies: what goes through, and what must not."""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgpack
import pytest
from pydantic import Field

from swarm.errors import PEER_ERRORS, PeerError, Violation
from swarm.ids import MicrobatchId
from swarm.network.protocols import MAX_BODY_BYTES, MAX_METHOD_NAME
from swarm.network.rpc.bodies import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_HEAD_BYTES,
    decode,
    pack,
    pack_error,
    pack_request,
    unpack,
    unpack_error,
    unpack_request,
)
from swarm.network.rpc.framing import HEADER_BYTES, MAX_CONTENT_BYTES, Kind, decode_header, encode_frame
from swarm.schema import Message


class Holder(Message):
    """Everything at once."""

    ids: tuple[MicrobatchId, ...] = ()
    table: dict[str, float] = {}


class Blob(Message):
    """As large as it is made."""

    blob: bytes


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x01\x02",
        b"\x81\x01\x02",
        b"\xa1\xff",
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.ExtType(0x40, b"")),
        msgpack.packb(msgpack.Timestamp(1)),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\x01",
        pack(nested(MAX_DEPTH + 1)),
        b"\xdd" + (MAX_ELEMENTS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ELEMENTS + 1),
        pack([[None] * (MAX_ELEMENTS // 4)] * 4),
        pack([[()] * (MAX_ELEMENTS // 4)] * 4),
    ],
)
def test_body_that_is_malformed_or_too_deep_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation):
        unpack(data)


def test_body_of_honest_depth_goes_through() -> None:
    assert unpack(pack(nested(MAX_DEPTH))) is not None


def test_body_too_large_is_a_violation_on_both_sides() -> None:
    with pytest.raises(Violation, match="exceeds"):
        pack(bytes(MAX_BODY_BYTES))
    with pytest.raises(Violation, match="exceeds"):
        unpack(bytes(MAX_BODY_BYTES + 1))


def test_body_of_another_shape_names_the_field_and_not_its_content() -> None:
    with pytest.raises(Violation, match=r"Holder\.table\.x: float_type") as caught:
        decode(Holder, {"table": {"x": "secret" * 1000}})
    assert "secret" not in str(caught.value)


def test_body_with_a_hostile_key_is_told_without_what_a_terminal_obeys() -> None:
    with pytest.raises(Violation) as caught:
        decode(Holder, {"table": {"x\x1b[31m\ny": "no number"}})
    assert caught.value.reason == "Holder.table.x?[31m?y: float_type"


def head(name: bytes = b"a/1/b", remaining_s: float = 1.0, most: int = 0, *, length: int | None = None) -> bytes:
    return struct.pack(">BdQ", len(name) if length is None else length, remaining_s, most) + name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        head()[:16],
        head(b""),
        head(b"a/1/b", length=6),
        head(b"m" * (MAX_METHOD_NAME + 1)),
        head(b"m" * 255),
        head(b"a/1/\xff"),
        head("a/1/ü".encode()),
        head(remaining_s=0.0),
        head(remaining_s=-1.0),
        head(remaining_s=1e9),
        head(remaining_s=float("nan")),
        head(remaining_s=float("inf")),
    ],
)
def test_request_with_a_wrong_head_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation):
        unpack_request(data)
    with pytest.raises(Violation):
        unpack_request(memoryview(data))


def test_request_whose_body_is_malformed_is_opened_all_the_same() -> None:
    data = head(b"m" * MAX_METHOD_NAME, most=2**64 - 1) + b"\xc1"
    assert len(data) == MAX_HEAD_BYTES + 1
    assert unpack_request(memoryview(data)) == ("m" * MAX_METHOD_NAME, 1.0, 2**64 - 1, b"\xc1")


def test_request_with_the_largest_body_fits_its_frame() -> None:
    name = "m" * MAX_METHOD_NAME
    start, body = pack_request(name, 1.0, 0, Blob(blob=bytes(MAX_BODY_BYTES - 11)))
    frame = encode_frame(Kind.REQUEST, 1, body, head=start)
    header = decode_header(frame[:HEADER_BYTES])
    assert header.content_bytes == MAX_CONTENT_BYTES


@pytest.mark.parametrize("code", sorted(PEER_ERRORS))
def test_error_comes_back_as_its_type_with_the_peer_that_sent_it(code: str) -> None:
    error = unpack_error(pack_error(PEER_ERRORS[code]("no\x1b[31m", peer="me")), "them")
    assert type(error) is PEER_ERRORS[code]
    assert (error.reason, error.peer) == ("no?[31m", "them")


def test_error_of_an_unknown_code_is_a_peer_error() -> None:
    assert type(unpack_error(pack(("new", "x")), "them")) is PeerError
    with pytest.raises(Violation):
        unpack_error(pack(("new", 1)), "them")


class Left(Message):
    """One of two."""

    both: Annotated[tuple[int, ...], Field(max_length=2)] = ()
    left: int = 0


class Right(Message):
    """The other one."""

    both: Annotated[tuple[int, ...], Field(max_length=2)] = ()
    right: int = 0


class Either(Message):
    """One that holds some of both."""

    some: Annotated[tuple[Left | Right, ...], Field(max_length=3)] = ()


def test_message_may_hold_one_of_two_kinds_within_the_bounds_of_both() -> None:
    told = Either(some=(Left(both=(1, 2), left=1), Right(both=(3,), right=2)))
    assert decode(Either, unpack(pack(told.to_wire()))) == told
    for wrong in (
        {"some": ({"left": 1},) * 4},
        {"some": ({"left": 1, "both": (1, 2, 3)},)},
        {"some": ({"left": 1, "right": 1},)},
        {"some": ({"neither": 1},)},
    ):
        with pytest.raises(Violation):
            decode(Either, unpack(pack(wrong)))
