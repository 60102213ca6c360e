"""The directory over hivemind's ``DHTNode``: records by kind, one subkey per owner, refused wherever they are not
right.

The same validator stands at every door: what others store here, what others answer, and what we store ourselves. It
is strict at storing, because one bad entry makes hivemind drop the whole dictionary it lies in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import BugError, Unreachable, Violation
from swarm.ids import PeerId, RunId
from swarm.network.addresses import split_peer
from swarm.network.attach import AttachedP2P
from swarm.network.guard import install
from swarm.network.lean import spare_init
from swarm.network.protocols import RecordT
from swarm.network.records import (
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    decode_record,
    encode_record,
    is_sealed_by,
    key_name,
    lifetime_problem,
    opened,
    seal,
    unwrap,
)
from swarm.schema import Record
from swarm.security.signing import SIGNATURE_BYTES, PrivateIdentity

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.utils.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

_REPLY_S = 2.0
_OPERATION_S = 10.0
_REMEMBERED = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """``kinds`` are all record types of the run: records of any other are refused. ``bootstrap`` addresses name
    peers."""

    run: RunId
    kinds: Sequence[type[Record]]
    bootstrap: Sequence[Multiaddr] = ()


class DHTDirectory:
    """Implements :class:`~swarm.network.protocols.Directory`. Made by :meth:`open`; every operation ends within
    seconds."""

    def __init__(self, node: Any, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock) -> None:
        self._node = node
        self._config = config
        self._owner = identity.peer
        self._clock = clock
        self._bootstrap = {split_peer(address)[1] for address in config.bootstrap} - {identity.peer}
        self._expiry: dict[str, float] = {}
        self._lost = False

    @classmethod
    async def open(
        cls, p2p: AttachedP2P, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock
    ) -> DHTDirectory:
        """Join the run's directory, or begin it. Bootstrap peers that do not answer are asked again at every
        operation."""
        install()
        node = await DHTNode.create(
            p2p,
            node_id=DHTID.generate(source=f"{config.run}/{identity.peer}"),
            wait_timeout=_REPLY_S,
            cache_locally=False,  # a record's age must be its owner's, not a cache's
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            blacklist_time=2.0,
            backoff_rate=1.0,
            record_validator=RecordValidator(config, identity, clock),
        )
        self = cls(node, config, identity, clock)
        await self._rejoin()
        return self

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`. A record never expires before the one it replaces: nodes
        keep the later date. Raises BugError for a ``ttl_s`` above 120 or a kind that is not of this run."""
        key = self._key(type(record))
        if not 0 < ttl_s <= MAX_TTL_S:
            raise BugError(f"a record's ttl_s is within (0, {MAX_TTL_S:g}], not {ttl_s!r}")
        expiry = max(self._clock.wall() + ttl_s, self._expiry.get(key, 0.0) + 1e-3)
        body = encode_record(record)
        await self._rejoin()
        stored = await self._bounded(self._node.store(key, body, expiry, subkey=str(self._owner)))
        if not stored:
            raise Unreachable("no node of the directory stored our record")
        self._expiry[key] = expiry

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`. Asks the nodes nearest to the key, never a cache. Raises
        Unreachable when our daemon is gone or nothing answers in time."""
        key = self._key(kind)
        await self._rejoin()
        found = await self._bounded(self._node.get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        now = self._clock.wall()
        records: dict[PeerId, RecordT] = {}
        for owner, entry in found.value.items():
            with contextlib.suppress(Violation):
                if entry.expiration_time > now and not lifetime_problem(entry.expiration_time, now):
                    records[PeerId(owner)] = decode_record(kind, entry.value)
        return records

    def lose(self) -> None:
        """The daemon is gone: every operation fails from now on, also where hivemind would report a local success."""
        self._lost = True

    async def close(self) -> None:
        """Leave. Our records expire by themselves."""
        await self._node.shutdown()

    def _key(self, kind: type[Record]) -> str:
        if kind not in self._config.kinds:
            raise BugError(f"{kind.__name__} is not a record of this run's directory")
        return key_name(self._config.run, kind)

    async def _rejoin(self) -> None:
        """Greet bootstrap peers we do not know (any more), so that one that came late, or came back, joins us up.

        hivemind greets them once, at a node's making, and there alone.
        """
        protocol = self._node.protocol
        peers = [PeerID.from_base58(peer) for peer in sorted(self._bootstrap)]
        strangers = [peer for peer in peers if protocol.routing_table.get(peer_id=peer) is None]
        if not strangers or self._lost:
            return
        answers = await self._bounded(asyncio.gather(*(protocol.call_ping(peer) for peer in strangers)))
        if any(answer is not None for answer in answers):
            await asyncio.sleep(0)  # hivemind enters who answered into its table in a task of its own
            await self._bounded(self._node.find_nearest_nodes([self._node.node_id]))

    async def _bounded(self, operation: Any) -> Any:
        if self._lost:
            operation.close()
            raise Unreachable("our libp2p daemon is gone")
        try:
            async with asyncio.timeout(_OPERATION_S):
                result = await operation
        except TimeoutError as error:
            raise Unreachable(f"the directory did not answer in {_OPERATION_S:g} s") from error
        if self._lost:
            raise Unreachable("our libp2p daemon is gone")
        return result


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Signs ours, and says whether anyone's may be stored or believed. Verified signatures are remembered."""

    def __init__(self, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock) -> None:
        self._identity = identity
        self._clock = clock
        self._kinds = {DHTID.generate(source=key_name(config.run, kind)).to_bytes(): kind for kind in config.kinds}
        self._verified: OrderedDict[tuple[bytes, bytes, bytes, float], None] = OrderedDict()

    def sign_value(self, record: Any) -> bytes:
        """Our record's value with our signature before it."""
        return seal(self._identity, record.key, record.expiration_time, record.value)

    def strip_value(self, record: Any) -> bytes:
        """A validated value without its signature."""
        return opened(record.value)

    def validate(self, record: Any) -> bool:
        """Whether key, owner, lifetime, signature and body are all right."""
        problem = self.problem(record)
        if problem:
            logger.debug("a directory record was refused: %s", problem)
        return not problem

    def problem(self, record: Any) -> str:
        """Why a record is refused, or nothing. Cheap checks first, the signature last."""
        kind = self._kinds.get(record.key)
        if kind is None:
            return "no key of this run"
        if type(record.value) is not bytes or len(record.value) > MAX_RECORD_BYTES + SIGNATURE_BYTES + 8:
            return "too large"
        late = lifetime_problem(record.expiration_time, self._clock.wall())
        if late:
            return late
        identity = (record.key, record.subkey, record.value, record.expiration_time)
        if identity in self._verified:
            self._verified.move_to_end(identity)
            return ""
        return self._inspect(kind, record) or self._remember(identity)

    def _inspect(self, kind: type[Record], record: Any) -> str:
        owner = _owner(record.subkey)
        if owner is None:
            return "no owner"
        try:
            decode_record(kind, unwrap(opened(record.value)))
        except Violation as violation:
            return violation.reason
        return "" if is_sealed_by(owner, record.key, record.expiration_time, record.value) else "forged"

    def _remember(self, identity: tuple[bytes, bytes, bytes, float]) -> str:
        self._verified[identity] = None
        if len(self._verified) > _REMEMBERED:
            self._verified.popitem(last=False)
        return ""


def raw_record(key: str, owner: str, value: bytes, expiry: float) -> Any:
    """A directory entry as hivemind's validators get it."""
    return DHTRecord(DHTID.generate(source=key).to_bytes(), MSGPackSerializer.dumps(owner), value, expiry)


def _owner(subkey: Any) -> PeerId | None:
    """The peer in a subkey: one msgpack string, and no other spelling of it."""
    if type(subkey) is not bytes or not 0 < len(subkey) <= 80:
        return None
    try:
        owner = MSGPackSerializer.loads(subkey)
    except ValueError:
        return None
    if type(owner) is not str or MSGPackSerializer.dumps(owner) != subkey:
        return None
    return PeerId(owner)
