"""Settings of a peer by their names alone, for tests that do not care who says which."""

from __future__ import annotations

from typing import Any

from peers.options.fields import settings_of
from peers.options.model import PeerOptions
from peers.settings import PeerSettings, exact_settings


def split(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a PeerSettings, what a person says of it below ``options``."""
    own = {key: value for key, value in given.items() if key in PeerSettings.model_fields}
    said = {key: value for key, value in given.items() if key not in own and key in settings_of(PeerOptions)}
    unknown = {key: value for key, value in given.items() if key not in own and key not in said}
    return {**own, **unknown, **({"options": PeerOptions(**said)} if said else {})}


def peer_settings(**given: Any) -> PeerSettings:
    """Return settings that need not be enough to start a peer with."""
    return PeerSettings(**split(given))


def checked_settings(**given: Any) -> PeerSettings:
    """Return settings as :func:`peers.settings.exact_settings` does."""
    return exact_settings(**split(given))
