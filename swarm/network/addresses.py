"""Multiaddrs as people write them: parsed, checked and explained before anything slow is imported.

hivemind has a ``Multiaddr`` class of its own whose bytes and equality differ from this library's; addresses cross that
border as text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

import multiaddr
from multiaddr import Multiaddr

from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.security.signing import public_key_of

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
"""Where a peer listens when nothing else is said: this machine only, any free port."""

MAX_ADDRESSES = 8
"""How many a peer tells others: what fits into a record and is worth dialling."""

GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first on a TCP connection; other services on that port do not."""

_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "lxdbr", "vmnet", "vboxnet")
"""What the interfaces are called whose networks exist on one machine only, under the same address on many."""

_EXAMPLE = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooW…"
_NAMED = ("dns", "dns4", "dns6", "dnsaddr")
_HOSTS = ("ip4", "ip6", *_NAMED)
_RESERVED, _THIS_NETWORK = ip_network("240.0.0.0/4"), ip_network("0.0.0.0/8")
_UNSUPPORTED = ("webrtc", "webrtc-direct", "webtransport", "ws", "wss", "unix", "onion", "onion3")


Use = Literal["dial", "listen", "announce"]
"""What an address is for. One to dial ends in ``/p2p/<peer id>``, the others must not; one to listen on may be of all
of a machine's interfaces, and have port 0: any."""

_TRANSPORTS = (("tcp",), ("udp", "quic-v1"))
_DIRECT = {("dnsaddr",)} | {(host, *rest) for host in (*_HOSTS[:2], *_NAMED[:3]) for rest in _TRANSPORTS}
_SEQUENCES: dict[Use, set[tuple[str, ...]]] = {
    "dial": {(*way, *to) for way in _DIRECT for to in (("p2p",), ("p2p", "p2p-circuit", "p2p"))},
    "listen": _DIRECT - {("dnsaddr",)},
    "announce": _DIRECT,
}
"""The protocols of an address in their order: nothing else can be used."""
_PLACE, _PORT = "/ip4/, /ip6/, /dns4/, /dns6/ or /dns/ and a host", "/tcp/PORT or /udp/PORT/quic-v1"
_ALLOWED: dict[Use, str] = {
    "dial": f"{_PLACE}, {_PORT}, /p2p/PEER, and through a relay /p2p-circuit/p2p/PEER after that",
    "listen": f"/ip4/ or /ip6/ and an address of this machine, {_PORT}, and nothing after that",
    "announce": f"{_PLACE}, {_PORT}, and nothing after that",
}


def parse_address(text: str, *, key: str = "address", use: Use = "dial") -> Multiaddr:
    """The multiaddr a person wrote, checked. The old ``/ipfs/`` spelling of ``/p2p/`` is rewritten.

    Raises ConfigError, whose message names ``key``, the value, what is allowed for this use and what to do.
    """
    example = _example(text, use)
    if not text.strip():
        raise ConfigError(
            key, text, f"a multiaddr such as {example}", "Copy one that another peer printed at its start."
        )
    try:
        address = Multiaddr(text.strip().replace("/ipfs/", "/p2p/"))
        names = [protocol.name for protocol in address.protocols()]
    except (ValueError, LookupError, multiaddr.exceptions.Error) as error:
        remedy = "Write it like that." if example != _EXAMPLE else f"{error}; check the spelling."
        raise ConfigError(key, text, f"a multiaddr such as {example}", remedy) from error
    _check_transport(key, text, address, use, example)
    _check_peer(key, text, address, wanted=use == "dial")
    if tuple(names) not in _SEQUENCES[use]:
        raise ConfigError(key, text, _ALLOWED[use], f"Write it like {example}.")
    _check_host(key, text, address, use)
    return address


def told_address(text: str) -> Multiaddr | None:
    """Return an address that another peer tells, None where it could not be dialled."""
    try:
        return parse_address(text)
    except ConfigError:
        return None


