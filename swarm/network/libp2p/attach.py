"""Attach hivemind's ``P2P`` to a daemon that we started, with its sockets where we want them; bound directory messages.

This file and :mod:`swarm.network.discovery.directory` are the only ones that import hivemind (its import takes seconds,
torch included).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from multiaddr import Multiaddr

from swarm.errors import PeerError, Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p.lean import spare_init
from swarm.network.rpc.strangers import QuestionBudget

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit, at hivemind's import
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings import p2pclient
    from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE, ControlClient, DaemonConnector
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr

use_hivemind_log_handler("nowhere")  # its records go to our handlers, not to its own

logger = logging.getLogger(__name__)

GONE = "the libp2p daemon is gone"


class DaemonClient(p2pclient.Client):  # type: ignore[misc]
    """hivemind's client: the connection to the daemon over which its own calls go. What it leaves open when it is
    cancelled, or waits for when the daemon is gone, ends here."""

    def __init__(self, control: HivemindMultiaddr) -> None:
        """``control`` is the daemon's socket. :meth:`attach` must follow."""
        super().__init__(_initialized_with_create=True)
        self._connector = _Connector(control)
        self._ended = False

    async def attach(self, client: HivemindMultiaddr) -> None:
        """Connect; the daemon will reach us at ``client``. Raises what :data:`LINK_ERRORS` names;
        then nothing is open."""
        try:
            self.control = await ControlClient.create(
                self._connector, client, persistent_conn_max_msg_size=DEFAULT_MAX_MSG_SIZE
            )
        except BaseException:
            self._connector.close()
            raise

    @property
    def alive(self) -> bool:
        """True if the daemon still holds its end of the connection, and we ours."""
        return not self._ended and not self.control._read_task.done()

    @property
    def handlers(self) -> dict[str, Any]:
        """hivemind's own calls that are served here, by name."""
        return dict(self.control.unary_handlers)

    def fail_pending(self) -> None:
        """Fail what waits for a daemon that is gone; hivemind would wait for ever."""
        for pending in list(self.control._pending_calls.values()):
            if not pending.done():
                pending.set_exception(P2PDaemonError(GONE))
                pending.exception()  # retrieved: the one who waited may just have been cancelled

    async def end(self) -> None:
        """Close every connection, end what is still handled for others. Idempotent. One that is told now that a call
        has failed may try the next one at once: nobody would ever answer that."""
        self._ended = True
        self.fail_pending()
        tasks = [task for task in (self.control._read_task, self.control._write_task) if task is not None]
        tasks += self.control._handler_tasks.values()
        for task in tasks:
            task.cancel()
        self._connector.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail_pending()


