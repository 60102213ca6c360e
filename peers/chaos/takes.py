"""Which keys a ``[[fault]]`` of a scenario takes, by what it does; and the fault that it makes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_COMMON = frozenset({"do", "label", "on", "at_s"})
_SHAPE = ("latency_ms", "jitter_ms", "mbit_per_s", "loss")
_BACK = ("back_s", "keep_disk")


@dataclass(frozen=True, slots=True)
class Takes:
    """Keys that must be there, and that may."""

    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()


KINDS: Mapping[str, Takes] = {
    "kill": Takes(("peers",), _BACK),
    "kill_daemon": Takes(("peers",)),
    "pause": Takes(("peers",), ("seconds",)),
    "resume": Takes(("peers",)),
    "stop": Takes(("peers",), ("grace_s", *_BACK)),
    "partition": Takes(("peers", "others"), ("one_way", "seconds")),
    "heal": Takes(),
    "slow_links": Takes(("peers", "others"), ("seconds", *_SHAPE)),
    "disconnect": Takes(("peers",), ("network", "seconds")),
    "reconnect": Takes(("peers",), ("network",)),
    "corrupt_bytes": Takes(("peers", "others"), ("messages",)),
    "slow_device": Takes(("peers", "factor")),
    "limit_cpu": Takes(("peers", "cpus")),
    "limit_memory": Takes(("peers", "mib"), _BACK),
    "fill_disk": Takes(("peers",)),
    "free_disk": Takes(("peers",)),
    "skew_clock": Takes(("peers", "offset_s")),
    "restart": Takes(("peers",), ("keep_disk",)),
    "upgrade": Takes(("peers",), ("grace_s",)),
    "start": Takes(("peers",)),
    "moment": Takes(),
    "twin": Takes(("peers",)),
    "joiner_storm": Takes(("count",)),
}


def problem_of(do: str, given: Collection[str]) -> str:
    """What is wrong with the keys that were given, "" when nothing is."""
    takes = KINDS.get(do)
    if takes is None:
        return f"do: {', '.join(KINDS)}, not {do!r}"
    missing = [key for key in takes.needs if key not in given]
    if missing:
        return f"{', '.join(missing)} for do = {do!r}"
    if do == "slow_links" and not set(_SHAPE) & set(given):
        return f"one of {', '.join(_SHAPE)} for do = {do!r}"
    surplus = sorted(set(given) - _COMMON - set(takes.needs) - set(takes.may))
    if surplus:
        allowed = ", ".join((*takes.needs, *takes.may)) or "no keys"
        return f"{allowed} for do = {do!r}, not {', '.join(surplus)}"
    return ""
