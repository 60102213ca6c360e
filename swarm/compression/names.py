"""The codecs there are, by their name in a manifest and on the wire, and what each may carry. Imports no torch: a
manifest is checked with this alone.

A new one is a line in :data:`NAMED`, and its codec in :data:`~swarm.compression.registry.CODECS`: the manifest's keys,
and all that checks them, follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCodec:
    """A codec, and what a manifest may choose it for: ``activations`` and their gradients between stages, ``averaging``
    of replicas; with ``feedback`` each of these adds what was rounded off to its next contribution."""

    name: str
    activations: bool = False
    averaging: bool = False
    feedback: bool = False


NAMED: tuple[NamedCodec, ...] = (
    NamedCodec(name="float32", activations=True, averaging=True),
    NamedCodec(name="bfloat16", activations=True),
    NamedCodec(name="float16", activations=True),
    NamedCodec(name="int8", activations=True, averaging=True),
    NamedCodec(name="int8h", activations=True),
    NamedCodec(name="int4h", activations=True, averaging=True, feedback=True),
    NamedCodec(name="float64"),  # sums of reproducible runs
    NamedCodec(name="int32"),  # token ids
)

FED_BACK = frozenset(one.name for one in NAMED if one.feedback)
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
    ActivationCodec = Literal[tuple(one.name for one in NAMED if one.activations)]
    ActivationChoice = Literal[(EXACT, AUTO, *(one.name for one in NAMED if one.activations))]
    GradientChoice = Literal[(SAME, EXACT, AUTO, *(one.name for one in NAMED if one.activations))]
    AveragingCodec = Literal[tuple(one.name for one in NAMED if one.averaging)]


def exact_codec(dtype: str) -> ActivationCodec:
    """Return the codec that carries tensors of this dtype across boundaries bit for bit, without bytes that say
    nothing: the one of that name, as bfloat16 where a run computes in bfloat16. Where none has it it is float32."""
    return next((one.name for one in NAMED if one.activations and one.name == dtype), "float32")
