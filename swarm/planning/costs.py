"""What a part costs: parameters, floating-point operations, bytes on its boundaries.

A multiply-add counts as two operations. Norms, rotary and activations are left out: below 1 % from D = 512 on.
"""

from __future__ import annotations

from swarm.ids import ENDS
from swarm.models.spec import ModelConfig, PartSpec

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def block_matrix_parameters(model: ModelConfig) -> int:
    """Elements of the matrices of one block."""
    narrow = model.key_value_heads * model.head_dim
    return 2 * model.dim * (model.dim + narrow) + 3 * model.dim * model.feed_forward_dim


def parameter_count(model: ModelConfig, spec: PartSpec) -> int:
    """Parameters of one part."""
    blocks = (spec.last_layer - spec.first_layer) * (block_matrix_parameters(model) + 2 * model.dim)
    table = model.vocab_size * model.dim
    return blocks + spec.embedding * table + spec.head * (table + model.dim)


def model_parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    whole = PartSpec(name=ENDS, first_layer=0, last_layer=model.layers, embedding=True, head=True)
    return parameter_count(model, whole)


def forward_flops_per_token(model: ModelConfig, spec: PartSpec, sequence: int) -> int:
    """Operations of one part's forward per token: its matrices, and causal attention over half of ``sequence`` on
    average (scores and mixing: 2 · 2 · D · T/2)."""
    layers = spec.last_layer - spec.first_layer
    matrices = layers * block_matrix_parameters(model) + spec.head * model.vocab_size * model.dim
    return 2 * matrices + layers * 2 * model.dim * sequence


def training_flops_per_token(model: ModelConfig, spec: PartSpec, sequence: int) -> int:
    """Forward and backward: the backward costs twice the forward (Kaplan et al., arXiv 2001.08361, §2.1)."""
    return 3 * forward_flops_per_token(model, spec, sequence)


def boundary_bytes(model: ModelConfig, microbatch_size: int, sequence: int, dtype: str) -> int:
    """Bytes of one activation, or of its gradient, on the wire: B·T·D elements of a dense codec's ``dtype``."""
    return microbatch_size * sequence * model.dim * _BYTES[dtype]
