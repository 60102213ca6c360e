"""Multiaddrs as people write them: parsed, checked and explained before anything slow is imported.

hivemind has a ``Multiaddr`` class of its own whose bytes and equality differ from this library's; addresses cross that
border as text only.
"""

from __future__ import annotations

from ipaddress import ip_address

import multiaddr
from multiaddr import Multiaddr

from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.security.signing import public_key_of

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
"""Where a peer listens when nothing else is said: this machine only, any free port."""

_EXAMPLE = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooW…"
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_UNSUPPORTED = ("webrtc", "webrtc-direct", "webtransport", "ws", "wss", "unix", "onion", "onion3")


def parse_address(text: str, *, key: str = "address", peer: bool = True, any_port: bool = False) -> Multiaddr:
    """The multiaddr a person wrote, checked.

    ``peer`` demands the ``/p2p/<peer id>`` at the end (an address to dial); without it the address must not have one
    (an address to listen on). ``any_port`` allows port 0. The old ``/ipfs/`` spelling of ``/p2p/`` is rewritten.
    Raises ConfigError, whose message names ``key``, the value, what is allowed and what to do.
    """
    if not text.strip():
        raise ConfigError(
            key, text, f"a multiaddr such as {_EXAMPLE}", "Copy one that another peer printed at its start."
        )
    try:
        address = Multiaddr(text.strip().replace("/ipfs/", "/p2p/"))
        names = [protocol.name for protocol in address.protocols()]
    except (ValueError, LookupError, multiaddr.exceptions.Error) as error:
        raise ConfigError(key, text, f"a multiaddr such as {_EXAMPLE}", f"{error}; check the spelling.") from error
    _check_transport(key, text, address, names, any_port)
    _check_peer(key, text, address, peer)
    return address


def split_peer(address: Multiaddr) -> tuple[Multiaddr, PeerId]:
    """The address without its final ``/p2p`` part, and that peer. Raises ValueError when it has none.

    A relayed address ``/p2p/R/p2p-circuit/p2p/T`` gives T: the target, not the relay.
    """
    target = address.get_peer_id()
    if target is None:
        raise ValueError(f"{address} names no peer")
    return address.decapsulate(Multiaddr(f"/p2p/{target}")), PeerId(target)


def is_loopback(address: Multiaddr) -> bool:
    """Whether the address can only be reached from this machine."""
    for name in ("ip4", "ip6"):
        try:
            return ip_address(str(address.value_for_protocol(name))).is_loopback
        except LookupError:
            continue
    return False


def _check_transport(key: str, text: str, address: Multiaddr, names: list[str], any_port: bool) -> None:
    foreign = [name for name in names if name in _UNSUPPORTED]
    if foreign:
        raise ConfigError(
            key, text, "tcp, or udp with quic-v1", f"/{foreign[0]} cannot be used here; give a TCP address."
        )
    if not names or (names[0] not in _HOSTS and names[0] != "p2p"):
        raise ConfigError(
            key, text, f"an address that begins with one of {', '.join(_HOSTS)}", f"Write it like {_EXAMPLE}."
        )
    if names[0] in ("dnsaddr", "p2p"):
        return
    transport = "tcp" if "tcp" in names else "udp" if "quic-v1" in names or "quic" in names else None
    if transport is None:
        raise ConfigError(key, text, "a tcp port, or udp with quic-v1", f"Write it like {_EXAMPLE}.")
    if not any_port and str(address.value_for_protocol(transport)) == "0":
        raise ConfigError(
            key, text, "a port from 1 to 65535", "Port 0 means 'any' and cannot be dialled; give the real port."
        )


def _check_peer(key: str, text: str, address: Multiaddr, wanted: bool) -> None:
    target = address.get_peer_id()
    if wanted and target is None:
        raise ConfigError(
            key, text, "an address that ends in /p2p/<peer id>", "Copy the whole line the other peer printed."
        )
    if not wanted and target is not None:
        raise ConfigError(
            key, text, "an address without /p2p/", "Our own peer id is added by itself; remove that part."
        )
    if target is not None and public_key_of(PeerId(target)) is None:
        raise ConfigError(
            key, text, "the peer id of an Ed25519 key (12D3KooW…)", "Copy it again; other key types are not used."
        )
