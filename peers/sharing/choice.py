"""Parse and check ``--max-upload`` and ``--max-download``. Standard library only."""

from __future__ import annotations

import re

MIN_RATE = 125_000
"""Bytes a second, 1 Mbit/s: below it the largest frame would not arrive within the time that a receiver gives it."""
RATE_WORDS = "a rate like 20mbit or 2MB, of a second, 1mbit at least"

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([a-zA-Z]{1,5})(?:/s|ps)?")
_UNITS = {
    **{f"{letter}{word}": size // 8 for letter, size in (("k", 1000), ("m", 10**6), ("g", 10**9))
       for word in ("bit", "bits")},
    **{f"{letter}B": size for letter, size in (("k", 1000), ("K", 1000), ("M", 10**6), ("G", 10**9))},
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip


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
