"""What a model costs, whatever its family: parameters, operations, bytes of graphs and on its boundaries.

Imports torch where a model is first asked: files of plans and peers are read without.
"""

from __future__ import annotations

import math
from typing import Literal

from swarm.columns import host_parts
from swarm.models.registry import family_of, sparsity
from swarm.models.spec import ModelConfig, PartSpec, SplitConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, those that are not trained included."""
    family = family_of(model)
    cost = family.cost(family.whole, model.context)
    return cost.parameters + cost.frozen


def training_flops_per_token(model: ModelConfig, spec: PartSpec, sequence: int) -> int:
    """Forward and backward: the backward costs twice the forward (Kaplan et al., arXiv 2001.08361, §2.1)."""
    return 3 * family_of(model).cost(spec, sequence).forward_flops


def palm_flops_per_token(model: ModelConfig, sequence: int) -> int:
    """Forward and backward as PaLM counts them for its MFU: 6N + 12·L·D·T, with N all parameters, both ends among them
    and of experts those that a token passes, and attention as if it looked at every token of a row (Chowdhery et al.,
    arXiv 2204.02311, appendix B).

    What is really computed is less, :func:`training_flops_per_token` of the whole model: an embedding computes nothing,
    and causal attention looks at half of a row.
    """
    return palm_part_flops(model, family_of(model).whole, sequence)


def palm_part_flops(model: ModelConfig, spec: PartSpec, sequence: int) -> int:
    """Count forward and backward of one part for a token, as :func:`palm_flops_per_token` does of all."""
    family = family_of(model)
    width, cost = family.boundary(1, 1).shape[-1], family.cost(spec, sequence)
    return (
        6 * (cost.parameters + cost.frozen - cost.idle) + 12 * (spec.last_layer - spec.first_layer) * width * sequence
    )


# --- what training a part holds --------------------------------------------------------------------------------------


MemoryKind = Literal["weights", "optimizer", "gradients", "round", "frozen", "graphs", "payloads", "copies"]
"""What a peer's memory holds: ``weights``, float32 and those that are computed with; the ``optimizer``'s vectors beside
them; the sum of a step's ``gradients``; what is averaged in a ``round``; weights that are ``frozen`` beside adapters;
``graphs`` of microbatches under way, and the ``payloads`` that are retained of microbatches; ``copies`` of other
parts."""

ROUND_BYTES = 8
"""A parameter's, while a step is averaged: the copy of the sum that is sent, and the mean that comes of it."""

RESIDUAL_BYTES = 4
"""A parameter's, where averaging feeds back what it rounds off; and as many in a round, for what that leaves."""

QUANTISING_BYTES = 18
"""A weight's, while its matrix is stored in four bits: two copies in float32, and its code, first as 64 bits."""


def bytes_by_kind(
    model: ModelConfig,
    *,
    vectors: int = 3,
    exact: bool = False,
    local: bool = False,
    apart: bool = False,
    overlap: bool = False,
) -> dict[MemoryKind, int]:
    """Bytes a parameter that who trains a part holds: ``vectors`` of the optimizer's state, the weights among them, and
    the sum of a step; in bfloat16, or on a device ``apart`` from the host, a copy of the weights. ``exact`` sums are
    float64, and who trains ``local`` steps keeps what it began with, too. Who feeds steps early (``overlap``) has the
    weights of two states and the sums of two steps. Of a sparse model a byte says where a parameter stands."""
    copied, states = 2 if model.compute == "bfloat16" else 4 if apart else 0, 2 if overlap else 1
    return {
        "weights": states * (4 + copied + bool(sparsity(model))) + (4 if local else 0),
        "optimizer": 4 * (vectors - 1) + (8 if local else 0),
        "gradients": states * (8 if exact else 4),
        "round": ROUND_BYTES,
    }


def held_bytes(model: ModelConfig, *, vectors: int = 3, exact: bool = False, local: bool = False) -> int:
    """Bytes a parameter that who trains a part holds on the host, all kinds but the round's: :func:`bytes_by_kind`."""
    return sum(bytes_by_kind(model, vectors=vectors, exact=exact, local=local).values()) - ROUND_BYTES


def apart_bytes(
    model: ModelConfig, spec: PartSpec, *, exact: bool = False, overlap: bool = False, devices: int = 1
) -> int:
    """Memory of a device apart from the host that training a part takes beside its activations, at most: the weights
    that are computed with, the sum of gradients, and what is frozen. The rest of :func:`bytes_by_kind` lies on the
    host. Of several ``devices`` that the part is cut across the first takes the most: this."""
    each, cost = (
        (2 if model.compute == "bfloat16" else 4) + (8 if exact else 4) + bool(sparsity(model)),
        family_of(model).cost(spec, model.context),
    )
    share = 1.0 if devices == 1 else 1.0 - cut_share(model, spec) * (1.0 - 1.0 / devices)
    return int((2 if overlap else 1) * each * cost.parameters * share) + cost.frozen_held


def cut_share(model: ModelConfig, spec: PartSpec) -> float:
    """Return the share of a part's elements that are cut across a peer's devices, where it has several. Builds the part
    without weights."""
    from swarm.models.strips import find_cut

    family = family_of(model)
    return find_cut(family.build(spec), family.tensor_plan()).share


