"""Bytes to frames and back, without I/O.

A frame is a fixed header and its content. Every length is checked against its kind's limit before anything is
allocated for it. The decoder hands out the buffer that the next bytes belong in, so that a tensor's bytes go
from the socket straight to where they stay.

```
 magic  version kind call id  content  payload
 2      1       1    4        4        8         = 20 bytes, big endian
```

``content`` is the length of what follows the header, in requests and notices a head and a body (``bodies.py``);
``payload`` announces, in requests and replies only, how many bytes of chunks will come for the same call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from swarm import WIRE_VERSION
from swarm.errors import SpeaksOtherWire, Violation
from swarm.network.protocols import MAX_BODY_BYTES, Payload
from swarm.network.rpc.bodies import MAX_HEAD_BYTES
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES

MAGIC = b"sw"
CHUNK_BYTES = 256 << 10
"""How a payload is cut. Two calls that share a stream alternate by chunks, so this bounds how long one waits."""

MAX_CONTENT_BYTES = MAX_HEAD_BYTES + MAX_BODY_BYTES
MAX_PAYLOAD_BYTES = 4 << 30
MAX_ERROR_BYTES = 4 << 10
MAX_PUBLIC_BYTES = 4 << 10
"""Content of a frame to a public method: anybody may send it, and nobody knows whom."""
MAX_STRANGER_BYTES = MAX_HEAD_BYTES + MAX_STRANGER_BODY_BYTES
"""Content of a frame from a peer that is no member of the run."""

_HEADER = struct.Struct(">2sBBIIQ")
HEADER_BYTES = _HEADER.size
_SCRATCH_BYTES = 8 << 10
DISCARD = memoryview(bytearray(64 << 10))
"""Bytes nobody wants are received here; never read."""


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    CHUNK = 2
    REPLY = 3
    ERROR = 4
    CANCEL = 5
    NOTICE = 6


_KINDS = {int(kind): kind for kind in Kind}

_CONTENT_LIMIT = {
    Kind.REQUEST: MAX_CONTENT_BYTES,
    Kind.CHUNK: CHUNK_BYTES,
    Kind.REPLY: MAX_BODY_BYTES,
    Kind.ERROR: MAX_ERROR_BYTES,
    Kind.CANCEL: 0,
    Kind.NOTICE: MAX_CONTENT_BYTES,
}


class Header(NamedTuple):
    """A checked header. Call ids are chosen by the caller and only ever grow on one stream; 0 speaks of the stream."""

    kind: Kind
    call: int
    content_bytes: int
    payload_bytes: int


class FrameSink(Protocol):
    """Whom a decoder tells. Any method may raise Violation: the stream is then finished."""

    def on_frame(self, header: Header, content: memoryview) -> None:
        """A whole frame of any kind but CHUNK."""

    def place_chunk(self, call: int, size: int) -> memoryview | None:
        """Return where the ``size`` bytes of a call's next chunk go; None throws them away."""

    def on_chunk(self, call: int, size: int) -> None:
        """The chunk placed last is complete."""


def encode_header(kind: Kind, call: int, content_bytes: int, payload_bytes: int = 0) -> bytes:
    """The header of one frame."""
    return _HEADER.pack(MAGIC, WIRE_VERSION, kind, call, content_bytes, payload_bytes)


def encode_frame(kind: Kind, call: int, content: bytes = b"", payload_bytes: int = 0, *, head: bytes = b"") -> bytes:
    """A whole frame other than a chunk. Its content is ``head``, which requests have, and ``content``."""
    return b"".join((encode_header(kind, call, len(head) + len(content), payload_bytes), head, content))


def decode_header(data: bytes | bytearray | memoryview, most_content: int = MAX_CONTENT_BYTES) -> Header:
    """Read a header's bytes. Raises Violation for anything our own encoder would not have written, and for more than
    ``most_content`` bytes that are no chunk; SpeaksOtherWire where it is of another wire version."""
    magic, version, kind_code, call, content_bytes, payload_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise Violation("not a frame")
    if version != WIRE_VERSION:
        raise SpeaksOtherWire(f"it speaks wire version {version}, and not {WIRE_VERSION}")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise Violation(f"unknown frame kind {kind_code}")
    limit = _CONTENT_LIMIT[kind] if kind is Kind.CHUNK else min(_CONTENT_LIMIT[kind], most_content)
    if content_bytes > limit:
        raise Violation(f"a {kind.name} frame of {content_bytes} bytes exceeds the limit of {limit}")
    if payload_bytes > (MAX_PAYLOAD_BYTES if kind in (Kind.REQUEST, Kind.REPLY) else 0):
        raise Violation(f"a {kind.name} frame announces {payload_bytes} bytes of payload")
    if kind is Kind.CHUNK and not content_bytes:
        raise Violation("an empty chunk")
    return Header(kind, call, content_bytes, payload_bytes)


