"""Ed25519 identities as libp2p names them, signatures, and the receipts that replicas sign.

A peer id *is* the public key, so a signature needs no directory. The encodings are those of the libp2p peer-id
specification: a key is a two-field protobuf (type, data), a peer id is the base58 of an identity multihash over the
public key's protobuf (``12D3KooW…``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.ids import JourneyKey, PeerId

Verify = Callable[[PeerId, bytes, bytes], bool]
"""Says whether what comes last is a peer's signature under these bytes."""

SIGNATURE_BYTES = 64
PRIVATE_KEY_BYTES = 68
"""Length of a private key's protobuf."""

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_INDEX = {character: value for value, character in enumerate(_ALPHABET)}
# Protobuf field 1 (type) = 1 (Ed25519), field 2 (data) with its length: 64 bytes private, 32 bytes public.
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
# Identity multihash (code 0) of the 36 bytes of a public key's protobuf.
_MULTIHASH_PREFIX = bytes([0x00, 0x24])
_MAX_TEXT = 64


class PrivateIdentity:
    """One peer's key: its name, and what only it can do. Never printed, never sent."""

    __slots__ = ("_key", "peer")

    def __init__(self, seed: bytes) -> None:
        """``seed`` is the 32 secret bytes. Raises ValueError for another length."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer: PeerId = peer_of(self._key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> PrivateIdentity:
        """A fresh identity from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_protobuf(cls, data: bytes) -> PrivateIdentity:
        """Decode a libp2p private key. Raises ValueError when it is not Ed25519 or its halves do not belong
        together."""
        if len(data) != PRIVATE_KEY_BYTES or not data.startswith(_PRIVATE_PREFIX):
            raise ValueError("not the libp2p protobuf of an Ed25519 private key")
        seed, public = data[4:36], data[36:]
        identity = cls(seed)
        if identity.peer != peer_of(public):
            raise ValueError("the public half does not belong to the private half")
        return identity

    def to_protobuf(self) -> bytes:
        """The libp2p private key: type, then seed and public key."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """64 bytes that :func:`verify` accepts for this peer and exactly this data."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"PrivateIdentity({self.peer})"


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Return whether ``peer`` signed ``data``. False, never an error, for a malformed peer id or signature. About 0.1
    ms."""
    public = public_key_of(peer)
    if public is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Signing:
    """One peer's signature, and how those of all are verified."""

    sign: Callable[[bytes], bytes]
    verify: Verify = verify


def peer_of(public: bytes) -> PeerId:
    """The peer id of a raw 32-byte public key. Raises ValueError for another length."""
    if len(public) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public)}")
    return PeerId(_base58_encode(_MULTIHASH_PREFIX + _PUBLIC_PREFIX + public))


def public_key_of(peer: PeerId) -> bytes | None:
    """The raw public key inside a peer id, or None when it is not the canonical id of an Ed25519 key."""
    raw = _base58_decode(peer)
    prefix = _MULTIHASH_PREFIX + _PUBLIC_PREFIX
    if raw is None or len(raw) != len(prefix) + 32 or not raw.startswith(prefix):
        return None
    return raw[len(prefix) :]


def _base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    leading_zeros = len(data) - len(data.lstrip(b"\0"))
    return _ALPHABET[0] * leading_zeros + "".join(reversed(digits))


def _base58_decode(text: str) -> bytes | None:
    if not 0 < len(text) <= _MAX_TEXT:  # before the arithmetic, whose cost is quadratic in the length
        return None
    number = 0
    for character in text:
        digit = _INDEX.get(character)
        if digit is None:
            return None
        number = number * 58 + digit
    leading_zeros = len(text) - len(text.lstrip(_ALPHABET[0]))
    return b"\0" * leading_zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


# --- receipts --------------------------------------------------------------------------------------------------------
# Replicas sign for the work they did, so that a trainer cannot invent it.


def receipt_bytes(run: str, key: JourneyKey, stage: int, digest: bytes, tokens: int = 0) -> bytes:
    """Return what a replica signs when it adds a microbatch's gradient to its open step, in whichever attempt.

    It counts after the record ``key.after`` only, for the ``digest`` of what was got and sent (see
    :mod:`swarm.pipeline.seals`), and with the ``tokens`` of the replica that computes the loss (0 of others).
    """
    fields = ("receipt", run, key.step, key.after, *key.microbatch, stage, tokens, digest.hex())
    return "|".join(map(str, fields)).encode()


def route_bytes(run: str, key: JourneyKey, route: Sequence[str]) -> bytes:
    """Return what a trainer signs when it chooses a route for one attempt at a microbatch."""
    fields = ("route", run, key.step, key.after, *key.microbatch, key.attempt, *route)
    return "|".join(map(str, fields)).encode()


def seal_bytes(run: str, key: JourneyKey, hop: int, direction: str, hashed: bytes) -> bytes:
    """Return what a peer signs when it sends a tensor with this hash to the stage ``hop``, in whichever attempt of one
    way."""
    fields = ("sends", run, key.step, key.after, *key.microbatch, key.way, hop, direction, hashed.hex())
    return "|".join(map(str, fields)).encode()


def audit_bytes(run: str, key: JourneyKey, hop: int, accused: str, receipt: bytes, wrong: bool) -> bytes:
    """Return what a replica signs that computed the stage ``hop`` of a microbatch again, in whichever attempt.

    It found that what ``accused`` told of it with this very ``receipt`` is ``wrong`` or right. Else who signs a second
    one, of other tokens, could have two judges contradict each other.
    """
    verdict = "wrong" if wrong else "right"
    fields = ("audit", run, key.step, key.after, *key.microbatch, hop, accused, receipt.hex(), verdict)
    return "|".join(map(str, fields)).encode()


def averaging_bytes(run: str, step: int, after: str, part: str, accused: str, wrong: bool) -> bytes:
    """Return what a replica signs that proved for itself what ``accused`` did when ``part`` was averaged in a step, in
    whichever attempt: that was ``wrong`` or right. It counts after the record ``after`` only."""
    fields = ("averaging", run, step, after, part, accused, "wrong" if wrong else "right")
    return "|".join(map(str, fields)).encode()
