"""From a peer to a stream with it: at its own addresses first, through its relays next, by newer addresses last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from multiaddr import Multiaddr

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.addresses import is_relayed
from swarm.network.attach import AttachedP2P
from swarm.network.hints import Hints

HEAD_START_S = 0.3
"""For how long only the direct addresses of a relayed peer are tried: a stream stays for life on the connection that
was there first, and two peers in one home have a better one than the relay's. Refused dials end it sooner."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Dialler:
    """Opens streams. ``look_up`` asks what a peer announces now; it may give nothing, and does not raise."""

    def __init__(self, p2p: AttachedP2P, hints: Hints, look_up: Callable[[PeerId], Awaitable[Sequence[str]]]) -> None:
        self._p2p, self._hints, self._look_up = p2p, hints, look_up

    async def open_stream(self, target: PeerId, protocol: str) -> Streams:
        """A new stream. Raises Unreachable with the first thing that went wrong; takes as long as its caller lets it.

        A peer that was reached through a relay is looked up when that fails: relays die, and it takes others.
        """
        problem: Unreachable | None = None
        hints = self._hints.of(target)
        for again in (False, True):
            if again:
                self._hints.learn(target, await self._look_up(target))
                if self._hints.of(target) == hints:
                    break
                hints = self._hints.of(target)
            try:
                await self._connect(target, hints)
            except Unreachable as error:  # hints grow old; the daemon may know the peer anyway
                problem = problem or error
            try:
                return await self._p2p.open_stream(target, protocol)
            except Unreachable as error:
                problem = problem or error
            if not any(map(is_relayed, hints)):
                break
        assert problem is not None  # noqa: S101 - else a stream was returned
        raise problem

    async def _connect(self, target: PeerId, hints: Sequence[Multiaddr]) -> None:
        direct = [address for address in hints if not is_relayed(address)]
        if 0 < len(direct) < len(hints):
            with contextlib.suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(HEAD_START_S):
                    await self._p2p.connect(target, direct)
        if hints:
            await self._p2p.connect(target, hints)
