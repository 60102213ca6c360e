"""Which ports a daemon chose, so that the one that takes its place is found where the first one was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Collection, Sequence
from ipaddress import ip_address

from multiaddr import Multiaddr

from swarm.network.addresses import ip_of

logger = logging.getLogger(__name__)

_Bound = tuple[bool, str, int]
"""Whether it is UDP, the IP address, the port."""


async def pinned(listen: Sequence[Multiaddr], pid: int) -> tuple[Multiaddr, ...]:
    """The same addresses, each port 0 replaced by the one that process ``pid`` listens at for it.

    What it tells of itself is not used: announced and forwarded addresses have other ports. An address whose port
    cannot be found out stays as it is. Never raises; costs some milliseconds in a thread, nothing when no port is 0.
    """
    if not any(_wish(address) for address in listen):
        return tuple(listen)
    return pin(listen, await asyncio.to_thread(_bound_by, pid))


def pin(listen: Sequence[Multiaddr], bound: Collection[_Bound]) -> tuple[Multiaddr, ...]:
    """The rule of :func:`pinned`. An address for which several ports would do gets the lowest that is free."""
    left = sorted(bound)
    chosen = []
    for address in listen:
        wish = _wish(address)
        fitting = next((each for each in left if each[:2] == wish), None)
        if wish is None or fitting is None:
            chosen.append(address)
            continue
        left.remove(fitting)
        kind = "udp" if fitting[0] else "tcp"
        chosen.append(Multiaddr(str(address).replace(f"/{kind}/0", f"/{kind}/{fitting[2]}", 1)))
    return tuple(chosen)


def _wish(address: Multiaddr) -> tuple[bool, str] | None:
    """(UDP?, IP address) of an address that leaves its port open; None for all others."""
    ip = ip_of(address)
    for kind in ("tcp", "udp") if ip is not None else ():
        with contextlib.suppress(LookupError):
            return (kind == "udp", str(ip)) if int(str(address.value_for_protocol(kind))) == 0 else None
    return None


def _bound_by(pid: int) -> set[_Bound]:
    import psutil  # only a running peer needs it

    try:
        found = psutil.Process(pid).net_connections("inet")
    except (psutil.Error, OSError) as error:
        logger.warning("the ports of p2pd could not be found out (%s): it may listen elsewhere later", error)
        return set()
    return {
        (udp, str(ip_address(each.laddr.ip)), each.laddr.port)
        for each in found
        if (udp := each.type == socket.SOCK_DGRAM) or each.status == psutil.CONN_LISTEN
    }