def _example(text: str, use: Use) -> str:
    """Return what an address of this kind looks like: made of what was written, where that can be guessed."""
    if use == "dial":
        return _EXAMPLE
    if use == "announce":
        return "/ip4/192.0.2.7/tcp/4001"
    guess = re.fullmatch(r"\s*(?:(?P<host>[0-9.]*|\[[0-9a-fA-F:]*\]):)?(?P<port>[0-9]{1,5})\s*", text)
    host, port = (guess["host"] or "", guess["port"]) if guess else ("", "4001")
    if host.startswith("["):
        return f"/ip6/{host[1:-1]}/tcp/{port}"
    return f"/ip4/{host or '0.0.0.0'}/tcp/{port}"


def split_peer(address: Multiaddr) -> tuple[Multiaddr, PeerId]:
    """The address without its final ``/p2p`` part, and that peer. Raises ValueError when it has none.

    A relayed address ``/p2p/R/p2p-circuit/p2p/T`` gives T: the target, not the relay.
    """
    target = address.get_peer_id()
    if target is None:
        raise ValueError(f"{address} names no peer")
    return address.decapsulate(Multiaddr(f"/p2p/{target}")), PeerId(target)


def by_peer(addresses: Iterable[Multiaddr]) -> dict[PeerId, list[str]]:
    """Return the addresses of each peer, in the order in which they were given. Raises ValueError as split_peer."""
    found: dict[PeerId, list[str]] = {}
    for address in addresses:
        found.setdefault(split_peer(address)[1], []).append(str(address))
    return found


def is_loopback(address: Multiaddr) -> bool:
    """Return whether the address can only be reached from this machine: by its IP address, or as ``localhost`` (RFC
    6761, section 6.3)."""
    host, name = ip_of(address), (name_of(address) or "").rstrip(".").lower()
    return (host is not None and host.is_loopback) or name == "localhost" or name.endswith(".localhost")


def name_of(address: Multiaddr) -> str | None:
    """The domain name that it begins with, which is looked up whenever it is dialled; None for an IP address."""
    first = next(iter(address.protocols()), None)
    return str(address.value_for_protocol(first.name)) if first is not None and first.name in _NAMED else None


def is_relayed(address: Multiaddr) -> bool:
    """Return whether the address leads through another peer."""
    return any(protocol.name == "p2p-circuit" for protocol in address.protocols())


def ip_of(address: Multiaddr) -> IPv4Address | IPv6Address | None:
    """The IP address it begins with: of a relayed one, the relay's. None when it begins with a name."""
    for name in ("ip4", "ip6"):
        try:
            found = ip_address(str(address.value_for_protocol(name)))
        except LookupError:
            continue
        # A socket for both families sees IPv4 peers under mapped addresses.
        return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
    return None


def tcp_port_of(address: Multiaddr) -> int | None:
    """Its TCP port; None for QUIC, and for addresses through a relay."""
    if is_relayed(address):
        return None
    try:
        return int(str(address.value_for_protocol("tcp")))
    except LookupError:
        return None


def most_useful(addresses: Iterable[Multiaddr], virtual: Set[str] = frozenset()) -> tuple[Multiaddr, ...]:
    """At most 8 of a peer's addresses, each once, those first with which most others can reach it.

    In this order: through a relay (a peer has these only when it cannot be dialled itself), names and public
    addresses, addresses of private networks, ``virtual`` ones (of networks inside this machine), loopback; within each
    TCP before QUIC and IPv4 before IPv6. Addresses that nobody can dial (unspecified, link-local, multicast) are left
    out. One loopback address is always kept when there is one, for the peers on the same machine.
    """
    usable = {str(address): address for address in addresses if _usable(address)}
    ranked = sorted(usable.values(), key=lambda address: _rank(address, virtual))
    loopback = [address for address in ranked if is_loopback(address) and not is_relayed(address)]
    best = ranked[:MAX_ADDRESSES]
    if loopback and loopback[0] not in best:
        best[-1] = loopback[0]
    return tuple(best)


def virtual_ips() -> frozenset[str]:
    """The IP addresses of this machine's interfaces to networks of its own: containers, virtual machines."""
    import psutil  # only a running peer needs it

    return frozenset(
        each.address.partition("%")[0]
        for name, interface in psutil.net_if_addrs().items()
        if name.startswith(_VIRTUAL)
        for each in interface
    )


