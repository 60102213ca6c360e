"""The directory of the run that an endpoint has entered, over all daemons that serve it; before that, none.

Its records are what the endpoint knows of peers that it never met: where they are, and after a new daemon who is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from swarm.clock import Clock
from swarm.errors import BugError, Unreachable
from swarm.ids import PeerId
from swarm.network.discovery.directory import DHTDirectory, DirectoryConfig
from swarm.network.discovery.records import PeerRecord
from swarm.network.libp2p.attach import LINK_ERRORS, AttachedP2P
from swarm.schema import Record
from swarm.security.signing import PrivateIdentity

_CLOSE_S = 0.5


class EnteredDirectory:
    """One endpoint's. ``addresses`` gives where it is reached now, for its own record."""

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._dht: DHTDirectory | None = None
        self._of_peers = False

    @property
    def dht(self) -> DHTDirectory:
        """The run's directory. Raises BugError before :meth:`enter`."""
        if self._dht is None:
            raise BugError("the endpoint has not entered a run")
        return self._dht

    async def enter(self, p2p: AttachedP2P, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock) -> None:
        """Join the directory of a run. Raises Unreachable when our daemon dies over it."""
        self._of_peers = PeerRecord in config.kinds
        self._dht = await DHTDirectory.open(p2p, config, identity, clock)

    def lose(self) -> None:
        """The daemon is gone: what hivemind waits for must be failed by hand."""
        if self._dht is not None:
            self._dht.lose()

    async def announce_again(self) -> Mapping[PeerId, PeerRecord]:
        """Enter our records at a new daemon, with the addresses of now; return those of others."""
        if self._dht is None:
            return {}
        await self._dht.resume(self._refreshed)
        return await self.records()

    def _refreshed(self, record: Record) -> Record:
        return record.model_copy(update={"addresses": self._addresses()}) if isinstance(record, PeerRecord) else record

    async def look_up(self, target: PeerId) -> tuple[str, ...]:
        """The addresses in a peer's record; none when the directory has no record of it, or no records of peers."""
        record = (await self.records()).get(target)
        return record.addresses if record is not None else ()

    async def records(self) -> Mapping[PeerId, PeerRecord]:
        """The records of all peers; none where there are none of peers, or the directory cannot be asked."""
        if self._dht is not None and self._of_peers:
            with contextlib.suppress(Unreachable):
                return await self._dht.lookup(PeerRecord)
        return {}

    async def leave(self) -> None:
        """Leave it; what waits fails. Takes half a second at most."""
        if self._dht is not None:
            self._dht.lose()
            with contextlib.suppress(*LINK_ERRORS):
                async with asyncio.timeout(_CLOSE_S):
                    await self._dht.close()

    async def ended(self) -> None:
        """Until nothing of it runs any more, moments after the client of the daemon was detached: half a second at
        most."""
        if self._dht is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._dht.ended()
