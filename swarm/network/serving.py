"""The answering side: what may be called, by whom, how much at once, and how a handler's outcome becomes an answer.

:class:`Desk` holds the methods and the admission rules, which the in-memory network uses too; :class:`ServerStream`
is one peer's incoming stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

from swarm.clock import Clock
from swarm.errors import BugError, Busy, DeadlineMissed, PeerError, Refused, Unreachable, Violation
from swarm.ids import PeerId
from swarm.network.bodies import Envelope, decode, pack, pack_error, unpack_request
from swarm.network.framing import Header, Kind, cut
from swarm.network.link import Link, Meter
from swarm.network.protocols import PUBLIC_PREFIX, Answer, Method, Request, Service

logger = logging.getLogger(__name__)

_MAX_UNWANTED = 1024
"""Refused or expired payloads that one stream may still owe us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """What one peer may hold of us at a time. A single payload is bounded by its method's ``admit`` alone."""

    calls_per_peer: int = 256
    payload_bytes_per_peer: int = 1 << 30


@dataclass(slots=True)
class _Usage:
    calls: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go on: its method, its decoded body, how long the caller listens, what it accepts."""

    method: Method
    body: Any
    remaining_s: float
    max_reply_bytes: int
    payload_bytes: int


class Desk:
    """Every mounted method, and what each peer has open."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._methods: dict[str, Method] = {}
        self._usage: dict[PeerId, _Usage] = {}

    def mount(self, service: Service) -> None:
        """Serve all methods of a service. Raises BugError for a taken name or a public method outside
        ``manifest/1``."""
        methods = service.methods()
        for method in methods:
            if method.name in self._methods:
                raise BugError(f"method {method.name} is mounted twice")
            if method.public != method.name.startswith(PUBLIC_PREFIX):
                raise BugError(f"{method.name}: public methods, and no others, are named {PUBLIC_PREFIX}…")
        self._methods.update({method.name: method for method in methods})

    def admit(self, caller: PeerId, envelope: Envelope, payload_bytes: int, *, public: bool) -> Admitted:
        """Decide on a request before anything is allocated for its payload; a yes is booked until :meth:`release`.

        Raises Refused for an unknown method (or a private one on the public protocol), Busy when the peer has too much
        open, Violation for a malformed body or a payload nobody asked for, what the method's own ``admit`` raises, as
        a PeerError.
        """
        method = self._methods.get(envelope.method)
        if method is None or (public and not method.public):
            raise Refused(f"no method {envelope.method[:60]!r} here")
        body = decode(method.request, envelope.body)
        usage = self._usage.get(caller) or _Usage()
        if usage.calls >= self._limits.calls_per_peer:
            raise Busy(f"{usage.calls} calls of this peer are open")
        if usage.payload_bytes and usage.payload_bytes + payload_bytes > self._limits.payload_bytes_per_peer:
            raise Busy(f"{usage.payload_bytes} bytes of this peer are held")
        _ask_method(method, caller, body, payload_bytes)
        self._usage[caller] = usage
        usage.calls += 1
        usage.payload_bytes += payload_bytes
        return Admitted(method, body, envelope.remaining_s, envelope.max_reply_bytes, payload_bytes)

    def release(self, caller: PeerId, admitted: Admitted) -> None:
        """An admitted request is over, however it ended."""
        usage = self._usage[caller]
        usage.calls -= 1
        usage.payload_bytes -= admitted.payload_bytes
        if not usage.calls:
            del self._usage[caller]


def _ask_method(method: Method, caller: PeerId, body: Any, payload_bytes: int) -> None:
    if method.admit is None:
        if payload_bytes:
            raise Violation(f"{method.name} takes no payload")
        return
    try:
        method.admit(caller, body, payload_bytes)
    except Exception as error:  # the border of a call, as in handle()
        raise as_peer_error(error, method.name) from error


