"""Streams between this peer and others, one for each peer and protocol: those we open, and those opened to us.

:class:`Outgoing` dials a stream when it is first needed or was lost; :class:`StreamServer` serves the others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection
from typing import NamedTuple

from swarm.clock import Clock
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p.attach import AttachedP2P
from swarm.network.libp2p.dialling import Dialler
from swarm.network.libp2p.supervisor import Supervisor
from swarm.network.rpc.client import CallerStream
from swarm.network.rpc.dispatcher import Dispatcher
from swarm.network.rpc.introduction import Introduction
from swarm.network.rpc.link import enlarge
from swarm.network.rpc.meter import ByteMeter
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import QuestionBudget, StrangerBudget
from swarm.waiting import ended

_Key = tuple[PeerId, str]


class Outgoing:
    """Gives streams until :meth:`close`. A call on a live stream meets nothing of this but one look into a table."""

    def __init__(
        self,
        me: PeerId,
        dialler: Dialler,
        supervisor: Supervisor,
        incoming: StreamServer,
        timeout_s: float,
    ) -> None:
        """A dial takes ``timeout_s`` at most. Our own calls go straight to ``incoming``. Anyone who sets
        ``on_lost`` is told of the peer to whom a stream broke; ``introduction`` is what is said to who asks for it."""
        self._me, self.dialler, self._supervisor = me, dialler, supervisor
        self._incoming, self._timeout_s = incoming, timeout_s
        self.here: dict[PeerId, StreamServer] = {me: incoming}
        """Who is in this process, ourselves among them: what we call there meets no network."""
        self._callers: dict[_Key, CallerStream] = {}
        self._dials: dict[_Key, asyncio.Task[CallerStream]] = {}
        self._outdated: set[_Key] = set()  # what is being dialled begins on a connection that there is a better one to
        self._leaving: list[CallerStream] = []
        self._closed = False
        self.on_lost: Callable[[PeerId], None] | None = None
        self.introduction: Introduction

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers to which we have, or recently had, a stream."""
        return tuple(dict.fromkeys(peer for peer, _ in self._callers if peer != self._me))

    @property
    def alive(self) -> tuple[_Key, ...]:
        """The streams that can be called on now, by peer and protocol."""
        return tuple(key for key, stream in self._callers.items() if stream.alive)

    async def stream(self, target: PeerId, protocol: str) -> CallerStream:
        """The pair's stream, dialled when there is none; concurrent calls share one dial, which outlives a caller that
        gives up, and is made again where the peer's streams were renewed meanwhile. While our daemon is being replaced
        a dial waits for the next one. Raises Unreachable."""
        if self._closed:
            raise Unreachable("this endpoint is closed", peer=target)
        key = (target, protocol)
        stream = self._callers.get(key)
        if stream is not None and stream.alive:
            return stream
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = asyncio.get_running_loop().create_task(self._dial(target, protocol), name="dial")
            dial.add_done_callback(lambda done: self._dialled(key, done))
        try:
            stream = await asyncio.shield(dial)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if dial.cancelled() and (task is None or not task.cancelling()):
                # :meth:`close` ended the dial; nobody has cancelled the one who waits for it.
                raise Unreachable("this endpoint is closed", peer=target) from None
            raise
        return await self.stream(target, protocol) if stream.retired else stream

    def renew(self, peer: PeerId) -> bool:
        """Have the next calls to this peer go over new streams, which begin on the best connection that there is now.
        Calls that wait for an answer keep theirs, which end with them. Returns whether there was any stream."""
        old = [self._callers.pop(key) for key in [each for each in self._callers if each[0] == peer]]
        for stream in old:
            stream.retire()
        self._leaving = [stream for stream in (*self._leaving, *old) if not stream.ended]
        dialling = {key for key in self._dials if key[0] == peer}
        self._outdated |= dialling
        return bool(old or dialling)

    async def connect_any(self, peers: Collection[PeerId]) -> None:
        """Connect with all of these, us left out. Raises Unreachable when there are some and none can be dialled."""
        others = sorted(set(peers) - {self._me})
        dials = await asyncio.gather(*map(self._connect, others), return_exceptions=True)
        failures = [error for error in dials if error is not None]
        if failures and len(failures) == len(others):
            raise Unreachable(f"none of {len(others)} bootstrap peers can be dialled: {failures[0]}")

    async def _connect(self, peer: PeerId) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._supervisor.through(lambda: self.dialler.connect(peer))
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._timeout_s:g} s", peer=peer) from error

    async def close(self) -> None:
        """End every stream and every dial; calls fail with Unreachable. Idempotent."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        for caller in (*self._callers.values(), *self._leaving):
            caller.close("this endpoint is closing")
        await asyncio.gather(*dials, return_exceptions=True)

    def _dialled(self, key: _Key, dial: asyncio.Task[CallerStream]) -> None:
        del self._dials[key]
        outdated = key in self._outdated
        self._outdated.discard(key)
        if dial.cancelled() or dial.exception() is not None:
            return
        if outdated:
            dial.result().retire()  # the one who waits for it dials again
        else:
            # Streams to peers that are long gone would add up over a long run.
            self._callers = {each: stream for each, stream in self._callers.items() if stream.alive}
            self._callers[key] = dial.result()

    async def _dial(self, target: PeerId, protocol: str) -> CallerStream:
        if (served := self.here.get(target)) is not None:
            return await self._dial_here(target, served, protocol)
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await self._supervisor.through(lambda: self.dialler.open_stream(target, protocol))
        except TimeoutError as error:
            raise Unreachable(f"not dialled in {self._timeout_s:g} s", peer=target) from error
        enlarge(writer)
        return await CallerStream.over(target, self._incoming.meter, reader, writer, lost=self.on_lost)

    async def _dial_here(self, target: PeerId, served: StreamServer, protocol: str) -> CallerStream:
        ours, theirs = socket.socketpair()
        served.accept(self._me, protocol, *await asyncio.open_connection(sock=theirs))
        return await CallerStream.over(target, self._incoming.meter, *await asyncio.open_connection(sock=ours))


# --- streams that other peers opened to us ---------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_STREAMS_PER_PEER = 4
_MAX_RECENT = 256

MAX_STRANGER_STREAMS = 128
"""Streams of all that are not known together: each takes a file descriptor, and identities cost nothing."""


class _Served(NamedTuple):
    peer: PeerId
    protocol: str
    stream: ServerStream
    writer: asyncio.StreamWriter


class StreamServer:
    """Serves streams with the methods of one dispatcher, until :meth:`close`."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock, meter: ByteMeter, public_protocol: str) -> None:
        """On streams of ``public_protocol`` only public methods may be called."""
        self._dispatcher, self._clock, self._public = dispatcher, clock, public_protocol
        self.meter = meter
        """What went over these streams."""
        self._serving: dict[asyncio.Task[None], _Served] = {}
        self._recent: dict[PeerId, None] = {}
        self._strangers = StrangerBudget(clock)
        self.questions = QuestionBudget(clock)
        """What strangers ask our directory, on no stream."""
        self._expected = 0
        self.known: Callable[[PeerId], bool] = lambda peer: False
        """Whose streams are not bounded together. Asked again at every stream, so it must be cheap and not raise."""

    def bound_strangers(self, known: Callable[[PeerId], bool]) -> None:
        """From now on those are members of whom ``known(peer)`` is true; all others share small bounds (see
        ``swarm.network.rpc.strangers``). Asked at every frame, so it must be cheap and not raise."""
        self.known = self._strangers.known = known

    def expect(self, peers: int) -> None:
        """So many peers are to come that are not known yet: strangers may have as many streams more as those have, and
        call more often."""
        self._expected = peers
        self._strangers.expect(peers)

    @property
    def open(self) -> int:
        """The number of streams served now."""
        return len(self._serving)

    @property
    def recent(self) -> tuple[PeerId, ...]:
        """The last 256 peers that opened a stream, whether it still is there or not."""
        return tuple(self._recent)

    async def serve(self, p2p: AttachedP2P, protocol: str) -> None:
        """Take every incoming stream of a protocol, from the daemon that is there now and from those that follow it.
        Raises Unreachable."""

        async def accept(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            enlarge(writer)
            self.accept(peer, protocol, reader, writer)

        await p2p.serve_streams(protocol, accept)

    def accept(self, peer: PeerId, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a stream; where there are too many another gives way. A peer has few of each kind: the oldest goes, it
        is what a dial after a break left. One of a stranger that flooded us is closed at once."""
        if self._strangers.barred(peer):
            writer.close()
            return
        same = [
            task
            for task, served in self._serving.items()
            if (served.peer, served.protocol) == (peer, protocol) and not task.cancelling()
        ]
        if len(same) >= _STREAMS_PER_PEER:
            same[0].cancel()
        if not self.known(peer):
            self._make_room()
        self._remember(peer)
        stream = ServerStream(
            peer, self._dispatcher, self._clock, self.meter, self._strangers, protocol == self._public
        )
        task = asyncio.get_running_loop().create_task(stream.serve(reader, writer), name=f"serve {protocol[:16]}")
        self._serving[task] = _Served(peer, protocol, stream, writer)
        task.add_done_callback(self._served)

    def cut(self, peer: PeerId) -> None:
        """End this peer's streams and cancel its handlers."""
        for task, served in self._serving.items():
            if served.peer == peer:
                task.cancel()

    async def close(self) -> None:
        """End every stream and cancel its handlers. Idempotent."""
        await ended(self._serving)

    def _make_room(self) -> None:
        """Close a stream when strangers have too many: the oldest on which nobody is calling gives way, whose caller
        dials again when it calls; if there is none, the oldest of all: a call may go on for a day."""
        foreign = [
            (task, served.stream)
            for task, served in self._serving.items()
            if not task.done() and not task.cancelling() and not self.known(served.peer)
        ]
        if len(foreign) >= MAX_STRANGER_STREAMS + _STREAMS_PER_PEER * self._expected:
            leaving = next((task for task, stream in foreign if stream.idle), foreign[0][0])
            logger.debug("strangers have %d streams: one of %s gives way", len(foreign), self._serving[leaving].peer)
            leaving.cancel()

    def _remember(self, peer: PeerId) -> None:
        self._recent.pop(peer, None)
        self._recent[peer] = None
        if len(self._recent) > _MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task).writer.close()  # here: a task that is cancelled before its first step closes nothing
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a stream ended with a bug", exc_info=error)
