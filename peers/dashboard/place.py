"""Where a dashboard listens, as a person says it. Standard library only: options are read without anything slow."""

from __future__ import annotations

import ipaddress

PORT = 7300
TOKEN_VARIABLE = "SWARM_DASHBOARD_TOKEN"
"""A secret, and so no option that a list of processes shows."""
PLACE_WORDS = f"a port, or an address and a port, as {PORT} or 0.0.0.0:{PORT}"


def listening_place(text: str) -> tuple[str, int]:
    """Return the address and the port of ``PORT`` or ``ADDRESS:PORT``; without an address that of this machine alone.
    Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if host != "localhost":
        ipaddress.ip_address(host)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{port!r} is no port")
    return host, int(port)