def cut(payload: Payload) -> Iterator[memoryview]:
    """A payload's chunks, without copying."""
    view = memoryview(payload).cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def room(size: int) -> memoryview:
    """Writable bytes for what will fill them before anybody looks: they are not cleared first, and untouched ones take
    no memory."""
    return np.empty(size, dtype=np.uint8).data if size else memoryview(bytearray())


def wire_bytes(content_bytes: int, payload_bytes: int = 0) -> int:
    """Return what a request or reply and its chunks take on the wire, headers included."""
    chunks = -(-payload_bytes // CHUNK_BYTES)
    return HEADER_BYTES * (1 + chunks) + content_bytes + payload_bytes


class FrameDecoder:
    """The state between two reads. Use ``buffer``, fill its beginning, then say how much with ``advance``."""

    __slots__ = ("_begun", "_end", "_filled", "_header", "_kind", "_most", "_scratch", "_sink", "_store", "_target")

    def __init__(self, sink: FrameSink, most_content: Callable[[], int] = lambda: MAX_CONTENT_BYTES) -> None:
        """``most_content`` as for :func:`decode_header`; asked at each header."""
        self._sink, self._most = sink, most_content
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._end = 0
        self._header: Header | None = None
        self._kind: Kind | None = None
        self._store: memoryview | None = None
        self._target: memoryview | None = None
        self._filled = self._begun = 0

    @property
    def within(self) -> int:
        """The number of the frame whose content is still arriving, counted from 1; 0 between two frames."""
        return self._begun if self._header is not None else 0

    @property
    def awaits(self) -> int:
        """The bytes of content in the frame that is arriving; 0 between two frames."""
        return 0 if self._header is None else self._header.content_bytes

    @property
    def in_payload(self) -> bool:
        """Return whether the frame that arrives, or between two frames the one before, is a chunk of a payload."""
        return self._kind is Kind.CHUNK

    def buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._header is None:
            return self._scratch[self._end :]
        if self._target is None:
            return DISCARD[: self._header.content_bytes - self._filled]
        return self._target[self._filled :]

    def advance(self, size: int) -> None:
        """``size`` bytes now lie at the beginning of the last ``buffer``. Raises Violation, also from the sink."""
        if self._header is not None:
            self._filled += size
            if self._filled == self._header.content_bytes:
                self._finish()
            return
        self._end += size
        start = 0
        while self._end - start >= HEADER_BYTES:
            start = self._begin(start)
        rest = self._end - start
        if start and rest:
            self._scratch[:rest] = bytes(self._scratch[start : self._end])
        self._end = rest

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Copying form of buffer and advance, for bytes that are already here."""
        view = memoryview(data)
        while view:
            target = self.buffer()
            size = min(len(target), len(view))
            target[:size] = view[:size]
            self.advance(size)
            view = view[size:]

    def _begin(self, start: int) -> int:
        """Take one header, and what there is of its content, from the scratch; return where the rest begins."""
        header = decode_header(self._scratch[start : start + HEADER_BYTES], self._most())
        start += HEADER_BYTES
        self._header, self._kind, self._filled = header, header.kind, 0
        self._begun += 1
        if header.kind is Kind.CHUNK:
            self._target = self._sink.place_chunk(header.call, header.content_bytes)
        else:
            self._store = self._target = room(header.content_bytes)
        size = min(self._end - start, header.content_bytes)
        if size and self._target is not None:
            self._target[:size] = self._scratch[start : start + size]
        self._filled = size
        if size == header.content_bytes:
            self._finish()
        return start + size

    def _finish(self) -> None:
        header, store = self._header, self._store
        assert header is not None  # noqa: S101 - a frame is being read
        self._header = self._store = self._target = None
        if store is None:
            self._sink.on_chunk(header.call, header.content_bytes)
        else:
            self._sink.on_frame(header, store)
