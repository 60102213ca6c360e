"""The streams that other peers opened to us, under one protocol or another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from swarm.clock import Clock
from swarm.ids import PeerId
from swarm.network.attach import AttachedP2P
from swarm.network.link import Meter, enlarge
from swarm.network.server_stream import ServerStream
from swarm.network.serving import Desk

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


class Incoming:
    """Serves streams with the methods of one desk, until :meth:`close`."""

    def __init__(self, desk: Desk, clock: Clock, meter: Meter, public_protocol: str) -> None:
        """On streams of ``public_protocol`` only public methods may be called."""
        self._desk, self._clock, self._meter, self._public = desk, clock, meter, public_protocol
        self._serving: dict[asyncio.Task[None], _Served] = {}
        self._recent: dict[PeerId, None] = {}
        self.known: Callable[[PeerId], bool] = lambda peer: False
        """Whose streams are not bounded together. Asked again at every stream, so it must be cheap and not raise."""
        self.expected = 0
        """How many peers are to come that are not known yet: strangers may have as many streams more as those have."""

    @property
    def open(self) -> int:
        """How many streams are served now."""
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
        is what a dial after a break left."""
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
        stream = ServerStream(peer, self._desk, self._clock, self._meter, protocol == self._public)
        task = asyncio.get_running_loop().create_task(stream.serve(reader, writer), name=f"serve {protocol[:16]}")
        self._serving[task] = _Served(peer, protocol, stream, writer)
        task.add_done_callback(self._served)

    async def close(self) -> None:
        """End every stream and cancel its handlers. Idempotent."""
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_room(self) -> None:
        """Where strangers have too many streams, the oldest on which nobody is calling gives way, whose caller dials
        again when it calls; if there is none, the oldest of all: a call may go on for a day."""
        foreign = [
            (task, served.stream)
            for task, served in self._serving.items()
            if not task.done() and not task.cancelling() and not self.known(served.peer)
        ]
        if len(foreign) >= MAX_STRANGER_STREAMS + _STREAMS_PER_PEER * self.expected:
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
