"""What a model costs, whatever its family: parameters, floating-point operations, bytes on its boundaries."""

from __future__ import annotations

from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, PartSpec

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    family = family_of(model)
    return family.cost(family.whole, model.context).parameters


def training_flops_per_token(model: ModelConfig, spec: PartSpec, sequence: int) -> int:
    """Forward and backward: the backward costs twice the forward (Kaplan et al., arXiv 2001.08361, §2.1)."""
    return 3 * family_of(model).cost(spec, sequence).forward_flops


ROUND_BYTES = 8
"""A parameter's, while a step is averaged: the copy of the sum that is sent, and the mean that comes of it."""


def held_bytes(model: ModelConfig, *, vectors: int = 3, exact: bool = False, local: bool = False) -> int:
    """Bytes a parameter that who trains a part holds on the host: ``vectors`` of the optimizer's state, the weights
    among them, and the sum of a step; in bfloat16 a copy of the weights. ``exact`` sums are float64, and who trains
    ``local`` steps keeps what it began with, too."""
    return 4 * vectors + (8 if exact else 4) + (2 if model.compute == "bfloat16" else 0) + (12 if local else 0)


def training_bytes(
    model: ModelConfig, spec: PartSpec, *, vectors: int = 3, exact: bool = False, local: bool = False
) -> int:
    """Memory that training a part takes beside its activations, at most: see :func:`held_bytes`."""
    held = held_bytes(model, vectors=vectors, exact=exact, local=local)
    return (held + ROUND_BYTES) * family_of(model).cost(spec, model.context).parameters


def boundary_bytes(model: ModelConfig, microbatch_size: int, sequence: int, dtype: str) -> int:
    """Bytes of one activation, or of its gradient, on the wire, encoded by the dense codec of ``dtype``."""
    return family_of(model).boundary(microbatch_size, sequence).elements * _BYTES[dtype]
