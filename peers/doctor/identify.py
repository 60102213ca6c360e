"""Find out which peer listens at an address: the id behind the certificate with which it answers a libp2p handshake.

Nobody is trusted for it: the id is of the key that signed the certificate's own. We show no certificate, so that the
handshake fails at the other side once we know.
"""

from __future__ import annotations

import asyncio
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.ids import PeerId
from swarm.network.addresses import GREETING
from swarm.security.signing import peer_of

_TLS = b"\x0b/tls/1.0.0\n"
"""The handshake that is asked for, as multistream frames it; the other side repeats it where it takes part."""
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
"""What a libp2p certificate has the peer's key and its signature in."""
_SIGNED = b"libp2p-tls-handshake:"
_ED25519 = b"\x08\x01\x12\x20"
"""How a public key of that kind begins, of which 32 bytes follow."""
_KEY_BYTES, _SIGNATURE_BYTES = 36, 64


async def identify(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerId | None:
    """Return who is at the other end of a connection, whose greeting was read; None where it does not say so in this
    way. Takes two round trips, and as long as its caller lets it; ends the connection. Raises OSError and EOFError."""
    writer.write(GREETING + _TLS)
    if await reader.readexactly(len(_TLS)) != _TLS:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no authority signs peers: see peer_behind
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    await writer.start_tls(context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return None if certificate is None else peer_behind(certificate)


def peer_behind(certificate: bytes) -> PeerId | None:
    """Return the peer whose key attests this certificate (DER); None for a forged one, and for one of other
    kinds."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        found = parsed.extensions.get_extension_for_oid(_EXTENSION).value
        value = found.value if isinstance(found, x509.UnrecognizedExtension) else b""
        own = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception:  # noqa: BLE001 - a stranger made it, and the parser has many errors without a common base
        return None
    # SEQUENCE { OCTET STRING key, OCTET STRING signature }, both of known lengths, so that each has one byte of it
    head = bytes([0x30, _KEY_BYTES + _SIGNATURE_BYTES + 4, 0x04, _KEY_BYTES])
    between = bytes([0x04, _SIGNATURE_BYTES])
    key, rest = value[len(head) : len(head) + _KEY_BYTES], value[len(head) + _KEY_BYTES :]
    signature = rest[len(between) :]
    shaped = value.startswith(head + _ED25519) and rest.startswith(between) and len(signature) == _SIGNATURE_BYTES
    if not shaped:
        return None
    try:
        Ed25519PublicKey.from_public_bytes(key[len(_ED25519) :]).verify(signature, _SIGNED + own)
    except InvalidSignature:
        return None
    return peer_of(key[len(_ED25519) :])
