"""One stream as a transport protocol: received bytes go into the frame decoder's buffers, frames go out in turns.

A stream comes from the daemon as asyncio's reader and writer. Both copy everything at least twice, so the transport is
taken over: :class:`Link` is a ``BufferedProtocol``, whose bytes land where they stay. It has two
:class:`StreamStall` watches: one for a frame that stops coming, one for bytes that the other side stops taking.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

from swarm.errors import PeerError, Unreachable, Violation
from swarm.ids import PeerId
from swarm.network.rpc.framing import (
    DISCARD,
    MAX_CONTENT_BYTES,
    FrameDecoder,
    FrameSink,
    Kind,
    encode_frame,
    encode_header,
    wire_bytes,
)
from swarm.network.rpc.meter import READ_BYTES, SMALL_BYTES, ByteMeter
from swarm.waiting import StallDetector

HIGH_WATER_BYTES = 512 << 10
"""Two chunks: enough to keep the daemon busy, little enough that an error or a small reply is not far behind."""

MAX_UNSENT_BYTES = 16 << 20
"""A peer that lets this much of our answers pile up does not read: the stream is cut."""

_SOCKET_BUFFER_BYTES = 1 << 20

LINGER_S = 1.0
"""How long a refused stream still swallows bytes, so that the reason reaches the other side before the end does."""

FRAME_S = 60.0
"""How long the content of one frame, 4 MiB at most, may take to arrive: it holds memory, and one of few streams."""

UNREAD_S = 300.0
"""How long a peer may take nothing of what waits for it: the one who sends holds what is to be sent for as long. More
than anybody is stopped for, or waits for a turn on a busy machine. The kernel makes room in pieces of up to 1.5 MiB,
and shows no smaller ones: so this asks for 5 KiB/s, about what FRAME_S asks of a chunk on the other side. A peer that
limits itself to 1 Mbit/s keeps up with that on 24 streams that bring payloads at once."""


class StreamOwner(FrameSink, Protocol):
    """Whose stream it is: learns of frames, of malformed ones, and of the end."""

    def on_violation(self, violation: Violation) -> None:
        """The other side sent what no honest peer sends. The owner must close or refuse the link."""

    def on_lost(self, reason: PeerError) -> None:
        """The stream is over, for whatever cause. Called exactly once."""


class SendTurns:
    """The turns of the senders on one stream: entered by one at a time, once the transport takes more.
    ``written`` counts the bytes that were given to the transport, no matter who wrote them."""

    def __init__(self) -> None:
        self.written = 0
        self._turn, self._room = asyncio.Lock(), asyncio.Event()
        self._room.set()

    async def __aenter__(self) -> None:
        await self._turn.acquire()
        try:
            await self._room.wait()
        except BaseException:
            self._turn.release()
            raise

    async def __aexit__(self, *raised: object) -> None:
        self._turn.release()

    @property
    def full(self) -> bool:
        """Return whether the transport takes no more just now."""
        return not self._room.is_set()

    def no_room(self) -> None:
        """It takes no more."""
        self._room.clear()

    def room(self) -> None:
        """It does, or the stream is lost: those who wait go on."""
        self._room.set()


class Link(asyncio.BufferedProtocol):
    """The sending and receiving of frames on one stream.

    Nothing here waits longer than its caller: a cancelled ``send`` leaves whole frames only. The stream ends when one
    frame has been arriving for FRAME_S, or when the other side takes nothing for UNREAD_S of what waits for it.
    """

    def __init__(
        self,
        peer: PeerId,
        meter: ByteMeter,
        owner: StreamOwner,
        most_content: Callable[[], int] = lambda: MAX_CONTENT_BYTES,
    ) -> None:
        """Frames that come may hold ``most_content()`` bytes, asked at each frame, chunks apart."""
        self.peer = peer
        self.lost: PeerError | None = None
        self._meter = meter
        self._owner = owner
        self._decoder = FrameDecoder(owner, most_content)
        self._turns = SendTurns()
        self._writer: asyncio.StreamWriter | None = None
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None  # the end of a pause, or of a refused stream
        self._frames = StreamStall(self._frame, FRAME_S, self._late_frame)
        self._reading = StreamStall(self._taken, UNREAD_S, self._unread)
        self._closed = asyncio.Event()

    async def take_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Become the protocol of an open stream; what ``reader`` had already received is processed first."""
        self._writer = writer  # kept: a collected StreamWriter closes its transport
        transport = cast(asyncio.Transport, writer.transport)
        self._transport = transport
        if transport.is_closing():
            self.connection_lost(None)
            return
        transport.pause_reading()
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        while (early := await _read_ready(reader)) is not None:
            transport.pause_reading()  # a reader that was over its limit has just resumed the transport
            if not early:
                self.close(Unreachable("the stream ended", peer=self.peer))
                return
            self._decode(self._decoder.feed, early)
            self._came(len(early))
        self._read_on()

    async def send(
        self, kind: Kind, call: int, content: bytes = b"", payload_bytes: int = 0, *, method: str, head: bytes = b""
    ) -> None:
        """Write one frame for a call of ``method``, for which :meth:`pace` has waited, when it is this sender's turn
        and the stream takes more. Raises Unreachable, also for a peer that has not read for UNREAD_S."""
        async with self._turns:
            self._write_frame(encode_frame(kind, call, content, payload_bytes, head=head), method)

    async def send_chunk(self, call: int, chunk: memoryview, *, method: str) -> None:
        """Write one chunk in turn; the bytes are not copied and must stay as they are. Raises Unreachable, also for a
        peer that has not read for UNREAD_S."""
        await self.pace(len(chunk), payload=True)
        async with self._turns:
            self._check_open()
            self._write(encode_header(Kind.CHUNK, call, len(chunk)), method)
            self._write(chunk, method)

    def send_nowait(self, kind: Kind, call: int, content: bytes = b"", *, method: str = "") -> None:
        """Write one small frame ahead of every waiting sender. Raises Unreachable, also for a peer that never reads."""
        frame = encode_frame(kind, call, content)
        self._write_frame(frame, method)
        if (rate := self._meter.sends(self.peer)) is not None:
            rate.gone(len(frame))

    async def pace(self, content_bytes: int, *, payload: bool = False) -> None:
        """Wait until a frame of so much content may go, where there is a limit; then it is to be sent. Not within a
        turn on the stream: who waits for the rate keeps no small frame of the same stream waiting. So frames go in
        another order than they come here, and what has to grow along a stream, a call's id, is chosen afterwards."""
        if (rate := self._meter.sends(self.peer)) is not None:
            await rate.turn(wire_bytes(content_bytes), payload=payload, lost=lambda: self.lost is not None)

    def _write_frame(self, frame: bytes, method: str) -> None:
        self._check_open()
        if self._transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            self._unread()
            self._check_open()
        self._write(frame, method)

    @property
    def flushed(self) -> bool:
        """Return whether the kernel has all that was written, and :meth:`close` drops nothing."""
        return self._writer is None or not self._transport.get_write_buffer_size()

    def close(self, reason: PeerError) -> None:
        """End the stream now: whatever is unsent is dropped."""
        self._end(reason)
        self._set_timer(None)
        self._transport.abort()

    def finish(self, reason: PeerError) -> None:
        """End the stream once the kernel has all that was written, UNREAD_S later at most. Nothing more is read."""
        if self.lost is None:
            self._end(reason)
            self._set_timer(asyncio.get_running_loop().call_later(UNREAD_S, self._transport.abort))
            self._transport.close()

    async def wait_closed(self) -> None:
        """Until the transport is gone; after ``refuse`` that is at most LINGER_S later."""
        await self._closed.wait()

    def refuse(self, reason: PeerError) -> None:
        """End the stream, but swallow what still comes for a moment: closing at once would reset the stream and with it
        the error frame that was just written."""
        if self.lost is None:
            self._resume()
            self._set_timer(asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort))
            self._end(reason)

    def pause(self, seconds: float) -> None:
        """Read nothing more from the stream for so long. What one read has brought is still decoded."""
        if self.lost is None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._set_timer(asyncio.get_running_loop().call_later(seconds, self._resume))

    @property
    def paused(self) -> bool:
        """Return whether nothing is read from the stream now, see :meth:`pause`."""
        return self.lost is None and self._timer is not None

    def _resume(self) -> None:
        self._set_timer(None)
        self._read_on()

    def _read_on(self) -> None:
        """Read again, unless a pause or the rate is against it."""
        rate = self._meter.receives(self.peer)
        held = rate is not None and rate.holds(self)
        if not self._transport.is_closing() and not self.paused and not held:
            self._transport.resume_reading()

    def _came(self, size: int) -> None:
        """Count what was read, and read no more for as long as the rate says."""
        self._meter.received[self.peer] += size
        rate = self._meter.receives(self.peer)
        if rate is None or self._transport.is_closing():
            return
        if rate.came(size, payload=self._decoder.in_payload or self._decoder.awaits > SMALL_BYTES):
            self._transport.pause_reading()
            rate.hold(self, self._read_on)

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the transport puts the next bytes."""
        buffer = self._decoder.buffer() if self.lost is None else DISCARD
        return buffer if self._meter.receives(self.peer) is None else buffer[:READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` arrived."""
        if self.lost is None:
            self._decode(self._decoder.advance, nbytes)
        self._came(nbytes)

    def eof_received(self) -> None:
        """The other side is done; so are we, and the transport closes itself."""
        self._end(Unreachable("it closed the stream", peer=self.peer))

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._set_timer(None)
        self._closed.set()
        self._end(
            Unreachable(f"the stream broke ({type(exc).__name__})" if exc else "the stream ended", peer=self.peer)
        )

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._turns.no_room()
        self._reading.watch()

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._turns.room()

    def _decode(self, decode: Callable[[Any], None], what: object) -> None:
        try:
            decode(what)
        except Violation as violation:
            self._owner.on_violation(violation)
        if self._decoder.within:
            self._frames.watch()

    def _write(self, piece: bytes | memoryview, method: str) -> None:
        self._meter.sends_bytes(self.peer, len(piece), method)
        self._turns.written += len(piece)  # first: the transport may be full, and say so, before it returns
        self._transport.write(piece)

    def _frame(self) -> object | None:
        if self.lost is not None or not self._decoder.within:
            return None
        rate = self._meter.receives(self.peer)
        if rate is not None and rate.holds(self):
            return object()  # unlike any before: it is we who do not read
        return self._decoder.within

    def _late_frame(self) -> None:
        self.close(Unreachable(f"a frame was not complete in {FRAME_S:g} s", peer=self.peer))

    def _taken(self) -> int | None:
        """The bytes that have left us so far, while senders wait for room. Not what is left: small frames are written
        without waiting."""
        if self.lost is not None or not self._turns.full:
            return None
        return self._turns.written - self._transport.get_write_buffer_size()

    def _unread(self) -> None:
        self.close(Unreachable("it does not read what we send", peer=self.peer))

    def _end(self, reason: PeerError) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._frames.cancel()
        self._reading.cancel()
        self._turns.room()  # those who wait wake up and find the stream lost
        self._owner.on_lost(reason)

    def _check_open(self) -> None:
        if self.lost is not None:
            raise Unreachable(self.lost.reason, peer=self.peer)


