"""What a codec is, and the ones there are, by the name they have in a manifest and on the wire."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from swarm.compression.blockwise import INT8
from swarm.compression.dense import BFLOAT16, FLOAT16, FLOAT32, INT32
from swarm.errors import ConfigError
from swarm.models.spec import TensorSpec


class Codec(Protocol):
    """Tensor to bytes and back. Synchronous: large tensors do not belong on the event loop.

    ``spec`` is shape and dtype of the *tensor* on both sides; both peers know it before anything is sent.
    """

    @property
    def name(self) -> str:
        """Name on the wire."""

    def wire_bytes(self, spec: TensorSpec) -> int:
        """Exactly how many bytes a tensor becomes: what a receiver admits, not one more or less."""

    def encode(self, tensor: Tensor) -> memoryview:
        """The tensor's bytes, from CPU or CUDA. May alias the tensor: do not change it until they are sent.

        Raises BugError for a dtype that the codec does not carry.
        """

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """A CPU tensor of ``spec``: a view of a writable buffer where the dtype allows it, else a copy.

        Raises Violation for a wrong length and, with ``check_finite``, for Inf or NaN; nothing is allocated before the
        length is right.
        """


_ALL: tuple[Codec, ...] = (FLOAT32, BFLOAT16, FLOAT16, INT32, INT8)

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})


def codec_named(name: str) -> Codec:
    """The codec of a wire name. Raises ConfigError for an unknown one, or on a big-endian machine."""
    if sys.byteorder != "little":
        raise ConfigError("codecs", name, "a little-endian machine", "Run this peer on other hardware.")
    if name not in CODECS:
        raise ConfigError("codecs", name, ", ".join(CODECS), "Choose one of these.")
    return CODECS[name]
