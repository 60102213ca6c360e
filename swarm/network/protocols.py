"""The seam between algorithms and the network: what ``pipeline``, ``averaging``, ``step`` and ``state`` see.

Two implementations exist, held to one conformance suite: ``swarm.network.endpoint`` (libp2p) and
``swarm.sim.network`` (in memory). Nothing above this file knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from swarm.errors import BugError
from swarm.ids import PeerId
from swarm.schema import Message, Record

Payload = bytes | bytearray | memoryview
"""Raw tensor bytes, already encoded by a codec."""

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
RecordT = TypeVar("RecordT", bound=Record)

MAX_BODY_BYTES = 4 << 20
"""Limit of one msgpack body. A close record names every microbatch of a step (150 bytes each and 60 for
each stage), so this is 15,000 microbatches of two stages; the manifest is checked against it."""


PUBLIC_PREFIX = "manifest/1/"
"""Methods of this name are public: served and called before a run is entered, under a protocol name without its
digest."""

RELAY_PREFIX = "relay/1/"
"""So are those of a relay that belongs to no run."""

MAX_METHOD_NAME = 80


@dataclass(frozen=True, slots=True)
class Rpc(Generic[RequestT, ReplyT]):
    """One thing a peer can be asked to do: its name on the wire, ``service/version/verb``, with what is asked and what
    is answered. A constant next to the messages; :meth:`handled` binds it to anyone who answers."""

    name: str
    request: type[RequestT]
    reply: type[ReplyT]

    def __post_init__(self) -> None:
        if not self.name.isascii() or len(self.name) > MAX_METHOD_NAME:
            raise BugError(f"{self.name!r} is no name of a method: {MAX_METHOD_NAME} ASCII characters at most")

    @property
    def public(self) -> bool:
        """True if any peer may call it without knowing the run: by its name, see :data:`PUBLIC_PREFIX`."""
        return self.name.startswith((PUBLIC_PREFIX, RELAY_PREFIX))

    def handled(
        self,
        handle: Callable[[PeerId, RequestT], Awaitable[ReplyT]],
        *,
        admit: Callable[[PeerId, RequestT, int], None] | None = None,
        over: Callable[[PeerId, RequestT], None] | None = None,
    ) -> Method[RequestT, ReplyT]:
        """Have it answered by ``handle(caller, body)``, without raw bytes; ``admit`` and ``over`` see :class:`Method`.

        ``caller`` is authenticated by the transport.
        """

        async def answer(caller: PeerId, body: RequestT, incoming: Incoming) -> Answer[ReplyT]:
            return Answer(await handle(caller, body))

        return Method(rpc=self, handle=answer, admit=admit, over=over)

    def handled_with_payload(
        self,
        handle: Callable[[PeerId, RequestT, Incoming], Awaitable[Answer[ReplyT]]],
        *,
        admit: Callable[[PeerId, RequestT, int], None] | None = None,
        over: Callable[[PeerId, RequestT], None] | None = None,
    ) -> Method[RequestT, ReplyT]:
        """As :meth:`handled`, by ``handle(caller, body, incoming)``, which takes raw bytes, or answers with some, or
        has to know the caller's deadline."""
        return Method(rpc=self, handle=handle, admit=admit, over=over)


@dataclass(frozen=True, slots=True)
class Incoming:
    """The parts of a call beside its body.

    ``payload`` is the receiver's own writable buffer. ``deadline`` is on the receiver's monotonic clock: after it the
    caller no longer listens.
    """

    payload: memoryview
    deadline: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[ReplyT]):
    """The result of a handler that may return raw bytes: a body and, for downloads, the bytes."""

    body: ReplyT
    payload: Payload = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[RequestT, ReplyT]):
    """An :class:`Rpc` that is answered here: made by its :meth:`~Rpc.handled`.

    ``admit(caller, body, payload_bytes)`` runs *before* any buffer for the
    payload exists; it raises a :class:`~swarm.errors.PeerError` to refuse, and must check that ``payload_bytes`` is
    exactly what the expected shape and codec give. Without ``admit`` any payload is a violation. ``over(caller, body)``
    runs when a call that was admitted is over, however it ended, whether its payload arrived or not. ``handle`` may
    raise any PeerError, which the caller gets back as the same type; any other exception is reported as failed and
    logged.
    A handler is cancelled at the caller's deadline.
    """

    rpc: Rpc[RequestT, ReplyT]
    handle: Callable[[PeerId, RequestT, Incoming], Awaitable[Answer[ReplyT]]]
    admit: Callable[[PeerId, RequestT, int], None] | None = None
    over: Callable[[PeerId, RequestT], None] | None = None


