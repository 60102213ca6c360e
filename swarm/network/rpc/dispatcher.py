"""The answering side: what may be called, by whom, how much at once, and how a handler's outcome becomes an answer.

:class:`Dispatcher` holds the methods and the admission rules, which the in-memory network uses too. One peer's incoming
stream is :class:`swarm.network.rpc.server.ServerStream`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from swarm.errors import BugError, Busy, PeerError, Refused, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, May, Service, anybody_may
from swarm.network.rpc.bodies import Envelope, decode, pack, unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """What one peer may hold of us at a time. A single payload is bounded by its method's ``admit`` alone. Bodies of
    more than ``body_bytes_on_loop`` are decoded in a thread."""

    calls_per_peer: int = 256
    payload_bytes_per_peer: int = 1 << 30
    body_bytes_on_loop: int = 64 << 10


@dataclass(slots=True)
class _Usage:
    calls: int = 0
    payload_bytes: int = 0


@dataclass(slots=True)
class Admitted:
    """A request that may go on: its method, its body, how long the caller listens, what it accepts. A large body is
    ``packed`` until :func:`handle` decodes it."""

    method: AnyMethod
    body: Any
    remaining_s: float
    max_reply_bytes: int
    payload_bytes: int
    packed: bytes | memoryview | None = None


class Dispatcher:
    """Every mounted method, who may call it, and what each peer has open. ``may`` can be set at any time."""

    def __init__(self, limits: ServeLimits, may: May = anybody_may) -> None:
        self._limits, self.may = limits, may
        self._methods: dict[str, AnyMethod] = {}
        self._usage: dict[PeerId, _Usage] = {}

    def mount(self, service: Service) -> None:
        """Serve all methods of a service. Raises BugError for a taken name."""
        methods = {}
        for method in service.methods():
            name = method.rpc.name
            if name in self._methods or name in methods:
                raise BugError(f"method {name} is mounted twice")
            methods[name] = method
        self._methods.update(methods)

    def unmount(self, service: Service) -> None:
        """Serve its methods no more; what was admitted is still answered."""
        for method in service.methods():
            self._methods.pop(method.rpc.name, None)

    def admit(self, caller: PeerId, envelope: Envelope, payload_bytes: int, *, public: bool) -> Admitted:
        """Decide on a request before anything is allocated for its payload; a yes is booked until :meth:`release`.

        Raises, in this order: Refused for an unknown method (or a private one on the public protocol), what ``may``
        raises, Busy when the peer has too much open, Violation for a payload nobody asked for; and once its body is
        decoded Violation for a malformed one, what the method's own ``admit`` raises, as a PeerError. A large body is
        decoded later, in a thread: then :func:`handle` raises these.
        """
        method = self._methods.get(envelope.method)
        if method is None or (public and not method.rpc.public):
            raise Refused(f"no method {envelope.method[:60]!r} here")
        try:
            self.may(caller, method.rpc)
        except Exception as error:  # the border of a call, as in handle()
            raise as_peer_error(error, envelope.method) from error
        usage = self._usage.get(caller) or _Usage()
        if usage.calls >= self._limits.calls_per_peer:
            raise Busy(f"{usage.calls} calls of this peer are open")
        if usage.payload_bytes and usage.payload_bytes + payload_bytes > self._limits.payload_bytes_per_peer:
            raise Busy(f"{usage.payload_bytes} bytes of this peer are held")
        if payload_bytes and method.admit is None:
            raise Violation(f"{method.rpc.name} takes no payload")
        admitted = Admitted(method, None, envelope.remaining_s, envelope.max_reply_bytes, payload_bytes)
        if len(envelope.body) > self._limits.body_bytes_on_loop:
            if payload_bytes:
                raise Violation(f"a body of {len(envelope.body)} bytes with a payload")
            admitted.packed = envelope.body
        else:
            body = _decoded(method, envelope.body)
            _ask_method(method, caller, body, payload_bytes)
            admitted.body = body
        self._usage[caller] = usage
        usage.calls += 1
        usage.payload_bytes += payload_bytes
        return admitted

    def release(self, caller: PeerId, admitted: Admitted) -> None:
        """An admitted request is over, however it ended."""
        usage = self._usage[caller]
        usage.calls -= 1
        usage.payload_bytes -= admitted.payload_bytes
        if not usage.calls:
            del self._usage[caller]
        if admitted.method.over is not None and admitted.body is not None:
            admitted.method.over(caller, admitted.body)


def _decoded(method: AnyMethod, packed: bytes | memoryview) -> Any:
    return decode(method.rpc.request, unpack(packed))


def _ask_method(method: AnyMethod, caller: PeerId, body: Any, payload_bytes: int) -> None:
    if method.admit is None:
        return
    try:
        method.admit(caller, body, payload_bytes)
    except Exception as error:  # the border of a call, as in handle()
        raise as_peer_error(error, method.rpc.name) from error


async def handle(admitted: Admitted, caller: PeerId, incoming: Incoming) -> tuple[bytes, Answer[Any]]:
    """Run a handler; its answer's packed body, and the answer. Raises PeerError whatever goes wrong."""
    try:
        if admitted.packed is not None:
            body = await asyncio.to_thread(_decoded, admitted.method, admitted.packed)
            _ask_method(admitted.method, caller, body, 0)
            admitted.body, admitted.packed = body, None
        answer = await admitted.method.handle(caller, admitted.body, incoming)
        if memoryview(answer.payload).nbytes > admitted.max_reply_bytes:
            raise BugError(f"an answer longer than the {admitted.max_reply_bytes} bytes the caller accepts")
        return pack(answer.body.to_wire()), answer
    except Exception as error:  # the border of a call: nothing a handler does may end the stream or the node
        raise as_peer_error(error, admitted.method.rpc.name) from error


def as_peer_error(error: Exception, method: str) -> PeerError:
    """Return what the caller is told: a PeerError as it is, anything else by its type's name only, and logged here."""
    if isinstance(error, PeerError):
        return error
    logger.error("%s failed", method, exc_info=error)
    return PeerError(f"failed: {type(error).__name__}")
