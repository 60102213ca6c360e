"""What a peer does when its libp2p daemon has been replaced, so that others find it where it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.dialling import Dialler
from swarm.network.hints import Hints
from swarm.network.presence import Presence
from swarm.network.records import PeerRecord

_DIALS_AT_ONCE = 16
_DIAL_S = 10.0


class Recovery:
    """Made once for an endpoint; :meth:`run` after every replacement."""

    def __init__(
        self,
        presence: Presence,
        hints: Hints,
        dialler: Dialler,
        peers: Callable[[], Sequence[PeerId]],
        announce: Callable[[], Awaitable[Mapping[PeerId, PeerRecord]]],
    ) -> None:
        """``peers`` gives those we dealt with lately. ``announce`` enters our records into the directory again, and
        gives those of others, as far as it can; it does not raise a PeerError."""
        self._presence, self._hints, self._dialler = presence, hints, dialler
        self._peers, self._announce = peers, announce
        self._turns = asyncio.Semaphore(_DIALS_AT_ONCE)

    async def run(self) -> None:
        """Connect with the peers we dealt with, be reached through our relays, be in the directory. Each as far as it
        goes: never raises a PeerError. Takes as long as the slowest dial, at most 10 s for every 16 peers that do
        not answer; cancel it when this daemon dies as well.

        We connect although they would: who dialled us while nobody listened is kept by libp2p from dialling
        again for 5 s. Whoever called us and never told us its address is looked up.
        """
        with contextlib.suppress(Unreachable):
            await self._presence.tell_own()
        peers = self._peers()
        known = [peer for peer in peers if self._hints.of(peer)]
        await asyncio.gather(self._connect(known), self._presence.renew(), self._find(set(peers).difference(known)))

    async def _find(self, strangers: set[PeerId]) -> None:
        for peer, record in (await self._announce()).items():
            if peer in strangers:
                self._hints.learn(peer, record.addresses)
        await self._connect(strangers)

    async def _connect(self, peers: Iterable[PeerId]) -> None:
        async def connect(peer: PeerId) -> None:
            async with self._turns:
                with contextlib.suppress(Unreachable, TimeoutError):
                    async with asyncio.timeout(_DIAL_S):
                        await self._dialler.connect(peer)

        await asyncio.gather(*map(connect, peers))