AnyMethod: TypeAlias = Method[Any, Any]
"""One of a service's methods: what it asks and answers was checked where it was bound."""

May = Callable[[PeerId, Rpc[Any, Any]], None]
"""Raises Refused, saying why, where a caller may not make a call. It is asked at every call of a method that is served,
before a byte of the call's body is decoded: so it must be cheap. At every one means also at a call of a public method
(:attr:`Rpc.public`), which strangers make before they enter a run, and at a call that a peer makes to itself, with its
own id as the caller: what refuses those that are no members must let both pass."""


def anybody_may(caller: PeerId, rpc: Rpc[Any, Any]) -> None:
    """Let everybody call whatever is served, as far as the transport lets them: see :data:`May`."""


class Service(Protocol):
    """Something with methods to mount on an endpoint."""

    def methods(self) -> Sequence[AnyMethod]:
        """All methods of the service; names are unique on one endpoint."""


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Bytes on the wire since the endpoint opened, frames' headers included; by remote peer; of very many
    peers, those with the fewest together under no name. ``sent_by`` has what was sent by the name of the method that it
    was sent for, too, as its question or its answer; it goes on counting."""

    bytes_sent: Mapping[PeerId, int]
    bytes_received: Mapping[PeerId, int]
    sent_by: Mapping[str, Mapping[PeerId, int]] = field(default_factory=dict)

    @property
    def total(self) -> tuple[int, int]:
        """(sent, received) over all peers."""
        return sum(self.bytes_sent.values()), sum(self.bytes_received.values())


class Endpoint(Protocol):
    """One peer's presence on the network."""

    @property
    def peer(self) -> PeerId:
        """Our own identity."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs under which others can reach us, each ending in ``/p2p/<peer>``."""

    def mount(self, service: Service) -> None:
        """Serve a service from now on. Raises BugError when a method name is taken."""

    def unmount(self, service: Service) -> None:
        """Serve it no more. What it was asked before is still answered."""

    def allow_calls(self, may: May) -> None:
        """Ask ``may(caller, rpc)`` from now on before a call's body is decoded, in the place of what was asked before;
        until the first time everybody may. Calls that were let in go on. See :data:`May` for what it is asked."""

    def introduce(self, rpc: Rpc[RequestT, Any], body: RequestT) -> None:
        """Say this from now on to the one who answers a call with Unadmitted, which is then made once more."""

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where a peer may be dialled. Costs nothing until a call needs it."""

    async def call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        *,
        timeout_s: float,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> tuple[ReplyT, memoryview]:
        """Ask and wait for the answer, at most ``timeout_s`` seconds in all (dialling included).

        Returns the decoded body and the answer's payload, which may not exceed ``max_reply_bytes``. Raises the
        PeerError the other side raised, Unreachable, DeadlineMissed, or Violation when the answer is malformed.
        Cancelling the call cancels the remote handler as soon as the cancel frame arrives.
        A payload is sent in chunks and must not be changed before the call returns.
        """

    async def notify(self, target: PeerId, rpc: Rpc[RequestT, Any], body: RequestT, *, timeout_s: float) -> None:
        """Say without asking: returns when it is sent, at most ``timeout_s`` seconds later, and nobody says whether it
        was taken. The handler has until then, too. About half the cost of a call without payload.

        Raises Unreachable or DeadlineMissed when it could not be sent.
        """

    def statistics(self) -> LinkStatistics:
        """Bytes by peer, so far."""

    async def close(self) -> None:
        """Close every stream, cancel every handler, stop every child. Idempotent; bounded in time."""


class Directory(Protocol):
    """Typed, signed, expiring records that any peer can find: a hint of who is there, never a proof of state."""

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """Publish our own record under our peer id, replacing the previous one. Raises Unreachable when no node
        of the directory stored it."""

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """All live records of a kind whose signature, owner, ranges and lifetime are right; others are dropped."""
