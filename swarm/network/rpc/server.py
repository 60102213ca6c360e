"""One peer's incoming stream: its calls to us, each handled as a task, answered, refused or cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from swarm.clock import Clock
from swarm.errors import DeadlineMissed, PeerError, Unreachable, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Incoming
from swarm.network.rpc.bodies import pack_error, unpack_request
from swarm.network.rpc.dispatcher import Admitted, Dispatcher, handle
from swarm.network.rpc.framing import (
    MAX_CONTENT_BYTES,
    MAX_PUBLIC_BYTES,
    MAX_STRANGER_BYTES,
    Header,
    Kind,
    cut,
    room,
)
from swarm.network.rpc.link import ByteMeter, Link
from swarm.network.rpc.strangers import MAX_AHEAD, StrangerBudget, StreamBudget

logger = logging.getLogger(__name__)

_MAX_UNWANTED = 1024
"""Refused or expired payloads that one stream may still owe us."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request whose payload is arriving, or whose handler runs."""

    admitted: Admitted
    payload: memoryview
    deadline: float  # the loop's time
    silent: bool  # a notice: nobody waits for an answer
    filled: int = 0
    expiry: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class ServerStream:
    """One peer's calls to us over one stream. Implements :class:`~swarm.network.rpc.link.StreamOwner`.

    Handlers are cancelled at their caller's deadline, on its cancel frame, and when the stream ends, those of notices
    apart. While the peer is a stranger its frames are smaller, and come as fast as ``strangers`` lets them.
    """

    peer: PeerId
    dispatcher: Dispatcher
    clock: Clock
    meter: ByteMeter
    strangers: StrangerBudget
    public: bool
    _calls: dict[int, _Call] = field(default_factory=dict)
    _unwanted: dict[int, int] = field(default_factory=dict)  # call -> bytes of a refused payload still to come
    _last: int = 0
    _ahead: int = 0  # frames that came since the stream was paused
    _budget: StreamBudget | None = None
    _link: Link = field(init=False)

    def __post_init__(self) -> None:
        self._link = Link(self.peer, self.meter, self, self._most_content)

    def _most_content(self) -> int:
        if self.public:
            return MAX_PUBLIC_BYTES
        return MAX_CONTENT_BYTES if self.strangers.known(self.peer) else MAX_STRANGER_BYTES

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
        for call in list(self._calls):
            self._on_cancel(call)

    @property
    def idle(self) -> bool:
        """Return whether no call is open on it, and no answer still on its way out of this process."""
        return not self._calls and self._link.flushed

    # StreamOwner

    def on_frame(self, header: Header, content: memoryview) -> None:
        """A request, a notice or a cancel."""
        if self._link.lost is not None:
            return  # what came in one piece with the frame that was refused
        if not self.strangers.known(self.peer):
            self._charge(header.content_bytes)
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
        return open_call.payload[open_call.filled : open_call.filled + size]

    def on_chunk(self, call: int, size: int) -> None:
        """Part of a payload arrived; the last part starts the handler."""
        if call in self._unwanted and not self.strangers.known(self.peer):
            self._charge(0)
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
        """The caller is gone: nobody listens to its handlers any more. Those of notices go on, to which nobody ever
        does: who sends one may end the stream behind it."""
        for call, open_call in list(self._calls.items()):
            if not open_call.silent or open_call.task is None:
                self._on_cancel(call)
        self._unwanted.clear()

    def _charge(self, content_bytes: int) -> None:
        """Count a stranger's frame, and read no more while it has none to spare. Raises Violation when frames go on
        coming meanwhile: no honest peer asks for so much at once."""
        self._ahead = self._ahead + 1 if self._link.paused else 0
        if self._ahead > MAX_AHEAD:
            self.strangers.bar(self.peer)
            raise Violation("more calls at once than a peer that is no member may make")
        if self._budget is None:
            self._budget = self.strangers.stream()
        if pause_s := self._budget.pause_s(content_bytes):
            self._link.pause(pause_s)

    def _on_request(self, header: Header, content: memoryview) -> None:
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
            admitted, room(header.payload_bytes), deadline, silent=header.kind is Kind.NOTICE
        )
        if header.payload_bytes:
            open_call.expiry = loop.call_at(deadline, self._expire, header.call)
        else:
            self._start(header.call, open_call)

    def _admit(self, content: memoryview, payload_bytes: int) -> Admitted:
        envelope = unpack_request(content)
        return self.dispatcher.admit(self.peer, envelope, payload_bytes, public=self.public)

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
            self._answer(call, open_call), name=open_call.admitted.method.rpc.name
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
        self.dispatcher.release(self.peer, open_call.admitted)

    async def _answer(self, call: int, open_call: _Call) -> None:
        admitted = open_call.admitted
        deadline = self.clock.monotonic() + open_call.deadline - asyncio.get_running_loop().time()
        incoming = Incoming(open_call.payload, deadline)
        try:
            async with asyncio.timeout_at(open_call.deadline):
                body, answer = await handle(admitted, self.peer, incoming)
                if open_call.silent:
                    return
                await self._link.pace(len(body))
                name = admitted.method.rpc.name
                await self._link.send(Kind.REPLY, call, body, memoryview(answer.payload).nbytes, method=name)
                for chunk in cut(answer.payload):
                    await self._link.send_chunk(call, chunk, method=name)
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
