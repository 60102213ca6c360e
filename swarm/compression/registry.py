"""The codecs there are, by their name in a manifest and on the wire, and what each may carry.

A new one is a line in :data:`REGISTERED`: the manifest's keys, and all that checks them, follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from swarm.compression.blockwise import INT8
from swarm.compression.codec import Codec
from swarm.compression.dense import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT32
from swarm.compression.hadamard import INT4H, INT8H
from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A codec, and what a manifest may choose it for: ``activations`` and their gradients between stages, ``averaging``
    of replicas; with ``feedback`` each of these adds what was rounded off to its next contribution."""

    codec: Codec
    activations: bool = False
    averaging: bool = False
    feedback: bool = False


REGISTERED: tuple[Registered, ...] = (
    Registered(codec=FLOAT32, activations=True, averaging=True),
    Registered(codec=BFLOAT16, activations=True),
    Registered(codec=FLOAT16, activations=True),
    Registered(codec=INT8, activations=True, averaging=True),
    Registered(codec=INT8H, activations=True),
    Registered(codec=INT4H, activations=True, averaging=True, feedback=True),
    Registered(codec=FLOAT64),  # sums of reproducible runs
    Registered(codec=INT32),  # token ids
)

CODECS: Mapping[str, Codec] = MappingProxyType({one.codec.name: one.codec for one in REGISTERED})

FED_BACK = frozenset(one.codec.name for one in REGISTERED if one.feedback)
"""Codecs of averaging that round so much that what is lost is fed back."""

AUTO = "auto"
"""Stands for the codec that each close record names, by boundary: see :mod:`swarm.step.boundary_codecs`."""
EXACT = "exact"
"""Stands for the codec that carries what crosses boundaries bit for bit: see :func:`exact_codec`."""
SAME = "same"
"""Gradients travel as activations do."""

if TYPE_CHECKING:
    ActivationCodec = str
    ActivationChoice = str
    GradientChoice = str
    AveragingCodec = str
else:
    ActivationCodec = Literal[tuple(one.codec.name for one in REGISTERED if one.activations)]
    ActivationChoice = Literal[(EXACT, AUTO, *(one.codec.name for one in REGISTERED if one.activations))]
    GradientChoice = Literal[(SAME, EXACT, AUTO, *(one.codec.name for one in REGISTERED if one.activations))]
    AveragingCodec = Literal[tuple(one.codec.name for one in REGISTERED if one.averaging)]


def exact_codec(dtype: str) -> ActivationCodec:
    """Return the codec that carries tensors of this dtype across boundaries bit for bit, without bytes that say
    nothing: bfloat16 where a run computes in bfloat16. Where none does it is float32."""
    fitting = (one.codec.name for one in REGISTERED if one.activations and one.codec.exact(dtype))
    return next(fitting, FLOAT32.name)


def codec_named(name: str) -> Codec:
    """The codec of a wire name. Raises ConfigError for an unknown one, or on a big-endian machine."""
    if sys.byteorder != "little":
        raise ConfigError("codecs", name, "a little-endian machine", "Run this peer on other hardware.")
    if name not in CODECS:
        raise ConfigError("codecs", name, ", ".join(CODECS), "Choose one of these.")
    return CODECS[name]
