"""The rig of ``swarm.models.strips``: one stage of a model, whole or cut, and what comes of a microbatch in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, SplitConfig
from swarm.optim.accumulate import AccumulatorDType
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import initial_snapshot

CPU = torch.device("cpu")
WORK = StepWork(1, MicrobatchId(PeerId("trainer"), "00" * 8, 0, 0))
SHIFT = 0.05
"""Noise that is added to first weights: some are zeros or ones, which hide a difference."""


class Passed(NamedTuple):
    """What a stage made of a microbatch: its output, the gradient of its input, and of its weights the sum."""

    output: Tensor
    gradient: Tensor
    sums: Tensor


def stage_of(
    model: ModelConfig,
    tensor: int = 1,
    devices: Sequence[torch.device] = (CPU,),
    accumulator: AccumulatorDType = "float64",
) -> TrainedPart:
    """All layers of a model as one stage, with weights that are a function of the model."""
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=1, tensor=tensor))[0]
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + SHIFT * torch.randn(weight.shape, generator=generator)
        for name, weight in family.initial_weights(0, spec).items()
    }
    part = TrainedPart(spec, model, AdamW(OptimizerConfig()), devices=devices, accumulator=accumulator)
    part.install(initial_snapshot(spec.name, part.layout, weights))
    return part


def passed(part: TrainedPart, model: ModelConfig, *, rows: int = 2, defers: bool = True) -> Passed:
    """One microbatch there and back, as a replica computes it; its gradients are in the open step's sum."""
    spec, generator = family_of(model).boundary(rows, min(model.context, 12)), torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(spec.shape, generator=generator) for _ in range(2))
    part.defer_weight_gradients(defers)
    output, graph = part.forward(x.to(getattr(torch, spec.dtype)), seed=3)
    assert graph is not None
    back, rest = part.backward_input(graph, gradient)
    part.accumulate(WORK, part.backward_weights(rest))
    assert back is not None
    return Passed(output, back, part.gradient_sum())


def difference(ours: Passed, whole: Passed) -> float:
    """The largest difference of any number, each tensor in units of its own largest."""
    return max(
        float((one.cpu() - other.cpu()).abs().max() / other.abs().max().clamp(min=1.0).cpu())
        for one, other in zip(ours, whole, strict=True)
    )
