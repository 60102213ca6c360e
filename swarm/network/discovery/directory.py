"""The directory over hivemind's ``DHTNode``: records by kind, one subkey per owner, and their validator.

The same validator stands at every door: what others store here, what others answer, and what we store ourselves. It is
strict at storing, because one bad entry makes hivemind drop the whole dictionary it lies in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.errors import BugError, Unreachable, Violation
from swarm.ids import PeerId, RunId
from swarm.network.addresses import split_peer
from swarm.network.discovery.record_cache import Attests, RecordCache, with_cache
from swarm.network.discovery.records import (
    MAX_RECORD_BYTES,
    decode_record,
    encode_record,
    expiry_of,
    is_sealed_by,
    key_name,
    lifetime_problem,
    opened,
    seal,
    unwrap,
)
from swarm.network.libp2p.attach import LINK_ERRORS, AttachedP2P
from swarm.network.libp2p.guard import MAX_ENTRIES, install
from swarm.network.libp2p.lean import spare_init
from swarm.network.protocols import RecordT
from swarm.schema import Record
from swarm.security.signing import SIGNATURE_BYTES, PrivateIdentity

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

ResultT = TypeVar("ResultT")

_REPLY_S = 2.0
_OPERATION_S = 10.0


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
        self._announced: dict[str, tuple[Record, float]] = {}
        self._known: set[PeerId] = set()
        self._losses = 0
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._up.set()

    @classmethod
    async def open(
        cls, p2p: AttachedP2P, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock
    ) -> DHTDirectory:
        """Join the run's directory, or begin it. Bootstrap peers that do not answer are asked again at every
        operation. Raises Unreachable when our daemon dies over it."""
        install()
        try:
            node = await cls._make_node(p2p, config, identity, clock)
        except LINK_ERRORS as error:
            raise Unreachable(f"the directory could not be entered: {str(error) or type(error).__name__}") from error
        self = cls(node, config, identity, clock)
        await self._rejoin()
        return self

    @staticmethod
    async def _make_node(p2p: AttachedP2P, config: DirectoryConfig, identity: PrivateIdentity, clock: Clock) -> Any:
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
            record_validator=RecordValidator(config.run, config.kinds, identity, clock),
        )
        with_cache(node.protocol)
        return node

    def admit(self, attests: Attests) -> None:
        """Keep from now on what peers say of themselves for whom ``attests(peer, credential)`` answers, and of others
        little (:class:`~swarm.network.discovery.record_cache.RecordCache`)."""
        cache: RecordCache = self._node.protocol.storage
        cache.admit(attests)

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`. Raises BugError for a ``ttl_s`` above 120 or a kind that is
        not of this run."""
        key = self._key(type(record))
        expiry = expiry_of(self._clock.wall(), ttl_s, self._expiry.get(key, 0.0))
        body = encode_record(record)
        await self._rejoin()
        stored = await self._bounded(lambda: self._node.store(key, body, expiry, subkey=str(self._owner)))
        # hivemind tells what the node said that answered last, and that may be the only one that is full, or hostile.
        if not stored and not await self._is_kept(key, expiry):
            raise Unreachable("no node of the directory stored our record")
        self._expiry[key] = expiry
        self._announced[key] = record, ttl_s

    async def _is_kept(self, key: str, expiry: float) -> bool:
        found = await self._bounded(lambda: self._node.get(key, latest=True))
        kept = found.value.get(str(self._owner)) if found is not None and isinstance(found.value, dict) else None
        return kept is not None and bool(kept.expiration_time >= expiry)

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`. Asks the nodes nearest to the key, never a cache. Raises
        Unreachable when our daemon is gone or nothing answers in time."""
        key = self._key(kind)
        await self._rejoin()
        found = await self._bounded(lambda: self._node.get(key, latest=True))
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
        """The daemon is gone: what is under way fails, also where hivemind would report a local success, and what is
        asked from now on waits for :meth:`resume`."""
        self._losses += 1
        self._up.clear()
        # Failed calls strike these from hivemind's table; bootstrap peers alone may all have left the run since.
        self._known |= {PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.peer_id_to_uid}

    async def resume(self, refreshed: Callable[[Record], Record]) -> None:
        """A new daemon serves: greet everybody known before, who takes us back into his table by that, and announce
        our records again, each as ``refreshed`` gives it. What others stored with us is still there. Nobody needs to
        answer. Ends within seconds."""
        self._up.set()
        known = {*self._known, *self._bootstrap}
        with contextlib.suppress(Unreachable):
            await self._bounded(lambda: self._greet(sorted(known)))
            self._known.clear()
        for record, ttl_s in list(self._announced.values()):
            with contextlib.suppress(Unreachable):
                await self.announce(refreshed(record), ttl_s=ttl_s)

    async def close(self) -> None:
        """Leave; what waits fails. Our records expire by themselves."""
        self._closed = True
        self._up.set()
        await self._node.shutdown()

    async def ended(self) -> None:
        """Until nothing of it runs any more: moments after its client of the daemon was detached."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _begun(self, operation: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """The operation as a task that the one who waits for it leaves alone: hivemind's searches leave tasks behind
        when they are cancelled. Each of its calls ends within 2 s."""
        task = asyncio.get_running_loop().create_task(operation, name="directory")
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its caller may have gone

    def _key(self, kind: type[Record]) -> str:
        if kind not in self._config.kinds:
            raise BugError(f"{kind.__name__} is not a record of this run's directory")
        return key_name(self._config.run, kind)

    async def _rejoin(self) -> None:
        """Greet bootstrap peers we do not know (any more), so that one that came late, or came back, joins us up.

        hivemind greets them once, at a node's making, and there alone.
        """
        table = self._node.protocol.routing_table
        strangers = [peer for peer in sorted(self._bootstrap) if table.get(peer_id=PeerID.from_base58(peer)) is None]
        if strangers:
            await self._bounded(lambda: self._greet(strangers))

    async def _greet(self, peers: Sequence[PeerId]) -> None:
        protocol = self._node.protocol
        answers = await asyncio.gather(*(protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))
        if any(answer is not None for answer in answers):
            await asyncio.sleep(0)  # hivemind enters who answered into its table in a task of its own
            await self._node.find_nearest_nodes([self._node.node_id])

    async def _bounded(self, operate: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """An operation on the node, once a daemon serves. Raises Unreachable when that takes too long, or the daemon
        died over it."""
        try:
            async with asyncio.timeout(_OPERATION_S):
                await self._up.wait()
                if self._closed:
                    raise Unreachable("this endpoint is closing")
                losses = self._losses
                result = await asyncio.shield(self._begun(operate()))
        except TimeoutError as error:
            raise Unreachable(f"the directory did not answer in {_OPERATION_S:g} s") from error
        if losses != self._losses:
            raise Unreachable("our libp2p daemon died over it")
        return result


# --- record validator ------------------------------------------------------------------------------------------------
# Checks a record's key, owner, lifetime, signature and body before it is stored or believed.


spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.crypto import RecordValidatorBase
    from hivemind.dht.routing import DHTID
    from hivemind.utils.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

_REMEMBERED = 4 * MAX_ENTRIES
"""More than one look at a full value takes: it would otherwise find none of its signatures verified before."""


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Signs ours, and says whether anyone's may be stored or believed. Verified signatures are remembered."""

    def __init__(self, run: RunId, kinds: Sequence[type[Record]], identity: PrivateIdentity, clock: Clock) -> None:
        self._identity = identity
        self._clock = clock
        self._kinds = {DHTID.generate(source=key_name(run, kind)).to_bytes(): kind for kind in kinds}
        self._verified: OrderedDict[tuple[bytes, bytes, bytes, float], None] = OrderedDict()

    def sign_value(self, record: Any) -> bytes:
        """Our record's value with our signature before it."""
        return seal(self._identity, record.key, record.expiration_time, record.value)

    def strip_value(self, record: Any) -> bytes:
        """A validated value without its signature."""
        return opened(record.value)

    def validate(self, record: Any) -> bool:
        """Return whether key, owner, lifetime, signature and body are all right."""
        problem = self.problem(record)
        if problem:
            logger.debug("a directory record was refused: %s", problem)
        return not problem

    def problem(self, record: Any) -> str:
        """Return why a record is refused, or nothing. Cheap checks first, the signature last."""
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
