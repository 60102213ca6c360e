"""The circuit relay's messages, as libp2p writes them and as nobody should."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import Violation
from swarm.network.reach.circuit import (
    MAX_MESSAGE_BYTES,
    CircuitMessage,
    HopType,
    Status,
    StopType,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
    read_body,
)

# A relay's answer to a reservation, as go-libp2p 0.32 sent it: status 2, a reservation, a limit, OK.
GO_STATUS = bytes.fromhex("0802 1a06 08a0f085d806 2206 087810808008 2864")


async def _body(data: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_body(reader)


def test_bytes_of_the_specification_are_these() -> None:
    assert encode_hop(CircuitMessage(HopType.STATUS, status=Status.OK)) == bytes.fromhex("04 0802 2864")
    assert encode_stop(CircuitMessage(StopType.CONNECT, peer=b"id")) == bytes.fromhex("08 0800 1204 0a02 6964")


def test_message_of_another_implementation_with_fields_unknown_to_us_is_read() -> None:
    assert decode_hop(GO_STATUS) == CircuitMessage(HopType.STATUS, status=Status.OK)
    assert decode_hop(bytes.fromhex("0801 75 01020304 71 0102030405060708")) == CircuitMessage(HopType.CONNECT)


@pytest.mark.parametrize("body", ["08", "0880", "12 05 0a", "12 02 0a 05", "13", "08" + "ff" * 11])
def test_message_that_is_broken_is_a_violation(body: str) -> None:
    with pytest.raises(Violation):
        decode_hop(bytes.fromhex(body))


@given(st.binary(max_size=64))
def test_message_of_any_bytes_is_read_or_refused(body: bytes) -> None:
    try:
        found = decode_stop(body)
    except Violation:
        return
    assert found.kind >= 0


async def test_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(Violation, match=str(MAX_MESSAGE_BYTES)):
        await _body(bytes.fromhex("8120"))
    with pytest.raises(Violation):
        await _body(b"\xff" * 20)
    with pytest.raises(EOFError):
        await _body(b"\x05abc")
