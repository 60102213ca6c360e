"""Settings of a peer by their names alone, for tests that do not care who says which."""

from __future__ import annotations

from typing import Any

from peers.settings import PeerSettings, exact_settings
from peers.simulate.local_swarm import split as split


def peer_settings(**given: Any) -> PeerSettings:
    """Return settings that need not be enough to start a peer with."""
    return PeerSettings(**split(given))


def checked_settings(**given: Any) -> PeerSettings:
    """Return settings as :func:`peers.settings.exact_settings` does."""
    return exact_settings(**split(given))