async def handle(admitted: Admitted, request: Request) -> tuple[bytes, Answer]:
    """Run a handler; its answer's packed body, and the answer. Raises PeerError whatever goes wrong."""
    try:
        answer = await admitted.method.handle(request)
        if memoryview(answer.payload).nbytes > admitted.max_reply_bytes:
            raise BugError(f"an answer longer than the {admitted.max_reply_bytes} bytes the caller accepts")
        return pack(answer.body.to_wire()), answer
    except Exception as error:  # the border of a call: nothing a handler does may end the stream or the node
        raise as_peer_error(error, admitted.method.name) from error


def as_peer_error(error: Exception, method: str) -> PeerError:
    """What the caller is told: a PeerError as it is, anything else by its type's name only, and logged here."""
    if isinstance(error, PeerError):
        return error
    logger.error("%s failed", method, exc_info=error)
    return PeerError(f"failed: {type(error).__name__}")


@dataclass(slots=True, eq=False)
class _Call:
    """A request whose payload is arriving, or whose handler runs."""

    admitted: Admitted
    payload: bytearray
    deadline: float  # the loop's time
    silent: bool  # a notice: nobody waits for an answer
    filled: int = 0
    expiry: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class ServerStream:
    """One peer's calls to us over one stream. Implements :class:`~swarm.network.link.StreamOwner`.

    Handlers are cancelled at their caller's deadline, on its cancel frame, and when the stream ends.
    """

    peer: PeerId
    desk: Desk
    clock: Clock
    meter: Meter
    public: bool
    _calls: dict[int, _Call] = field(default_factory=dict)
    _unwanted: dict[int, int] = field(default_factory=dict)  # call -> bytes of a refused payload still to come
    _last: int = 0
    _link: Link = field(init=False)

    def __post_init__(self) -> None:
        self._link = Link(self.peer, self.meter, self)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer calls until the stream is gone and its handlers have ended. Cancelled, it closes the stream."""
        try:
            await self._link.take_over(reader, writer)
            await self._link.wait_closed()
            await asyncio.gather(*self._tasks(), return_exceptions=True)
        finally:
            self.close()

    def close(self) -> None:
        """End the stream now and cancel its handlers. Idempotent."""
        self._link.close(Unreachable("this endpoint is closing", peer=self.peer))

    # StreamOwner

    def on_frame(self, header: Header, content: bytes | bytearray) -> None:
        """A request, a notice or a cancel."""
        if self._link.lost is not None:
            return  # what came in one piece with the frame that was refused
        if header.kind in (Kind.REQUEST, Kind.NOTICE):
            self._on_request(header, content)
        elif header.kind is Kind.CANCEL:
            self._on_cancel(header.call)
        else:
            raise Violation(f"a {header.kind.name} frame to a server")

    def place_chunk(self, call: int, size: int) -> memoryview | None:
        """Room in the payload, or nowhere for a refused one."""
        if self._link.lost is not None:
            return None
        if call in self._unwanted:
            if size > self._unwanted[call]:
                raise Violation("more payload than announced")
            return None
        open_call = self._calls.get(call)
        if open_call is None or open_call.filled + size > len(open_call.payload):
            raise Violation("a chunk nobody announced")
        return memoryview(open_call.payload)[open_call.filled : open_call.filled + size]

    def on_chunk(self, call: int, size: int) -> None:
        """Part of a payload arrived; the last part starts the handler."""
        open_call = self._calls.get(call)
        if open_call is not None:
            open_call.filled += size
            if open_call.filled == len(open_call.payload):
                self._start(call, open_call)
        elif call in self._unwanted:
            self._unwanted[call] -= size
            if not self._unwanted[call]:
                del self._unwanted[call]

    def on_violation(self, violation: Violation) -> None:
        """Say why, and have no more to do with this stream."""
        logger.warning("%s: %s", self.peer, violation.reason)
        self._send_error(0, violation)
        self._link.refuse(Violation(violation.reason, peer=self.peer))

    def on_lost(self, reason: PeerError) -> None:
        """The caller is gone: nobody listens to its handlers any more."""
        for call in list(self._calls):
            self._on_cancel(call)
        self._unwanted.clear()

    def _on_request(self, header: Header, content: bytes | bytearray) -> None:
        if header.call <= self._last:
            raise Violation("a call id that does not grow")
        self._last = header.call
        try:
            admitted = self._admit(content, header.payload_bytes)
        except PeerError as error:
            self._refuse(header, error)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + admitted.remaining_s
        open_call = self._calls[header.call] = _Call(
            admitted, bytearray(header.payload_bytes), deadline, silent=header.kind is Kind.NOTICE
        )
        if header.payload_bytes:
            open_call.expiry = loop.call_at(deadline, self._expire, header.call)
        else:
            self._start(header.call, open_call)

    def _admit(self, content: bytes | bytearray, payload_bytes: int) -> Admitted:
        envelope = unpack_request(content)
        return self.desk.admit(self.peer, envelope, payload_bytes, public=self.public)

    def _refuse(self, header: Header, error: PeerError) -> None:
        if header.payload_bytes:
            self._throw_away(header.call, header.payload_bytes)
        if header.kind is not Kind.NOTICE:
            self._send_error(header.call, error)
        if isinstance(error, Violation):
            logger.warning("%s: %s", self.peer, error.reason)
            self._link.refuse(Violation(error.reason, peer=self.peer))

    def _throw_away(self, call: int, size: int) -> None:
        """Expect that much of a payload that nobody wants any more. Raises Violation when there are too many such."""
        if len(self._unwanted) >= _MAX_UNWANTED:
            raise Violation("payloads go on being announced and not sent")
        self._unwanted[call] = size

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [open_call.task for open_call in self._calls.values() if open_call.task is not None]

    def _start(self, call: int, open_call: _Call) -> None:
        if open_call.expiry is not None:
            open_call.expiry.cancel()
        task = asyncio.get_running_loop().create_task(
            self._answer(call, open_call), name=open_call.admitted.method.name
        )
        # Not in a finally of the task: one that is cancelled before its first step never enters its own body.
        task.add_done_callback(lambda _: self._forget(call))
        open_call.task = task

    def _expire(self, call: int) -> None:
        """The deadline passed before the payload was complete."""
        open_call = self._calls[call]
        self._forget(call)
        try:
            self._throw_away(call, len(open_call.payload) - open_call.filled)
        except Violation as violation:
            self.on_violation(violation)
        else:
            self._send_error(call, DeadlineMissed("the payload was not complete in time"))

    def _on_cancel(self, call: int) -> None:
        if not 0 < call <= self._last:
            raise Violation("a cancel of a call that was never made")
        self._unwanted.pop(call, None)
        open_call = self._calls.get(call)
        if open_call is None:
            return
        if open_call.task is not None:
            open_call.task.cancel()  # it is forgotten when it has ended
        else:
            self._forget(call)

    def _forget(self, call: int) -> None:
        open_call = self._calls.pop(call)
        if open_call.expiry is not None:
            open_call.expiry.cancel()
        self.desk.release(self.peer, open_call.admitted)

    async def _answer(self, call: int, open_call: _Call) -> None:
        admitted = open_call.admitted
        deadline = self.clock.monotonic() + open_call.deadline - asyncio.get_running_loop().time()
        request = Request(self.peer, admitted.body, memoryview(open_call.payload), deadline)
        try:
            async with asyncio.timeout_at(open_call.deadline):
                body, answer = await handle(admitted, request)
                if open_call.silent:
                    return
                await self._link.send(Kind.REPLY, call, body, memoryview(answer.payload).nbytes)
                for chunk in cut(answer.payload):
                    await self._link.send_chunk(call, chunk)
        except TimeoutError:
            self._fail(open_call, call, DeadlineMissed("not answered in time"))
        except Violation as violation:
            self._refuse(Header(Kind.NOTICE if open_call.silent else Kind.REQUEST, call, 0, 0), violation)
        except PeerError as error:
            self._fail(open_call, call, error)

    def _fail(self, open_call: _Call, call: int, error: PeerError) -> None:
        if not open_call.silent:
            self._send_error(call, error)

    def _send_error(self, call: int, error: PeerError) -> None:
        with contextlib.suppress(Unreachable):
            self._link.send_nowait(Kind.ERROR, call, pack_error(error))
