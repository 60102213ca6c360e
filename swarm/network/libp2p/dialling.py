"""Open a stream to a peer: at its own addresses first, through its relays next, by newer addresses last.

Two daemons that dial each other in the same moment, each from the port at which it listens, make one TCP connection of
which both are the client (simultaneous open, RFC 9293 §3.5). The handshake then fails at both, and both refuse to dial
that address again for five seconds. Rounds begin everywhere at once, so over a WAN this is not rare: of two peers the
one with the larger id gives way, and dials that crossed all the same are repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from multiaddr import Multiaddr

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.addresses import is_loopback, is_relayed, split_peer, told_address
from swarm.network.libp2p.attach import AttachedP2P, DaemonGone
from swarm.network.libp2p.splice import Streams

HEAD_START_S = 0.3
"""For how long only the direct addresses of a relayed peer are tried: two peers in one home have a better connection
than the relay's, and calls that began on the relay's leave it 5 s later at best. Refused dials end it sooner."""

PATIENCE_S = 1.0
"""After this long without a stream a peer is looked up while the dial goes on: most dials take a few round trips."""

_LOOK_UP_S = 2.0
"""A dial that failed is not kept from failing for longer by a directory that does not answer."""

GIVE_WAY_S = 0.25
"""For how long the larger of two ids waits for the other's dial: a connection takes one way of a round trip to show
itself. Costs the peers that nobody else dials this long, once a connection."""

_CROSSED = "clientHelloMsg when waiting for *tls.serverHelloMsg"
_REFUSED_S = 5.1
"""For how long the daemon refuses an address after a failure, and a little more."""

_GLANCE_S = 0.05


class Dialler:
    """Opens streams. ``look_up`` asks what a peer announces now; it may give nothing, and does not raise."""

    def __init__(self, p2p: AttachedP2P, hints: Hints, look_up: Callable[[PeerId], Awaitable[Sequence[str]]]) -> None:
        self._p2p, self._hints, self._look_up = p2p, hints, look_up

    async def open_stream(self, target: PeerId, protocol: str) -> Streams:
        """A new stream. Raises Unreachable with the first thing that went wrong, DaemonGone when our own daemon has
        died; takes as long as its caller lets it.

        A peer that is not reached within a second, or not at all, is looked up once: what was told of it grows old,
        relays die, and addresses of a home or a dead network do not answer, so that nothing would ever fail.
        """
        hints = self._hints.of(target)
        tries: list[asyncio.Future[Streams]] = [asyncio.ensure_future(self._open(target, protocol, hints))]
        try:
            await asyncio.wait(tries, timeout=PATIENCE_S)
            failed = tries[0].exception() if tries[0].done() else None
            if isinstance(failed, DaemonGone):
                raise failed
            if not tries[0].done() or failed is not None:
                tries.append(asyncio.ensure_future(self._open_anew(target, protocol, hints)))
            return await _first_good(tries)
        finally:
            await _end(tries)

    async def connect(self, target: PeerId) -> None:
        """Have a connection, where anything is known of the peer: nothing is looked up. Raises Unreachable."""
        await self._connect(target, self._hints.of(target))

    async def _open(self, target: PeerId, protocol: str, hints: Sequence[Multiaddr]) -> Streams:
        problem: Unreachable | None = None
        try:
            if hints and self._hints.me > target:
                await self._met(target, GIVE_WAY_S)
            await self._connect(target, hints)
        except DaemonGone:
            raise
        except Unreachable as error:  # the daemon may know the peer anyway
            problem = error
        try:
            return await self._p2p.open_stream(target, protocol)
        except DaemonGone:
            raise
        except Unreachable as error:
            raise problem or error from None

    async def _open_anew(self, target: PeerId, protocol: str, old: Sequence[Multiaddr]) -> Streams:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_UP_S):
                self._hints.learn(target, await self._look_up(target))
        hints = self._hints.of(target)
        if hints == old:
            raise Unreachable("the directory knows no other address", peer=target)
        return await self._open(target, protocol, hints)

    async def _connect(self, target: PeerId, hints: Sequence[Multiaddr]) -> None:
        direct = [address for address in hints if not is_relayed(address)]
        if 0 < len(direct) < len(hints):
            with contextlib.suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(HEAD_START_S):
                    await self._p2p.connect(target, direct)
        if not hints:
            return
        try:
            await self._p2p.connect(target, hints)
        except Unreachable as error:
            if _CROSSED not in error.reason:
                raise
            await self._met(target, _REFUSED_S + GIVE_WAY_S * (self._hints.me > target))
            await self._p2p.connect(target, hints)

    async def _met(self, target: PeerId, seconds: float) -> None:
        """Wait for a connection that the other side makes, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    if target in {peer for peer, _ in await self._p2p.connections()}:
                        return
                    await asyncio.sleep(_GLANCE_S)


async def _first_good(tries: list[asyncio.Future[Streams]]) -> Streams:
    """Return the result of the first that succeeds, taken off the list; if none does, the error of the first one."""
    pending = set(tries)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            if each.exception() is None:
                tries.remove(each)
                return each.result()
    return tries[0].result()


async def _end(tries: Sequence[asyncio.Future[Streams]]) -> None:
    """End what goes on, and close the streams of those that came second."""
    for each in tries:
        each.cancel()
    for left in await asyncio.gather(*tries, return_exceptions=True):
        if not isinstance(left, BaseException):
            left[1].close()


# --- hints -----------------------------------------------------------------------------------------------------------
# Where peers can be dialled, as told by the invite, the roster and the directory. Never proof.


MAX_PEERS = 4096
MAX_PER_PEER = 16


class Hints:
    """The last addresses told for each peer, without their ``/p2p`` part: of the 4096 peers that were last told of or
    asked for, at most 16 each."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._known: dict[PeerId, tuple[Multiaddr, ...]] = {}

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Replace what is known of a peer. Addresses that cannot be dialled or name another peer are ignored: they come
        from other peers."""
        parsed = []
        for text in addresses:
            if (told := told_address(text)) is not None:
                address, named = split_peer(told)
                if named == peer:
                    parsed.append(address)
        if parsed and peer != self.me:
            self._known.pop(peer, None)
            self._known[peer] = tuple(parsed[:MAX_PER_PEER])
            if len(self._known) > MAX_PEERS:
                del self._known[next(iter(self._known))]

    def of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Return the addresses to dial a peer at; empty when none is known."""
        if (known := self._known.pop(peer, None)) is None:
            return ()
        self._known[peer] = known  # the last to be forgotten now
        return known

    def dialable(self) -> list[PeerId]:
        """Peers that tell addresses of their own, and not only of their machine: those who could relay."""
        return [
            peer
            for peer, known in self._known.items()
            if not any(map(is_relayed, known)) and not all(map(is_loopback, known))
        ]