def enlarge(writer: asyncio.StreamWriter) -> None:
    """Larger socket buffers towards the daemon: fewer, longer reads and writes."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)


async def _read_ready(reader: asyncio.StreamReader) -> bytes | None:
    """Return what a paused stream's reader already holds: bytes, b"" when it ended or broke, None when there is
    nothing. Does not wait."""
    attempt = asyncio.ensure_future(reader.read(1 << 20))
    await asyncio.sleep(0)  # one turn: a read that need not wait is done after it
    if attempt.done():
        return b"" if isinstance(attempt.exception(), OSError) else attempt.result()
    attempt.cancel()
    return None


# --- a stream that stalls ---------------------------------------------------------------------------------------------
# Tells when a number that should go on changing has stood still for too long.


LAST_LOOK_S = 1.0


class StreamStall:
    """Looks at a number for as long as there is one, and tells once when it has stood still.

    It tells at a number that was too old at the last look already: after a process was stopped its timers come first,
    and what had happened meanwhile after them. That is between one and two ``patience_s`` after the number's last
    change. Costs a timer, and a look every ``patience_s``.
    """

    def __init__(self, number: Callable[[], object | None], patience_s: float, stands: Callable[[], None]) -> None:
        """``number()`` is None while nothing has to go on, and anything else is compared with what it was; ``stands``
        is told. Neither may raise."""
        self._number, self._patience_s, self._stands = number, patience_s, stands
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look from now on, until there is no number at a look. Idempotent."""
        if self._timer is None:
            self._look(StallDetector(0, None), 0)

    def cancel(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, stall: StallDetector[object | None], looks: int) -> None:
        self._timer, number = None, self._number()
        if number is None:
            return
        still = stall.look(looks, number)  # in looks, not in seconds
        if still > 1:
            self._stands()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LAST_LOOK_S if still else self._patience_s, self._look, stall, looks + 1)
