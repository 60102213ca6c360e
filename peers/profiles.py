"""Profiles of ``swarm new``: what suits the links of a run, as values of its manifest. Pure.

``[speed] profile`` of a RUN.toml, or ``--profile``, is replaced by what it stands for before there is a run: what the
manifest says is all that counts, and no peer looks at a profile again. What a person has set by hand stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import ConfigError

Document = Mapping[str, Any]
"""A manifest as TOML gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """A value for a manifest's key, dotted, and ``why`` it suits. ``least``: a larger one is fine as well. ``rounds``:
    numbers are rounded for it, or by what was measured, so that no run of exact weights can have it."""

    key: str
    value: str | int
    why: str
    least: bool = False
    rounds: bool = False


MODES: Mapping[str, ProfileChoice] = {
    "lan": ProfileChoice(
        key="averaging.mode", value="sync", why="gradients of a step are averaged in a small part of it"
    ),
    "wan": ProfileChoice(key="averaging.mode", value="sync", why="no peer that dies takes work with it"),
    "thin": ProfileChoice(
        key="averaging.mode", value="local", why="one averaging for many batches, at some loss of quality"
    ),
}
"""What replicas do between steps, by profile."""

PROFILES: Mapping[str, tuple[ProfileChoice, ...]] = {
    "lan": (
        MODES["lan"],
        ProfileChoice(key="codecs.activations", value="exact", why="links have room for payloads as they are"),
        ProfileChoice(key="averaging.codec", value="float32", why="as gradients are summed"),
    ),
    "wan": (
        MODES["wan"],
        ProfileChoice(
            key="codecs.activations", value="auto", rounds=True,
            why="int8h, a quarter of float32, between stages whose links are busy for long; decided in each step",
        ),
        ProfileChoice(key="averaging.codec", value="int8", why="a quarter of the bytes, an error of .7 %", rounds=True),
        ProfileChoice(
            key="batch.microbatches_per_step", value=64, why="closing a step costs nine round trips", least=True
        ),
    ),
    "thin": (
        MODES["thin"],
        ProfileChoice(
            key="averaging.local.steps", value=8, why="an eighth of the averaging; 32 cost twice as much loss"
        ),
        ProfileChoice(
            key="codecs.activations", value="int8h", why="a quarter of float32 from the first step on", rounds=True
        ),
        ProfileChoice(key="averaging.codec", value="int8", why="a quarter of the bytes, an error of .7 %", rounds=True),
    ),
}  # fmt: skip
"""By name. The figures are measured: benchmarks ``wan``, ``allreduce`` (int8) and ``convergence`` (local 8 and 32; at
df58d3c1)."""

FITS = {
    "lan": "machines in one place, 1 Gbit/s or more between them",
    "wan": "machines far apart, 50 to 500 Mbit/s each",
    "thin": "machines with less than 50 Mbit/s each",
}
"""Where each suits."""


def with_profile(document: Document, by_hand: Collection[str]) -> dict[str, Any]:
    """Return the manifest with what its profile stands for, and without the profile; itself where it has none.

    Args:
        document: The manifest, with a preset's values and those set by hand.
        by_hand: Dotted keys that a person has set: they stay.

    Raises:
        ConfigError: There is no such profile, or it does not go with ``run.reproducible``.
    """
    name, made = profile_of(document), {section: value for section, value in document.items()}
    if name is None:
        return made
    speed = {key: value for key, value in document["speed"].items() if key != "profile"}
    made["speed"] = speed
    if not speed:
        del made["speed"]
    for choice in _open(name, document, by_hand):
        now = value_at(made, choice.key)
        value = max(now, choice.value) if choice.least and isinstance(now, int) else choice.value
        made = put(made, choice.key.split("."), value)
    return made


def profile_of(document: Document) -> str | None:
    """Return a manifest's profile, None where it has none. Raises ConfigError for one that there is not."""
    speed = document.get("speed")
    name = speed.get("profile") if isinstance(speed, dict) else None
    if name is not None and name not in PROFILES:
        fits = "; ".join(f"{known}: {where}" for known, where in FITS.items())
        raise ConfigError("speed.profile", name, "lan, wan or thin", f"Choose one ({fits}), or leave it out.")
    return name


def profile_lines(name: str, manifest: Document) -> list[tuple[str, str]]:
    """Describe for a person what a profile stood for in a resolved manifest, as (label, text): a line for each choice,
    with the reason, or with what is there instead."""
    lines = [("profile", f"{name}, for {FITS[name]}")]
    for choice in PROFILES[name]:
        now = value_at(manifest, choice.key)
        meant = now == choice.value or (choice.least and isinstance(now, int) and now >= int(choice.value))
        exact = choice.value == "exact" and now in ("float32", "bfloat16")
        reason = choice.why if meant or exact else f"not {choice.value}, as set by hand or for run.reproducible"
        lines.append(("", f"{choice.key} = {now}: {reason}"))
    return lines


def keys_of(document: Document, above: str = "") -> Iterator[str]:
    """Yield the dotted keys that a manifest has."""
    for key, value in document.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{above}{key}.")


def _open(name: str, document: Document, by_hand: Collection[str]) -> Iterator[ProfileChoice]:
    """The choices that nobody has made."""
    exact = value_at(document, "run.reproducible") is True
    if exact and MODES[name].value == "local" and MODES[name].key not in by_hand:
        raise ConfigError(
            "speed.profile", name, "lan or wan with run.reproducible = true",
            'Write profile = "wan", or run.reproducible = false.', why="its replicas train apart for a while",
        )  # fmt: skip
    for choice in PROFILES[name]:
        if choice.key not in by_hand and not (exact and choice.rounds):
            yield choice


def value_at(document: Document, dotted: str) -> Any:
    """Return what a manifest has at a dotted key; None where it has nothing."""
    found: Any = document
    for key in dotted.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def put(document: Document, keys: list[str], value: Any) -> dict[str, Any]:
    """A copy with the value at that key; what is no table where one must be is for the manifest to refuse."""
    first, *rest = keys
    inner = document.get(first, {})
    if rest and not isinstance(inner, dict):
        return dict(document)
    return {**document, first: put(inner, rest, value) if rest else value}