class _Connector(DaemonConnector):  # type: ignore[misc]
    """hivemind's way to the daemon, remembering what it opened."""

    def __init__(self, control: HivemindMultiaddr) -> None:
        super().__init__(control)
        self._writers: list[asyncio.StreamWriter] = []

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See hivemind."""
        reader, writer = await super().open_connection()
        self._writers = [each for each in self._writers if not each.is_closing()]
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        """Close all that are open."""
        for writer in self._writers:
            writer.close()


StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LINK_ERRORS = (P2PDaemonError, OSError, EOFError, ValueError)
"""What hivemind and the sockets to the daemon raise when the daemon, or a way to a peer, is gone; time-outs too."""
_ACCEPT_S = 10.0
_SELF, _BACKOFF = "dial to self attempted", "dial backoff"
_TOO_SOON = "not called again so soon after it could not be reached: does it run, and has it a network?"
_MAX_REASON = 400


class DaemonGone(Unreachable):
    """Our own daemon does not answer, or we cannot ask it: no fault of the peer that was to be reached."""


class AttachedP2P(P2P):  # type: ignore[misc]
    """A ``P2P`` without a child: ``DHTNode`` runs on it, and raw streams are opened and served through it.

    The requests for streams are written here: hivemind's leave their socket open when they fail or are cancelled.
    ``namespace`` is put before the names of hivemind's own remote calls, so that the directories of two runs can
    share a bootstrap peer and never mix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.namespace = ""
        self._control = ""
        self._protocols: dict[str, StreamHandler] = {}
        self._unary: dict[str, Any] = {}
        self._server: asyncio.Server | None = None
        self.questions: QuestionBudget | None = None
        """What strangers may ask; None: nobody counts it."""

    @classmethod
    async def attach(cls, control: Path, client: Path) -> AttachedP2P:
        """Connect to the daemon behind ``control``; it will reach us through ``client``. Raises Unreachable."""
        self = cls()
        self._alive = True  # read by hivemind's is_alive()
        self._control = str(control)
        self._daemon_listen_maddr = HivemindMultiaddr(f"/unix{control}")
        self._client_listen_maddr = HivemindMultiaddr(f"/unix{client}")
        try:
            with _as_unreachable(PeerId("")):
                await self._connect_client()
                self._server = await asyncio.start_unix_server(self._accept, path=str(client))
        except BaseException:
            await self.detach()
            raise
        return self

    async def reattach(self) -> None:
        """Attach to the daemon that took the place of one that died, behind the same socket, and serve there all that
        was served: raw streams and hivemind's own calls. Raises Unreachable; may be called again then."""
        if self._client is not None:
            self._unary |= self._client.handlers  # kept here: an attempt that fails leaves a client without them
            await self._client.end()
        with _as_unreachable(PeerId("")):
            await self._connect_client()
            for protocol in self._protocols:
                await self._register(protocol)
            for name, handler in self._unary.items():
                if name not in self._client.handlers:
                    await self._client.add_unary_handler(name, handler)

    async def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which others can reach us, as the daemon believes now, each with ``/p2p/<peer>``.
        Raises Unreachable."""
        with _as_unreachable(PeerId("")):
            return tuple(str(address) for address in await self.get_visible_maddrs(latest=True))

    async def connect(self, peer: PeerId, addresses: Iterable[Multiaddr]) -> None:
        """Have a connection to a peer at one of these addresses (without their ``/p2p`` part). Raises Unreachable."""
        raw = [address.to_bytes() for address in addresses]  # hivemind's bytes of a relay are not what Go reads
        body = p2pd_pb2.ConnectRequest(peer=peer_bytes(peer), addrs=raw)
        _, _, writer = await self._ask(peer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=body))
        writer.close()

    async def connections(self) -> list[tuple[PeerId, Multiaddr]]:
        """Every connection that there is now: with whom, and the address at its other end. Raises Unreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response, _, writer = await self._ask(PeerId(""), request)
        writer.close()
        return [(peer_of_bytes(info.id), Multiaddr(raw)) for info in response.peers for raw in info.addrs]

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new raw stream. Raises Unreachable, also when the peer does not serve that protocol."""
        body = p2pd_pb2.StreamOpenRequest(peer=peer_bytes(peer), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=body)
        _, reader, writer = await self._ask(peer, request)
        return reader, writer

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Give every incoming stream of a protocol to ``handler``, with its authenticated peer. Raises Unreachable."""
        self._protocols[protocol] = handler
        await self._register(protocol)

    async def _register(self, protocol: str) -> None:
        body = p2pd_pb2.StreamHandlerRequest(
            addr=self._client_listen_maddr.to_bytes(), proto=[protocol], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=body)
        _, _, writer = await self._ask(PeerId(""), request)
        writer.close()

    def fail_pending(self) -> None:
        """Fail what waits for a daemon that is gone; hivemind would wait for ever."""
        if self._client is not None:
            self._client.fail_pending()

    async def detach(self) -> None:
        """Close the sockets. Idempotent; the daemon goes on."""
        self.fail_pending()
        if self._server is not None:
            self._server.close()
        self._terminate()
        if self._client is not None:
            await self._client.end()

    async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        """hivemind's, under our namespace, for calls that are no streams; a question that is too large, or one of too
        many that strangers ask, gets an error and never its handler."""

        async def bounded(asked: Any, context: Any) -> Any:
            if self.questions is None:
                check_question(asked)
                return await handler(asked, context)
            peer = peer_of_bytes(context.remote_id.to_bytes())
            await self.questions.admit(peer, asked.ByteSize())  # before it is looked at
            check_question(asked)
            answer = await handler(asked, context)
            self.questions.answered(peer, answer.ByteSize())
            return answer

        await super().add_protobuf_handler(self.namespace + name, bounded, *args, **kwargs)

    async def remove_protobuf_handler(self, name: str, **kwargs: Any) -> None:
        """hivemind's, under our namespace."""
        self._unary.pop(self.namespace + name, None)
        await super().remove_protobuf_handler(self.namespace + name, **kwargs)

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, asked: Any, *args: Any) -> Any:
        """hivemind's, under our namespace; fails at once where hivemind would wait for a daemon that is gone. Raises
        ValueError for an answer that is too large to be looked at."""
        if self._client is None or not self._client.alive:
            raise P2PDaemonError(GONE)
        answer = await super().call_protobuf_handler(peer_id, self.namespace + name, asked, *args)
        check_answer(asked, answer)
        return answer

    async def _connect_client(self) -> None:
        client = DaemonClient(self._daemon_listen_maddr)
        await client.attach(self._client_listen_maddr)
        self._client = client
        await self._ping_daemon()

    async def _ask(self, peer: PeerId, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """One request to the daemon on a connection of its own, which is closed unless it succeeds. Raises Unreachable;
        DaemonGone when it is not the peer but the daemon that does not answer."""
        with _as_unreachable(peer):
            reader, writer = await self._open_control(peer)
            try:
                response = p2pd_pb2.Response()
                try:
                    await write_pbmsg(writer, request)
                    await read_pbmsg_safe(reader, response)
                except (OSError, EOFError) as error:
                    raise DaemonGone(f"our libp2p daemon is gone ({type(error).__name__})", peer=peer) from error
                if response.type == p2pd_pb2.Response.ERROR:
                    raise Unreachable(_plain(response.error.msg), peer=peer)
            except BaseException:
                writer.close()
                raise
            return response, reader, writer

    async def _open_control(self, peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self._control)
        except (FileNotFoundError, ConnectionError) as error:
            raise DaemonGone(f"our libp2p daemon is gone ({type(error).__name__})", peer=peer) from error
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise DaemonGone("it was not asked: we have no file descriptor left", peer=peer) from error

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The daemon hands us a stream that another peer opened. asyncio keeps this task."""
        try:
            async with asyncio.timeout(_ACCEPT_S):
                info = p2pd_pb2.StreamInfo()
                await read_pbmsg_safe(reader, info)
            handler = self._protocols[info.proto]
            peer = peer_of_bytes(info.peer)
        except (*LINK_ERRORS, DecodeError, LookupError) as error:
            logger.warning("a stream from the daemon was dropped: %s", type(error).__name__)
            writer.close()
            return
        await handler(peer, reader, writer)


def peer_bytes(peer: PeerId) -> bytes:
    """A peer id as the daemon takes it. Raises Unreachable for one that is none: ids come from other peers."""
    with _as_unreachable(peer):
        raw: bytes = PeerID.from_base58(peer).to_bytes()
        return raw


def peer_of_bytes(raw: bytes) -> PeerId:
    """The peer id behind its bytes. Any few bytes give one: whether it is anybody's is found out by calling it. Raises
    ValueError for more bytes than any id has."""
    check_ids(raw)
    return PeerId(PeerID(raw).to_base58())


def _plain(told: str) -> str:
    """The daemon's words on one line, with peer ids cut to their ends: it repeats them at every level. Of dials that
    failed, to each address of a peer, the reasons alone, each once; not that one of its addresses, such as loopback, is
    also ours."""
    line = " ".join(told.split())
    dials = re.findall(r"\* \[([^\]]*)\] (.*?)(?= \* \[|$)", line)
    if "all dials failed" in line and dials:
        reasons = dict.fromkeys(_reason(at, why.rpartition(": ")[2]) for at, why in dials)
        others = [reason for reason in reasons if reason != _SELF]
        return "; ".join(others or ["all its addresses are ours as well"])[:_MAX_REASON]
    line = re.sub(r"12D3KooW\w{38}(\w{6})", r"…\1", line).replace("failed to dial: ", "")
    return line.replace(_BACKOFF, _TOO_SOON)[:_MAX_REASON]


def _reason(address: str, why: str) -> str:
    return _TOO_SOON if why == _BACKOFF else why + " by a relay" * ("p2p-circuit" in address)


@contextlib.contextmanager
def _as_unreachable(peer: PeerId) -> Iterator[None]:
    try:
        yield
    except PeerError:
        raise
    except LINK_ERRORS as error:
        raise Unreachable(str(error)[:300] or type(error).__name__, peer=peer) from error


# --- bounds on the directory's questions and answers -----------------------------------------------------------------
# Each message is checked before hivemind, which builds something for everything it holds, has it. Knows the fields of
# hivemind's messages by their names only.


MAX_KEYS: Final = 16
"""Keys in one question. We look up and store one at a time; who meets a new node hands it all that it holds, which is
one key for each kind of record in the run."""

MAX_NEIGHBOURS: Final = 64
"""Nodes that one answer names for one key; hivemind names 20."""

MAX_ID_BYTES: Final = 64
"""One peer's or node's id. Ours have 38 and 20 bytes, the longest of libp2p's 42; base58 takes the square of this."""


def check_question(asked: Any) -> None:
    """Look at what another peer asks. Raises ValueError, which hivemind answers with an error."""
    keys = getattr(asked, "keys", ())
    if len(keys) > MAX_KEYS:
        raise ValueError(f"a question about {len(keys)} keys, more than {MAX_KEYS}")
    if len(set(keys)) < len(keys):
        raise ValueError("a question about one key twice")
    if any(getattr(asked, "in_cache", ())):  # none of us does; what is cached is answered before what is stored
        raise ValueError("a question to keep something in the cache")


def check_answer(asked: Any, answer: Any) -> None:
    """Look at what another peer answers. Raises ValueError, which hivemind takes for a call that failed."""
    results = getattr(answer, "results", ())
    if len(results) > len(getattr(asked, "keys", ())):
        raise ValueError(f"{len(results)} results, more than were asked for")
    for result in results:
        for ids in (result.nearest_node_ids, result.nearest_peer_ids):
            if len(ids) > MAX_NEIGHBOURS:
                raise ValueError(f"{len(ids)} neighbours of one key, more than {MAX_NEIGHBOURS}")
            check_ids(*ids)


def check_ids(*ids: bytes) -> None:
    """Look at ids of peers or nodes. Raises ValueError for one that is longer than any."""
    longest = max(map(len, ids), default=0)
    if longest > MAX_ID_BYTES:
        raise ValueError(f"an id of {longest} bytes, more than {MAX_ID_BYTES}")
