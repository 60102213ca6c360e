"""Who may read a dashboard: pure rules on a request's method, path and headers, and what every answer carries.

A page in a browser may be made to ask on behalf of another site. Three things keep that out: the Host header must name
us (against names that are pointed at this machine), an Origin header must be our own, and nothing but reading is
served. Off this machine a token is needed beside.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

READS = ("GET", "HEAD")
ROUTES: Mapping[str, str] = {
    "/": "the page, which tells nothing of a run and asks for the token",
    "/app.js": "the page's script, the same everywhere",
    "/charts.js": "the page's script, the same everywhere",
    "/style.css": "the page's style, the same everywhere",
    "/favicon.svg": "the page's icon, the same everywhere",
    "/api/v1/state": "",
    "/api/v1/events": "",
    "/metrics": "",
}
"""Every path that is served, with the reason for which it needs no token; without one it does, and so does whatever is
not here."""
TOKEN_BYTES = 24
MAX_TOKEN_CHARS = 256
MIN_TOKEN_CHARS = 16
FOREIGN_SITES = ("cross-site", "same-site")
"""What a browser says (Sec-Fetch-Site) of a request that a page of another address makes, also where it names no
Origin, as for an image or a script in a page."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
    # One request a connection: what a connection may cost is then bounded by one deadline.
    "connection": "close",
}
"""Of every answer."""


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. Names are not looked up: ``localhost`` alone is one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``host`` is the address that is listened on, ``names`` under what other names a browser may ask for it.
    ``token`` is None only on loopback."""

    host: str
    token: str | None = None
    names: tuple[str, ...] = ()

    def refuse(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason for which a request is refused; None: it may be answered. ``headers`` have
        lower-case names; one that came twice has both values, and fits nothing."""
        if method not in READS:
            return 405, "this page is for looking at only"
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, "the Host header does not name this dashboard: ask for it by its address, or see --name"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "pages of other sites may not read this"
        if ROUTES.get(path):
            return None
        if headers.get("sec-fetch-site", "none").lower() in FOREIGN_SITES:
            return 403, "pages of other sites may not read this"
        if not self._knows(headers.get("authorization", "")):
            return 401, "a token is needed: the address with it was printed when the dashboard was started"
        return None

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host)
        if name in self.names:
            return True
        if is_loopback(self.host):
            return is_loopback(name)
        try:  # a name may be pointed anywhere by the one who owns it; an address cannot
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name == "localhost"
        return True

    def _knows(self, authorization: str) -> bool:
        if self.token is None:
            return True
        kind, _, given = authorization.partition(" ")
        fits = hmac.compare_digest(given[:MAX_TOKEN_CHARS].encode(), self.token.encode())
        return kind.lower() == "bearer" and fits


def _without_port(host: str) -> str:
    """Return the name or address of a Host header, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.rpartition(":")[0] if name.count(":") == 1 else name
