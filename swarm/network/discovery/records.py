"""Records of peers about themselves in the directory, and the checks of such a record.

A record is a hint, never a proof of state; but who said it, about whom and until when is certain: the owner signs key,
subkey, expiry and body, and nobody, honest or not, can be made to keep it longer than :data:`MAX_TTL_S`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from pydantic import Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer

from swarm import WIRE_VERSION
from swarm.errors import BugError, Violation
from swarm.ids import PeerId, RunId
from swarm.network.rpc.bodies import decode, pack, unpack
from swarm.schema import BesideField, Count, MachineField, NameField, PartField, Record, RegionField
from swarm.security.credentials import Credential
from swarm.security.signing import SIGNATURE_BYTES, PrivateIdentity, verify

MAX_TTL_S = 120.0
MAX_SKEW_S = 10.0
"""How far two clocks may differ. A record that expired by less is still passed on (never returned), one that would
live longer by less is still taken: a dictionary is stored whole or not at all, so one record at the edge must not
spoil it."""

LONGEST_S = MAX_TTL_S + MAX_SKEW_S
"""An expiry date that is further away than this is not believed."""

MAX_RECORD_BYTES = 4096

RecordT = TypeVar("RecordT", bound=Record)

AddressText = Annotated[str, StringConstraints(min_length=4, max_length=256, pattern=r"^/[!-~]+$")]


class PeerRecord(Record):
    """A peer's identity, region, addresses and part.

    ``incarnation`` grows with every start of the same identity: of two records the higher one is the living process.
    ``stage`` and ``choice`` are its wish (:class:`~swarm.consensus.placement.Wish`). ``unfit``: the stages whose
    training its memory does not hold, as it says while it waits for the run to begin (:func:`bits_of`). ``credential``
    is there in a run that not everybody may join.
    """

    kind: ClassVar[str] = "peer"

    role: Literal["bootstrap", "stage", "trainer"]
    name: NameField
    stage: Annotated[int, Field(ge=0, lt=512)] | None = None
    part: PartField | None = None
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=8)] = ()
    incarnation: Count
    status: Literal["waiting", "ready", "draining", "gone"]
    step: Count
    region: RegionField = ""
    outgoing: bool = False
    beside: BesideField = ()
    machine: MachineField = ""
    unfit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,128}$")] = ""
    choice: Annotated[int, Field(ge=0, lt=64)] | None = None
    credential: Credential | None = None
    wire: Literal[2] = WIRE_VERSION

    @model_serializer(mode="wrap")
    def _as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Peers of before know nothing of these fields, which are left out where they say nothing."""
        plain: dict[str, Any] = dump(self)
        return {
            key: value
            for key, value in plain.items()
            if value not in (None, "", (), []) or key not in ("beside", "machine", "unfit", "choice", "credential")
        }


def bits_of(stages: Iterable[int]) -> str:
    """Return numbers below 512 as the bits of a hex number, "" for none: a record has little room."""
    bits = sum(1 << stage for stage in set(stages))
    return f"{bits:x}" if bits else ""


def numbers_in(bits: str) -> tuple[int, ...]:
    """Return the numbers that :func:`bits_of` was given, ascending."""
    found = int(bits or "0", 16)
    return tuple(number for number in range(found.bit_length()) if found >> number & 1)


def key_name(run: RunId, kind: type[Record]) -> str:
    """The directory key under which all records of a kind lie, by owner."""
    return f"{run}/{kind.kind}/{WIRE_VERSION}"


def encode_record(record: Record) -> bytes:
    """A record's body. Raises Violation when it is larger than MAX_RECORD_BYTES."""
    body = pack(record.to_wire())
    if len(body) > MAX_RECORD_BYTES:
        raise Violation(f"a record of {len(body)} bytes exceeds the limit of {MAX_RECORD_BYTES}")
    return body


def decode_record(kind: type[RecordT], body: bytes) -> RecordT:
    """The record in a body. Raises Violation for anything but exactly one record of that kind."""
    if len(body) > MAX_RECORD_BYTES:
        raise Violation(f"a record of {len(body)} bytes exceeds the limit of {MAX_RECORD_BYTES}")
    return decode(kind, unpack(body))


def expiry_of(now: float, ttl_s: float, before: float) -> float:
    """Return the expiry of a record that is announced at ``now``: never before that of the one it replaces, at
    ``before``, for nodes keep the later date; but after our clock was set back as late as anybody will believe. Raises
    BugError for a ``ttl_s`` that is not above 0 or above 120."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise BugError(f"a record's ttl_s is within (0, {MAX_TTL_S:g}], not {ttl_s!r}")
    return min(max(now + ttl_s, before + 1e-3), now + LONGEST_S)


def lifetime_problem(expiry: Any, now: float) -> str:
    """Return why an expiry date (seconds since the epoch) cannot be accepted at ``now``, or nothing."""
    if type(expiry) is not float or not math.isfinite(expiry):
        return "no expiry date"
    if expiry > now + LONGEST_S:
        return "lives too long"
    return "expired" if expiry < now - MAX_SKEW_S else ""


def seal(identity: PrivateIdentity, key: bytes, expiry: float, value: bytes) -> bytes:
    """A directory value: the signature, then what it signs apart from key, owner and expiry."""
    return identity.sign(_signed(key, identity.peer, expiry, value)) + value


def opened(value: bytes) -> bytes:
    """A sealed value without its signature."""
    return value[SIGNATURE_BYTES:]


def is_sealed_by(owner: PeerId, key: bytes, expiry: float, value: bytes) -> bool:
    """Return whether ``owner`` sealed this value under this key with this expiry."""
    return verify(owner, _signed(key, owner, expiry, opened(value)), value[:SIGNATURE_BYTES])


def wrap(body: bytes) -> bytes:
    """A body as hivemind's serializer writes it (one msgpack byte string)."""
    wrapped: bytes = msgpack.packb(body, use_bin_type=True)
    return wrapped


def unwrap(value: bytes) -> bytes:
    """The body again. Raises Violation when the value is not exactly one msgpack byte string."""
    body = unpack(value)
    if type(body) is not bytes or wrap(body) != value:
        raise Violation("not a record's value")
    return body


def _signed(key: bytes, owner: PeerId, expiry: float, value: bytes) -> bytes:
    parts = (b"swarm record 1", key, owner.encode(), struct.pack(">d", expiry), value)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)