def training_bytes(
    model: ModelConfig, spec: PartSpec, *, vectors: int = 3, exact: bool = False, local: bool = False
) -> int:
    """Memory that training a part takes beside its activations, at most: see :func:`held_bytes`."""
    held = held_bytes(model, vectors=vectors, exact=exact, local=local)
    cost = family_of(model).cost(spec, model.context)
    return (held + ROUND_BYTES) * cost.parameters + cost.frozen_held


def founding_bytes(model: ModelConfig, split: SplitConfig) -> int:
    """Memory that the founder of a run takes, at most: the first state of all parts, three vectors, until everybody has
    his; and of weights that are frozen what :func:`storing_bytes` says of one part after the other."""
    family = family_of(model)
    storing = max(storing_bytes(model, spec) for spec in family.parts(split))
    several = split.stages < len(host_parts(split.parts))
    states = family.parts(split) if several else (family.whole,)
    return 12 * sum(family.cost(spec, model.context).parameters for spec in states) + storing


def storing_bytes(model: ModelConfig, spec: PartSpec) -> int:
    """Memory that making a part's frozen weights takes, at most: those of the model in float32, what they are stored
    as, and what it takes to store the largest matrix in four bits. Nothing for a model without adapters."""
    from swarm.models.lora import LoraFamily

    family = family_of(model)
    if not isinstance(family, LoraFamily):
        return 0
    layout = family.base(spec)
    largest = max((math.prod(slot.shape) for slot in layout.slots if slot.kind == "nf4"), default=0)
    elements = sum(math.prod(slot.shape) for slot in layout.slots)
    return 4 * elements + layout.bytes + QUANTISING_BYTES * largest


def copy_bytes(model: ModelConfig, spec: PartSpec, *, vectors: int = 3) -> int:
    """Memory that a copy of a part takes which this peer does not train: the optimizer's state, weights included."""
    return 4 * vectors * family_of(model).cost(spec, model.context).parameters


# --- what forwards leave for their backwards -------------------------------------------------------------------------


GRAPH_SHARE = 0.5
"""Of the memory that is left, how much graphs may take: the rest is for what a backward makes, for payloads, for other
peers of the machine, and for what :func:`graph_bytes` does not see."""


def graph_bytes(model: ModelConfig, spec: PartSpec, rows: int, *, checkpointing: bool = False) -> int:
    """Return about how many bytes a forward through a part's layers leaves for its backward, for one microbatch of so
    many rows.

    With activation checkpointing it is what goes into each layer. Else it follows from the weights' shapes: for each
    token a matrix has what it was given and what it answered kept, as many elements as it has rows and columns, and a
    norm two tensors in float32. Scores of attention, where they are kept (``eager``), come on top. Of private ends it
    is what the embedding made, for their head is gone through both ways at once. Needs no weights.
    """
    from torch import nn

    family = family_of(model)
    boundary = family.boundary(rows, model.context)
    each = _BYTES[boundary.dtype]
    if spec.embedding and spec.first_layer == spec.last_layer:
        return boundary.elements * each
    if checkpointing:
        return (spec.last_layer - spec.first_layer) * boundary.elements * each
    part, a_token = family.dense(spec), 0.0
    tables = {id(table.weight) for table in part.modules() if isinstance(table, nn.Embedding)}
    for name, parameter in part.parameters_of("forward").items():
        if parameter.ndim < 2:
            a_token += 2 * 4 * parameter.numel()
        elif id(parameter) not in tables:
            rows_and_columns = sum(parameter.shape[-2:]) * parameter.shape[:-2].numel()
            a_token += family.used_share(name, parameter) * rows_and_columns * each
    return int(rows * model.context * a_token)


MIN_IN_FLIGHT, MOST_IN_FLIGHT = 2, 256
"""Journeys of a trainer: fewer keep no two stages busy, and of unlike replicas on far links 64 reach .978 of what they
can do, 256 .986 (benchmark ``mixes`` at df58d3c1)."""


USUAL_IN_FLIGHT = 32
"""Journeys of a trainer whose graphs must fit without activation checkpointing. Where replicas are alike and links
short no more are under way; more are only let in as far as their graphs fit, so that nobody computes twice for them."""


def most_in_flight(journey_bytes: float, budget_bytes: float) -> int:
    """Return how many journeys a trainer may have under way: each keeps what crosses a stage's boundaries, so many
    bytes, at a replica and at the trainer, within a peer's budget for that."""
    return int(max(MIN_IN_FLIGHT, min(MOST_IN_FLIGHT, budget_bytes // max(1.0, journey_bytes))))


def graphs_under_way(microbatches: int, replicas: int, at_once: int) -> int:
    """Return how many graphs a replica may hold at a time: its share of a step's microbatches and, with those of others
    that it may get, no more than its share of what all trainers have in flight ``at_once``."""
    return max(1, min(-(-microbatches // max(1, replicas)), -(-at_once // max(1, replicas))))


def graphs_that_fit(graph: int, left: int) -> int:
    """Return how many graphs of so many bytes may be taken of the bytes that are left."""
    return int(GRAPH_SHARE * left) // max(1, graph)


def needs_checkpointing(graph: int, under_way: int, left: int) -> bool:
    """Decide whether so many graphs of so many bytes are more than may be taken of the bytes that are left."""
    return graph * under_way > GRAPH_SHARE * left
