"""One peer's view of the directory in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.errors import BugError, Unreachable
from swarm.ids import PeerId, RunId
from swarm.network.protocols import RecordT
from swarm.network.records import decode_record, encode_record, expiry_of, key_name
from swarm.schema import Record

if TYPE_CHECKING:
    from swarm.sim.network import SimEndpoint


class SimDirectory:
    """Implements :class:`~swarm.network.protocols.Directory` for one peer in one run."""

    def __init__(self, endpoint: SimEndpoint, run: RunId) -> None:
        self._network, self._owner, self._run = endpoint.network, endpoint.peer, run
        self._endpoint = endpoint
        self._expiry: dict[str, float] = {}

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`."""
        key = self._key(type(record))
        expiry = expiry_of(self._network.clock.wall() + self._endpoint.skew_s, ttl_s, self._expiry.get(key, 0.0))
        if not self._network.store(key, self._owner, self._owner, expiry, encode_record(record)):
            raise Unreachable("no node of the directory stored our record")
        self._expiry[key] = expiry

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`."""
        entries = self._network.records(self._key(kind))
        return {owner: decode_record(kind, entry.body) for owner, entry in entries.items()}

    def _key(self, kind: type[Record]) -> str:
        if not self._network.is_open(self._endpoint):
            raise Unreachable("this endpoint is closed")
        if self._network.kinds.get(kind.kind) is not kind:
            raise BugError(f"{kind.__name__} is not a record of this run's directory")
        return key_name(self._run, kind)
