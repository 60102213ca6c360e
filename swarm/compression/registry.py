"""The codecs by the names that :mod:`swarm.compression.names` lists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from swarm.compression.blockwise import INT8
from swarm.compression.codec import Codec
from swarm.compression.dense import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT32
from swarm.compression.hadamard import INT4H, INT8H
from swarm.errors import ConfigError

CODECS: Mapping[str, Codec] = MappingProxyType(
    {one.name: one for one in (FLOAT32, BFLOAT16, FLOAT16, INT8, INT8H, INT4H, FLOAT64, INT32)}
)


def codec_named(name: str) -> Codec:
    """The codec of a wire name. Raises ConfigError for an unknown one, or on a big-endian machine."""
    if sys.byteorder != "little":
        raise ConfigError("codecs", name, "a little-endian machine", "Run this peer on other hardware.")
    if name not in CODECS:
        raise ConfigError("codecs", name, ", ".join(CODECS), "Choose one of these.")
    return CODECS[name]
