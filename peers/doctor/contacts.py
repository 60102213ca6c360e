"""Probe the addresses of an invite, before torch is there: is anybody there, is it a peer, and is it that one?

A libp2p listener greets anyone who connects, so one TCP connection tells a peer from another service, a closed port
from a firewall, and how long the way is. Then it is asked who it is: that is the id behind the certificate with which
it answers a libp2p handshake. Nobody is trusted for it, since the key of that id signed the certificate's own; and we
show no certificate, so that the handshake fails at the other side once we know.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from multiaddr import Multiaddr

from peers.console.words import GIVES_INVITE, NEW_INVITE, CommandError, command_name, short_address
from peers.doctor.results import CheckResult
from peers.exit_codes import EXIT_UNREACHABLE
from swarm.ids import PeerId
from swarm.network.addresses import GREETING, is_loopback, is_relayed, name_of, split_peer, tcp_port_of
from swarm.security.signing import peer_of

PROBE_S, WHO_S = 3.0, 1.5
"""For how long an address is tried, and, within that, who is there is asked."""
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_FAMILY = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

Answered = Literal["peer", "closed", "silent", "no route", "no name", "no peer", "another", "untried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressProbe:
    """What happened at one address: who ``answered``, after how many seconds, and the system's own words; ``found`` is
    who is there, where that is ``another`` peer than the address names."""

    address: str
    answered: Answered
    seconds: float = 0.0
    words: str = ""
    found: str = ""

    @property
    def corrected(self) -> str:
        """The address with the id of who is there; "" where that is not another one."""
        return f"{self.address.rpartition('/p2p/')[0]}/p2p/{self.found}" if self.found else ""

    @property
    def may_answer(self) -> bool:
        """Return whether it is worth dialling: what cannot be probed (QUIC, a name's records) may well answer."""
        return self.answered in ("peer", "untried")


async def probe_addresses(addresses: Sequence[str], *, within_s: float = PROBE_S) -> list[AddressProbe]:
    """Probe all of them at once. Ends within ``within_s`` seconds."""
    return list(await asyncio.gather(*(_probe(text, within_s) for text in addresses)))


async def _probe(text: str, within_s: float) -> AddressProbe:
    address = Multiaddr(text)
    kind = next((p.name for p in address.protocols() if p.name in _HOSTS), "")
    host = address.value_for_protocol(kind) if kind else None
    port = tcp_port_of(address)
    if host is None or port is None:
        return AddressProbe(address=text, answered="untried", words="no TCP address")
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, family=_FAMILY.get(kind, socket.AF_UNSPEC))
            took = loop.time() - began
            try:
                greeting = await reader.readexactly(len(GREETING))
                found = await _who(reader, writer, address) if greeting == GREETING else None
            finally:
                writer.close()
    except TimeoutError:
        return AddressProbe(address=text, answered="silent", words=f"no answer in {within_s:g} s")
    except EOFError:
        return AddressProbe(address=text, answered="no peer", words="it hung up")
    except OSError as error:
        return AddressProbe(address=text, answered=_answered(error), words=_words(error))
    if found is not None:
        return AddressProbe(address=text, answered="another", seconds=took, words=f"there is {found}", found=found)
    return AddressProbe(address=text, answered="peer" if greeting == GREETING else "no peer", seconds=took)


async def _who(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Multiaddr) -> str | None:
    """Return who is there, where that is another peer than the address names; None where it is that one, or does not
    say."""
    if is_relayed(address):
        return None
    with contextlib.suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(WHO_S):
            found = await identify(reader, writer)
            return None if found is None or found == split_peer(address)[1] else found
    return None


def _words(error: OSError) -> str:
    """The system's, without the address, which is said already; of an unknown name the resolver's."""
    named = error.errno in errno.errorcode and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno) if named and error.errno else error.strerror or str(error)


def _answered(error: OSError) -> Answered:
    if isinstance(error, socket.gaierror):
        return "no name"
    closed = (errno.ECONNREFUSED, errno.ECONNRESET)
    return "closed" if error.errno in closed else "silent" if error.errno == errno.ETIMEDOUT else "no route"


