"""What may be stored in the directory, or believed: a record by its key, owner, lifetime, signature and body."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from swarm.clock import Clock
from swarm.errors import Violation
from swarm.ids import PeerId, RunId
from swarm.network.guard import MAX_ENTRIES
from swarm.network.lean import spare_init
from swarm.network.records import (
    MAX_RECORD_BYTES,
    decode_record,
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
