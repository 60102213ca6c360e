"""Parse and check ``--max-upload``, ``--max-download`` and ``--pause-when``, and say what a limit makes of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from peers.preemption.notice_options import read_command
from swarm.disk import size_text

MIN_RATE = 125_000
"""Bytes a second, 1 Mbit/s: below it the largest frame would not arrive within the time that a receiver gives it."""
RATE_WORDS = "a rate like 20mbit or 2MB, of a second, 1mbit at least"
PAUSE_WORDS = "battery, hours:22-07 or command:CMD"

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([a-zA-Z]{1,5})(?:/s|ps)?")
_UNITS = {
    **{f"{letter}{word}": size // 8 for letter, size in (("k", 1000), ("m", 10**6), ("g", 10**9))
       for word in ("bit", "bits")},
    **{f"{letter}B": size for letter, size in (("k", 1000), ("K", 1000), ("M", 10**6), ("G", 10**9))},
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip
_HOURS = re.compile(r"([01]?[0-9]|2[0-4])(?::([0-5][0-9]))?-([01]?[0-9]|2[0-4])(?::([0-5][0-9]))?")
DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseChoice:
    """One condition under which a peer pauses: the machine is on its battery; it is between two ``hours``, in minutes
    after midnight, the second not included; or a ``command`` exits with 0."""

    text: str
    battery: bool = False
    hours: tuple[int, int] | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """What a peer is told that another process starts again: the id of that ``keeper``, why it was away, in words, and
    for how many ``seconds``; no reason at its first start."""

    keeper: int
    reason: str = ""
    seconds: float = 0.0


def read_rate(text: str) -> float:
    """Bytes a second. Raises ValueError, which says what is allowed.

    Bits are written out (``mbit``, in any case), and bytes have a large B (``MB``, ``MiB``): Mb is neither.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(RATE_WORDS)
    unit = match[2].lower() if match[2].lower().endswith(("bit", "bits")) else match[2]
    if unit not in _UNITS:
        raise ValueError(f"{RATE_WORDS}: {match[2]!r} is none of kbit, mbit, gbit, kB, MB, GB, MiB")
    rate = float(match[1]) * _UNITS[unit]
    if rate < MIN_RATE:
        raise ValueError(f"{RATE_WORDS}: peers would cut off who is slower")
    return rate


def rate_given(text: str | None) -> float | None:
    """Bytes a second, None where no limit was given. Raises as :func:`read_rate`."""
    return None if text is None else read_rate(text)


def slow_step_text(rate: int, step_bytes: int) -> str:
    """Say what a limit of so many bytes a second makes of a step of which a peer moves so many bytes each way."""
    seconds = step_bytes / max(1, rate)
    lasts = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    return (
        f"a step takes about {lasts}, for the whole run: this peer's share is {size_text(step_bytes)} each way, where "
        f"no codec makes it less, and it is held to {rate * 8 / 1e6:.3g} Mbit/s; a higher --max-upload and "
        "--max-download make it faster"
    )


def read_pause(text: str) -> PauseChoice:
    """Raises ValueError, which says what is allowed or what is wrong."""
    kind, separator, rest = text.strip().partition(":")
    match kind, bool(separator):
        case "battery", False:
            return PauseChoice(text="battery", battery=True)
        case "hours", True:
            return PauseChoice(text=text.strip(), hours=_hours(rest.strip()))
        case "command", True:
            return PauseChoice(text=text.strip(), command=read_command(rest))
        case _:
            raise ValueError(PAUSE_WORDS)


def _hours(text: str) -> tuple[int, int]:
    match = _HOURS.fullmatch(text)
    if match is None:
        raise ValueError("hours like 22-07 or 22:30-07:00, of 0 to 24, in local time")
    begin, end = (int(match[at]) * 60 + int(match[at + 1] or 0) for at in (1, 3))
    if max(begin, end) > DAY_MINUTES or begin % DAY_MINUTES == end % DAY_MINUTES:
        raise ValueError("hours that begin and end at two times of the day: for all day, do not start the peer")
    return begin % DAY_MINUTES, end % DAY_MINUTES