def machine_ips() -> frozenset[str]:
    """The IP addresses of all of this machine's interfaces: who calls from one of them is on it, too."""
    import psutil

    return frozenset(each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found)


def _usable(address: Multiaddr) -> bool:
    host = ip_of(address)
    return host is None or not (host.is_unspecified or host.is_link_local or host.is_multicast or host in _RESERVED)


def _rank(address: Multiaddr, virtual: Set[str]) -> tuple[int, bool, bool]:
    host = ip_of(address)
    if is_relayed(address):
        reach = 0
    elif host is None or host.is_global:
        reach = 1
    elif host.is_loopback:
        reach = 4
    else:
        reach = 3 if str(host) in virtual else 2
    return reach, tcp_port_of(address) is None, isinstance(host, IPv6Address)


def _check_transport(key: str, text: str, address: Multiaddr, use: Use, example: str) -> None:
    names = [protocol.name for protocol in address.protocols()]
    foreign = [name for name in names if name in _UNSUPPORTED]
    if foreign:
        raise ConfigError(
            key, text, "tcp, or udp with quic-v1", f"/{foreign[0]} cannot be used here; give a TCP address."
        )
    host = ip_of(address)
    if "ip6zone" in names or (isinstance(host, IPv6Address) and host.is_link_local):
        # Of use on one link only, and only with an interface's name, which differs from machine to machine.
        raise ConfigError(
            key, text, "an address of use on other links", "Give one of these: ip -6 address show scope global",
            why="fe80::/10 is of one link alone (link-local)",
        )  # fmt: skip
    if not names or names[0] not in _HOSTS:
        raise ConfigError(
            key, text, f"an address that begins with one of {', '.join(_HOSTS)}", f"Write it like {example}."
        )
    if names[0] == "dnsaddr":
        return
    transport = "tcp" if "tcp" in names else "udp" if {"udp", "quic-v1"} <= set(names) else None
    if transport is None:
        raise ConfigError(key, text, "a tcp port, or udp with quic-v1", f"Write it like {example}.")
    if use != "listen" and str(address.value_for_protocol(transport)) == "0":
        raise ConfigError(
            key, text, "a port from 1 to 65535", "Port 0 means 'any' and cannot be dialled; give the real port."
        )


def _check_host(key: str, text: str, address: Multiaddr, use: Use) -> None:
    host = ip_of(address)
    if host is None:
        return
    why = ""
    if host.is_multicast or host in _RESERVED:
        why = f"{host} is of no machine"
    elif use != "listen" and (host.is_unspecified or host in _THIS_NETWORK):
        why = f"{host} stands for all addresses of the machine that listens"
    if why:
        remedy = "Give an address of this machine: ip address" if use != "dial" else "Give the address of that machine."
        raise ConfigError(key, text, "the address of one machine", remedy, why=why)


def _check_peer(key: str, text: str, address: Multiaddr, *, wanted: bool) -> None:
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


def some_of(addresses: Sequence[str]) -> str:
    """``/ip4/… and 3 more``: enough of a peer's addresses, or of several peers', for a sentence."""
    first, *more = addresses or ("no address",)
    return f"{first} and {len(more)} more" if more else first


# --- texts for people ------------------------------------------------------------------------------------------------

_MULTIADDR = re.compile(r"/(?:ip[46]|dns[46]?|dnsaddr|unix)/\S+")
_MAYBE_ADDRESS = re.compile(r"[0-9A-Za-z.:%\[\]]+")
_MAX_IP_CHARS = 80
"""More than an IPv6 address with brackets, zone and port has."""


def without_addresses(text: str) -> str:
    """Return a text with every multiaddr and IP address in it, with its port, left out."""
    return _MAYBE_ADDRESS.sub(_left_out, _MULTIADDR.sub("(address)", text))


def _left_out(found: re.Match[str]) -> str:
    token = found[0].rstrip(".:")
    if len(token) > _MAX_IP_CHARS or not ("." in token or ":" in token):
        return found[0]
    rest = found[0][len(token) :]
    host, _, port = token.rpartition(":")
    candidates = [token.strip("[]"), host.strip("[]")] if port.isdigit() else [token.strip("[]")]
    return f"(address){rest}" if any(map(_is_ip, candidates)) else found[0]


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
