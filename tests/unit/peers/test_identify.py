"""Who listens at an address, found out by the certificate with which a peer answers a handshake."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from peers.doctor.contacts import no_relay, peer_behind, probe_addresses
from peers.reaching import nobody_answers
from swarm.network.addresses import GREETING, parse_address
from swarm.network.endpoint import EndpointConfig
from swarm.security.signing import PrivateIdentity, public_key_of

THERE, OTHER = (PrivateIdentity(bytes([number]) * 32) for number in (1, 2))
TLS = b"\x0b/tls/1.0.0\n"
BEGIN = datetime(2020, 1, 1, tzinfo=UTC)


def certificate(
    attested: PrivateIdentity = THERE, signer: PrivateIdentity = THERE, more: str = ""
) -> tuple[bytes, bytes]:
    """A libp2p certificate for ``attested`` that ``signer`` signed, with the key it is for: both as PEM; ``more`` is
    the number of another extension in it."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    public = b"\x08\x01\x12\x20" + (public_key_of(attested.peer) or b"")
    value = b"\x30\x68\x04\x24" + public + b"\x04\x40" + signer.sign(b"libp2p-tls-handshake:" + own)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")])
    begun = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(BEGIN)
        .not_valid_after(BEGIN + timedelta(days=36_500))
        .add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1"), value), critical=True)
    )
    if more:
        begun = begun.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(more), value), critical=True)
    made = begun.sign(key, hashes.SHA256())
    return (made.public_bytes(Encoding.PEM), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


@contextlib.asynccontextmanager
async def listening(root: Path, said: tuple[bytes, bytes], answer: bytes = TLS) -> AsyncIterator[int]:
    """A libp2p listener with that certificate; yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = root / "certificate.pem"
    file.write_bytes(b"".join(said))
    context.load_cert_chain(file)

    async def on_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            writer.write(GREETING)
            assert await reader.readexactly(len(GREETING + TLS)) == GREETING + TLS
            writer.write(answer)
            await writer.start_tls(context)
            await reader.read()
        writer.close()

    async with await asyncio.start_server(on_call, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def at(port: int, peer: str) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def test_certificate_tells_the_peer_whose_key_attests_for_it() -> None:
    assert peer_behind(der(certificate()[0])) == THERE.peer


def test_certificate_that_another_key_signed_tells_nobody() -> None:
    assert peer_behind(der(certificate(attested=OTHER, signer=THERE)[0])) is None


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_bytes_that_are_no_certificate_tell_nobody(cut: int) -> None:
    assert peer_behind(der(certificate()[0])[:cut]) is None


def test_certificate_with_an_extension_twice_tells_nobody() -> None:
    made = der(certificate(more="1.3.6.1.4.1.53594.1.2")[0])
    assert peer_behind(made) == THERE.peer
    first, second = (bytes.fromhex(f"060a2b0601040183a25a01{number}") for number in ("01", "02"))
    twice = made.replace(second, first)
    assert twice.count(first) == 2
    with pytest.raises(x509.DuplicateExtension):
        _ = x509.load_der_x509_certificate(twice).extensions
    assert peer_behind(twice) is None


async def test_another_peer_at_an_address_is_told_with_its_id(tmp_path: Path) -> None:
    async with listening(tmp_path, certificate()) as port:
        (right,) = await probe_addresses([at(port, THERE.peer)])
        (wrong,) = await probe_addresses([at(port, OTHER.peer)])
    assert (right.answered, right.found) == ("peer", "")
    assert (wrong.answered, wrong.found, wrong.may_answer) == ("another", THERE.peer, False)
    error = no_relay([wrong])
    assert f"there is {THERE.peer}" in error.cause
    assert "who listens there has another id" in error.cause
    assert error.next.endswith(f"--through {at(port, THERE.peer)}")


async def test_who_does_not_say_who_it_is_is_dialled_all_the_same(tmp_path: Path) -> None:
    async with listening(tmp_path, certificate(), answer=b"\x03na\n" + b"." * 9) as port:
        (probe,) = await probe_addresses([at(port, OTHER.peer)])
    assert (probe.answered, probe.found) == ("peer", "")


async def test_peer_that_cannot_be_reached_as_another_is_there_is_told_so(tmp_path: Path) -> None:
    async with listening(tmp_path, certificate()) as port:
        config = EndpointConfig(run_dir=tmp_path, bootstrap=(parse_address(at(port, OTHER.peer)),))
        error: Any = await nobody_answers(config)
    assert f"has another id, {THERE.peer}" in str(error)
    assert at(port, THERE.peer) in error.remedy
