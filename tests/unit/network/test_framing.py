"""Frames, whole and in pieces, right and wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import WIRE_VERSION
from swarm.errors import Violation
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.network.rpc.framing import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MAX_CONTENT_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PUBLIC_BYTES,
    FrameDecoder,
    Header,
    Kind,
    cut,
    decode_header,
    encode_frame,
    encode_header,
    wire_bytes,
)


class Sink:
    """Writes down what it is told; throws away the chunks of call 99."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self._chunk = bytearray()

    def on_frame(self, header: Header, content: memoryview) -> None:
        self.told.append((header.kind, header.call, bytes(content)))

    def place_chunk(self, call: int, size: int) -> memoryview | None:
        self._chunk = bytearray(size)
        return None if call == 99 else memoryview(self._chunk)

    def on_chunk(self, call: int, size: int) -> None:
        self.told.append((Kind.CHUNK, call, size if call == 99 else bytes(self._chunk)))


FRAMES = st.lists(
    st.tuples(
        st.sampled_from([Kind.REQUEST, Kind.CHUNK, Kind.ERROR]), st.sampled_from([1, 7, 99]), st.binary(max_size=50)
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(frames=FRAMES, big=st.booleans(), pieces=st.lists(st.integers(1, 9000), min_size=1, max_size=12))
def test_decoder_fed_in_any_pieces_tells_the_same_frames(
    frames: list[tuple[Kind, int, bytes]], big: bool, pieces: list[int]
) -> None:
    frames = [(kind, call, content or b"x") for kind, call, content in frames]
    if big:
        frames.append((Kind.CHUNK, 7, bytes(range(256)) * 100))
    data = b"".join(encode_frame(*frame) for frame in frames)
    sink = Sink()
    decoder = FrameDecoder(sink)
    position = index = 0
    while position < len(data):
        size = pieces[index % len(pieces)]
        decoder.feed(data[position : position + size])
        position, index = position + size, index + 1
    expected = [
        (kind, call, len(content) if kind is Kind.CHUNK and call == 99 else content) for kind, call, content in frames
    ]
    assert sink.told == expected
    assert len(decoder.buffer()) > 0


@pytest.mark.parametrize(
    "header",
    [
        b"xx" + encode_header(Kind.CANCEL, 1, 0)[2:],
        b"sw\x01" + encode_header(Kind.CANCEL, 1, 0)[3:],
        encode_header(Kind.CANCEL, 1, 0)[:3] + b"\x09" + encode_header(Kind.CANCEL, 1, 0)[4:],
        encode_header(Kind.CANCEL, 1, 1),
        encode_header(Kind.CHUNK, 1, 0),
        encode_header(Kind.CHUNK, 1, CHUNK_BYTES + 1),
        encode_header(Kind.CHUNK, 1, 1, 1),
        encode_header(Kind.REQUEST, 1, MAX_CONTENT_BYTES + 1),
        encode_header(Kind.REPLY, 1, 0, MAX_PAYLOAD_BYTES + 1),
        encode_header(Kind.ERROR, 1, 5000),
        struct.pack(">2sBBIIQ", b"sw", WIRE_VERSION, Kind.REPLY, 1, 2**32 - 1, 2**64 - 1),
    ],
)
def test_header_nobody_writes_is_a_violation_before_any_content(header: bytes) -> None:
    with pytest.raises(Violation):
        decode_header(header)
    sink = Sink()
    with pytest.raises(Violation):
        FrameDecoder(sink).feed(header)
    assert sink.told == []


@given(st.integers(0, 3 * CHUNK_BYTES + 1))
def test_wire_bytes_are_what_is_sent(size: int) -> None:
    payload = bytes(size)
    sent = HEADER_BYTES + 10 + sum(HEADER_BYTES + len(chunk) for chunk in cut(payload))
    assert wire_bytes(10, size) == sent


def resident() -> int:
    """This process's bytes that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_content_that_is_announced_takes_memory_only_as_it_arrives() -> None:
    decoders = [FrameDecoder(Sink()) for _ in range(32)]
    before = resident()
    for decoder in decoders:
        decoder.feed(encode_header(Kind.REQUEST, 1, MAX_BODY_BYTES))
    assert resident() - before < len(decoders) * MAX_BODY_BYTES // 4


def test_content_over_the_limit_of_a_stream_is_a_violation_before_it_arrives() -> None:
    for kind in (Kind.REQUEST, Kind.NOTICE):
        FrameDecoder(Sink(), lambda: MAX_PUBLIC_BYTES).feed(encode_header(kind, 1, MAX_PUBLIC_BYTES))
        with pytest.raises(Violation, match="exceeds the limit"):
            FrameDecoder(Sink(), lambda: MAX_PUBLIC_BYTES).feed(encode_header(kind, 1, MAX_PUBLIC_BYTES + 1))
    FrameDecoder(Sink(), lambda: MAX_PUBLIC_BYTES).feed(encode_header(Kind.CHUNK, 1, CHUNK_BYTES))
