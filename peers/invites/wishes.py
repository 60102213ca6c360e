"""What a person asks of ``swarm invite``, checked before any peer is looked for. Only ``--id`` loads more than the
standard library. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peers.console.words import command_name, listed
from swarm.errors import ConfigError
from swarm.ids import PeerId

ROLES = ("stage", "trainer", "observer", "any")
WISHES = ("for", "role", "expires", "id", "organisation", "vote")
"""What an issuer's peer is asked with, by name."""
DEFAULT_EXPIRES = "7d"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
_SPAN = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def each_wish(wishes: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is asked for each of the names of ``--for``, which commas part. Raises ConfigError for a peer id
    beside several: it is of one."""
    names = dict.fromkeys(str(wishes.get("for", "")).split(","))
    if len(names) == 1:
        return [wishes]
    if "id" in wishes:
        raise ConfigError("--id", wishes["id"], "one name in --for with it", "Give an invite for each peer id.")
    return [{**wishes, "for": name} for name in names]


def check_wishes(wishes: Mapping[str, object]) -> None:
    """Raise ConfigError, naming what is allowed, for a wish that no run could fulfil.

    Args:
        wishes: What was given, by the option's name without dashes; ``vote`` is False for ``--no-vote``.
    """
    given = {"--no-vote" if key == "vote" else f"--{key}": value for key, value in wishes.items()}
    if "--countersign" in given:
        if others := sorted(given.keys() - {"--countersign"}):
            raise ConfigError(others[0], given[others[0]], "none with --countersign", f"Leave {listed(others)} out.",
                              why="an issuer signs another's invite as it is")  # fmt: skip
        return
    for option in given.keys() & {"--for", "--organisation"}:
        if not _NAME.fullmatch(str(given[option])):
            raise ConfigError(option, given[option], "1 to 41 of these: letters a to z, digits, dots, dashes and "
                              "underscores; a letter or digit first", f"Type for example: {_example()}")  # fmt: skip
    if given.get("--role", "any") not in ROLES:
        raise ConfigError("--role", given["--role"], f"one of {listed(ROLES)}", f"Type for example: {_example()}")
    seconds_of(str(given.get("--expires", DEFAULT_EXPIRES)))
    if "--id" in given:
        check_peer_id("--id", str(given["--id"]))
    if given and "--for" not in given:
        about = listed(sorted(given))
        raise ConfigError("--for", None, f"a name with {about}", f"Where a run admits by invite: {_example()}. "
                          f"Where anybody may join, in any role: leave {about} out.")  # fmt: skip


def seconds_of(expires: str) -> int:
    """Return a span of time such as ``7d`` in seconds. Raises ConfigError for what is none."""
    match = _SPAN.fullmatch(expires)
    if match is None:
        raise ConfigError("--expires", expires, "a number and s, m, h or d: 12h, 7d", "Type for example: "
                          f"{_example()} --expires {DEFAULT_EXPIRES}")  # fmt: skip
    return int(match[1]) * _SECONDS[match[2]]


def check_peer_id(option: str, text: str) -> None:
    """Raise ConfigError for what can be no peer's id."""
    from swarm.security.signing import public_key_of

    if public_key_of(PeerId(text)) is None:
        raise ConfigError(option, text[:64], "a peer id (12D3KooW…)",
                          f"Its machine shows it: {command_name()} id; this one those of members: {command_name()} "
                          "peers --json")  # fmt: skip


def _example() -> str:
    return f"{command_name()} invite --for ana --role stage"
