"""The learning rate of a step: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from swarm.schema import Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) and global-norm clipping."""

    lr: Annotated[float, Field(gt=0, lt=10)] = 1.5e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    min_lr_fraction: Fraction = 0.1


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of ``step`` (1-based) of ``steps``: the peak after warm-up, a fraction of it at the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = max(1, steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * cosine)
