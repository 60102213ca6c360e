"""The calling side of one stream: many calls at once, each with its own deadline, all failed at once when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import PeerError, Unreachable, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload, ReplyT, RequestT, Rpc
from swarm.network.rpc.bodies import decode, pack_request, unpack, unpack_error
from swarm.network.rpc.framing import Header, Kind, cut, room
from swarm.network.rpc.link import ByteMeter, Link


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that waits for its answer."""

    max_reply_bytes: int
    answered: asyncio.Future[None]
    body: memoryview | None = None
    payload: memoryview = field(default_factory=lambda: room(0))
    filled: int = 0
    requested: bool = False
    sent: bool = False

    @property
    def open(self) -> bool:
        """Return whether the other side still has something of this call: a handler, or a payload it waits for."""
        return self.requested and not (self.sent and self.answered.done() and not self.answered.cancelled())


class CallerStream:
    """Our calls to one peer over one stream. Implements :class:`~swarm.network.rpc.link.StreamOwner`."""

    def __init__(self, peer: PeerId, meter: ByteMeter, lost: Callable[[PeerId], None] | None = None) -> None:
        """``lost`` is told once that the stream is over."""
        self._peer, self._lost = peer, lost
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._last = 0
        self._using = 0  # calls and notices that have begun
        self._retired = False
        self._link = Link(peer, meter, self)

    @classmethod
    async def over(
        cls,
        peer: PeerId,
        meter: ByteMeter,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        lost: Callable[[PeerId], None] | None = None,
    ) -> CallerStream:
        """Take an open stream over."""
        stream = cls(peer, meter, lost)
        await stream._link.take_over(reader, writer)
        return stream

    @property
    def alive(self) -> bool:
        """Return whether a new call may use this stream."""
        return self._link.lost is None and not self._retired

    @property
    def ended(self) -> bool:
        """Return whether it is closed, by either side, and nothing is left to be sent."""
        return self._link.lost is not None and self._link.flushed

    @property
    def retired(self) -> bool:
        """Return whether another stream has taken its place."""
        return self._retired

    def retire(self) -> None:
        """Take no new calls; end once the last of those that have begun is over and what they wrote is sent. Nobody is
        told that it broke."""
        self._retired, self._lost = True, None
        self._close_idle()

    async def call(
        self,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        *,
        deadline: float,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> tuple[ReplyT, memoryview]:
        """One call. ``deadline`` is in the running loop's time; the caller enforces it by cancelling.

        Raises what the other side raised, Unreachable when the stream breaks, Violation for a malformed answer (the
        stream is then closed). Cancelled before the answer, it tells the other side.
        """
        loop = asyncio.get_running_loop()
        remaining_s = max(deadline - loop.time(), 1e-3)
        head, packed = pack_request(rpc.name, remaining_s, max_reply_bytes, body)
        with self._use():
            await self._link.pace(len(head) + len(packed))
            self._last = call = next(self._ids)
            pending = self._pending[call] = _Pending(max_reply_bytes, loop.create_future())
            try:
                await self._send(call, pending, rpc.name, (head, packed), payload)
                await pending.answered
                return self._decode(pending, rpc.reply), pending.payload
            finally:
                del self._pending[call]
                if pending.open:
                    with contextlib.suppress(Unreachable):
                        self._link.send_nowait(Kind.CANCEL, call, method=rpc.name)
                # An error's traceback leads to this frame, which would lead back to the error: a cycle that keeps the
                # caller's frames, payloads among them, until the collector comes by.
                del pending, payload

    async def notify(self, rpc: Rpc[RequestT, Any], body: RequestT, *, deadline: float) -> None:
        """A request that gets no answer; returns when it is written. Raises Unreachable when the stream is broken."""
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 1e-3)
        head, packed = pack_request(rpc.name, remaining_s, 0, body)
        with self._use():
            await self._link.pace(len(head) + len(packed))
            self._last = call = next(self._ids)
            await self._link.send(Kind.NOTICE, call, packed, method=rpc.name, head=head)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        self._using += 1
        try:
            yield
        finally:
            self._using -= 1
            self._close_idle()

    def _close_idle(self) -> None:
        if self._retired and not self._using:
            self._link.finish(Unreachable("another stream took its place", peer=self._peer))

    async def _send(
        self, call: int, pending: _Pending, method: str, request: tuple[bytes, bytes], payload: Payload
    ) -> None:
        """Request and payload, until it is all sent or the other side has refused it."""
        try:
            head, body = request
            size = memoryview(payload).nbytes
            await self._link.send(Kind.REQUEST, call, body, size, method=method, head=head)
            pending.requested = True
            for chunk in cut(payload):
                if pending.answered.done():
                    return
                await self._link.send_chunk(call, chunk, method=method)
            pending.sent = True
        except Unreachable:
            if not pending.answered.done():  # else: its refusal came first and says more
                raise

    def close(self, reason: str) -> None:
        """End the stream now; pending calls fail with Unreachable for this reason."""
        self._link.close(Unreachable(reason, peer=self._peer))

    def _decode(self, pending: _Pending, reply: type[ReplyT]) -> ReplyT:
        try:
            return decode(reply, unpack(pending.body or b""))
        except Violation as violation:
            self.on_violation(violation)
            raise Violation(f"malformed answer: {violation.reason}", peer=self._peer) from violation

    # StreamOwner

    def on_frame(self, header: Header, content: memoryview) -> None:
        """An answer, or an error."""
        if header.kind is Kind.ERROR:
            self._on_error(header.call, content)
            return
        if header.kind is not Kind.REPLY:
            raise Violation(f"a {header.kind.name} frame to a caller")
        pending = self._find(header.call)
        if pending is None:
            return  # an answer to a call that was given up
        if pending.body is not None or header.payload_bytes > pending.max_reply_bytes:
            raise Violation(f"an answer with {header.payload_bytes} bytes, asked for {pending.max_reply_bytes}")
        pending.body = content
        pending.payload = room(header.payload_bytes)
        if not header.payload_bytes:
            _resolve(pending)

    def place_chunk(self, call: int, size: int) -> memoryview | None:
        """Room in the answer's payload."""
        pending = self._find(call)
        if pending is None:
            return None
        if pending.body is None or pending.filled + size > len(pending.payload):
            raise Violation("a chunk nobody announced")
        return pending.payload[pending.filled : pending.filled + size]

    def on_chunk(self, call: int, size: int) -> None:
        """Part of an answer's payload arrived."""
        pending = self._find(call)
        if pending is not None:
            pending.filled += size
            if pending.filled == len(pending.payload):
                _resolve(pending)

    def on_violation(self, violation: Violation) -> None:
        """A malformed frame: whose answer it was cannot be known, so every pending call fails with it."""
        self._link.close(type(violation)(violation.reason, peer=self._peer))

    def on_lost(self, reason: PeerError) -> None:
        """The stream is over: every pending call fails now."""
        for pending in self._pending.values():
            if not pending.answered.done():
                pending.answered.set_exception(type(reason)(reason.reason, peer=self._peer))
                pending.answered.exception()  # retrieved: its caller may just have been cancelled
        if self._lost is not None:
            self._lost(self._peer)

    def _on_error(self, call: int, content: memoryview) -> None:
        error = unpack_error(content, self._peer)
        pending = self._find(call) if call else None
        if pending is not None and not pending.answered.done():
            pending.answered.set_exception(error)
            pending.answered.exception()
        if isinstance(error, Violation):  # the other side closes the stream; what else was pending did nothing wrong
            self._link.close(Unreachable("it refused the stream", peer=self._peer))

    def _find(self, call: int) -> _Pending | None:
        if not 0 < call <= self._last:
            raise Violation("an answer to a call that was never made")
        return self._pending.get(call)


def _resolve(pending: _Pending) -> None:
    if not pending.answered.done():
        pending.answered.set_result(None)