_CAUSES: dict[Answered, str] = {
    "closed": "the machine is there, and no peer listens at that port: it ended, or came back at another port",
    "silent": "nothing answers: the machine is off, or a firewall drops what comes",
    "no route": "this machine finds no way there",
    "no name": "the name has no address",
    "no peer": "something else than a peer listens there",
    "another": "who listens there has another id",
}
_CHECKS: dict[Answered, str] = {
    "closed": "does the peer of the invite still run? swarm status, on its machine",
    "silent": "is that machine on, and its port open in its firewall? Does this network let calls out to that port?",
    "no route": "is this machine on a network? ip route; of the same one, for private addresses?",
    "no name": "getent hosts NAME",
    "no peer": "is it the right invite? Another program may have taken the port since.",
    "another": "is it the right invite, and the right machine? swarm status shows there who runs",
}


def probe_relays(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Say, as (label, text), which of the relays that somebody named answer. Takes three seconds at most. Raises
    CommandError, exit code 3, when none does."""
    probes = asyncio.run(probe_addresses(addresses))
    if not any(probe.may_answer for probe in probes):
        raise no_relay(probes)
    return [
        ("relay", f"{short_address(probe.address)} answers after {1000 * probe.seconds:.3g} ms")
        if probe.may_answer
        else ("no relay", f"{short_address(probe.address)}: {probe.words or probe.answered}; it is asked again")
        for probe in probes
    ]


def no_relay(probes: Sequence[AddressProbe]) -> CommandError:
    """The error for relays none of which answers. Pure."""
    shown = ", ".join(f"{short_address(probe.address)} ({probe.words or probe.answered})" for probe in probes)
    kind = probes[0].answered
    return CommandError(
        f"no relay answers: {shown}: {_CAUSES[kind].replace('peer', 'relay')}",
        check=_RELAY_CHECKS[kind].replace("NAME", name_of(Multiaddr(probes[0].address)) or ""),
        next_=f"the same command, if that is the relay, with --through {corrected}"
        if (corrected := probes[0].corrected)
        else f"start one there: {command_name()} relay; then the same command, with the address that it prints",
        exit_code=EXIT_UNREACHABLE,
    )


_RELAY_CHECKS: dict[Answered, str] = {
    "closed": "does the relay run? swarm status, on its machine; is its port the one that it printed?",
    "silent": "is that machine on, and its port open in its firewall, and in its cloud's? Does this network let calls "
    "out to that port?",
    "no route": "is this machine on a network? ip route; and ip -6 route for an IPv6 address",
    "no name": "getent hosts NAME",
    "no peer": "is the port the one that the relay printed? Another program listens at this one.",
    "another": "is it, to its end, an address that the relay prints? swarm status, on its machine",
}


_NEXTS: dict[Answered, str] = {
    "silent": f"Have that port opened there (swarm new --port N), or ask another peer for an invite: {GIVES_INVITE}",
    "no route": f"Connect this machine, or ask for an invite with an address that it can reach: {GIVES_INVITE}",
    "no name": "Ask for an invite with an IP address: swarm new --announce /ip4/ADDRESS/tcp/N",
}


def judge_contacts(probes: Sequence[AddressProbe]) -> CheckResult:
    """Say whether any address of an invite answers, and why not. Pure."""
    said = {"addresses": [dataclasses.asdict(probe) for probe in probes]}
    there = [probe for probe in probes if probe.answered == "peer"]
    if there:
        quickest = min(there, key=lambda probe: probe.seconds)
        at = f"{short_address(quickest.address)} after {1000 * quickest.seconds:.3g} ms"
        way = ", through a relay" if is_relayed(Multiaddr(quickest.address)) else ""
        all_ = (
            f"{len(there)} of {len(probes)} addresses answer{way}: {at}" if len(probes) > 1 else f"answers{way}: {at}"
        )
        return CheckResult(name="contact", found=all_, facts=said)
    shown = ", ".join(f"{short_address(probe.address)} ({probe.words or probe.answered})" for probe in probes)
    if any(probe.may_answer for probe in probes):
        return CheckResult(name="contact", found=f"to be dialled: {shown}", facts=said)
    base = CheckResult(name="contact", found=f"nobody answers: {shown}", facts=said)
    outward = [probe for probe in probes if not is_loopback(Multiaddr(probe.address))]
    if outward:
        kind = outward[0].answered
        return base.fails(_CAUSES[kind], check=_CHECKS[kind], next_=_NEXTS.get(kind, NEW_INVITE))
    return base.fails(
        "the invite is of use on one machine only: that peer ended, or this is another machine",
        check="on the machine where the invite was made: swarm status",
        next_="Start a peer there that listens on all interfaces (--listen /ip4/0.0.0.0/tcp/0), and ask it for a new "
        f"invite: {GIVES_INVITE}",
    )


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
