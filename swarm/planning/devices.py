"""What is known of devices by their names."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import NamedTuple


class KnownDevice(NamedTuple):
    """What its maker says: operations a second in bfloat16 (or float16) with float32 sums, without sparsity, and in
    float32; GiB of memory."""

    bfloat16: float
    float32: float
    memory_gib: float


DEVICES = {
    "h200": KnownDevice(989e12, 67e12, 141),
    "h100": KnownDevice(989e12, 67e12, 80),
    "a100": KnownDevice(312e12, 19.5e12, 80),
    "a100-40": KnownDevice(312e12, 19.5e12, 40),
    "l40s": KnownDevice(362e12, 91.6e12, 48),
    "a10g": KnownDevice(70e12, 31e12, 24),
    "l4": KnownDevice(121e12, 30e12, 24),
    "t4": KnownDevice(65e12, 8.1e12, 16),
    "v100": KnownDevice(125e12, 15.7e12, 16),
    "rtx4090": KnownDevice(165e12, 82.6e12, 24),
    "rtx3090": KnownDevice(71e12, 35.6e12, 24),
}
"""By the names that ``device`` may have."""


OTHERS = frozenset({"laptop", "mobile", "mig", "pcie", "nvl", "ti", "super", "max", "d", "ada"})
"""Words of a name that make it another device than the one that is known, slower or faster."""


def device_named(name: str) -> KnownDevice | None:
    """Return what is known of a device by the name that its driver gives it, None where nothing is.

    Words count alone or joined to those before them: ``NVIDIA GeForce RTX 4090`` is ``rtx4090``. An A100 is the one of
    80 GB unless its name says 40, on whatever bus, since all have the same peak.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {text for start in range(len(words)) for text in accumulate(words[start : start + 2])}
    found = next((key for key in DEVICES if key in joined), None)
    if found is None or OTHERS & set(words) - ({"pcie"} if found in ("a100", "v100", "t4", "l4") else set()):
        return None
    return DEVICES["a100-40" if found == "a100" and "40gb" in words else found]
