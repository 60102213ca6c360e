"""The manifest's ``[optimizer]``, and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from swarm.schema import Section

MOMENTUM, DECAY_FRACTION = 0.95, 0.2
"""The defaults of keys that a manifest leaves out where they say nothing else."""
MUON_WIDTH = 2048
"""The shorter side of a matrix beyond which a step of Muon takes a CPU minutes: a copy on a CPU would never keep up."""

Fraction = Annotated[float, Field(ge=0, le=1)]


class OptimizerConfig(Section):
    """Which optimizer, with decoupled weight decay and global-norm clipping, and the course of its learning rate.

    ``wsd`` is that of Hu et al., arXiv 2404.06395. What newer versions added is left out of what is written where it
    says nothing, so that manifests without it keep their id.
    """

    name: Annotated[Literal["adamw", "sgd", "muon", "adafactor"], Field(exclude_if=lambda value: value == "adamw")] = (
        "adamw"
    )
    """``adamw``; ``sgd``: momentum, 8 bytes of state a parameter instead of 12; ``muon``: orthogonal steps for the
    layers' matrices, AdamW for the rest; ``adafactor``: no momentum, and of a matrix the mean squares of
    rows and columns only, 4 bytes."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 1.5e-3
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's mean, per step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW and Adafactor: decay of the mean of its square, per step."""
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    """AdamW and Adafactor: what is added to the root of that."""
    momentum: Annotated[float, Field(ge=0, lt=1, exclude_if=lambda value: value == MOMENTUM)] = MOMENTUM
    """``sgd`` and ``muon``: decay of the momentum, per step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Share of the learning rate by which weights shrink, per step."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the whole gradient."""
    influence: Annotated[float, Field(ge=0, le=1000, exclude_if=lambda value: not value)] = 0.0
    """Times its usual length that a microbatch's gradient of a part may have, and the gradient from which it is
    computed: longer ones are scaled down; 0: nothing is bounded. 2 is usual."""
    trainer_test: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Take the quota of a trainer whose microbatches pull against all others'. It takes five trainers."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps in which the learning rate rises to its peak."""
    min_lr_fraction: Fraction = 0.1
    """Fraction of ``lr`` at the last step, but for ``constant``."""
    schedule: Annotated[Literal["cosine", "wsd", "constant"], Field(exclude_if=lambda value: value == "cosine")] = (
        "cosine"
    )
    """After the warm-up: ``cosine`` to the last step; ``wsd``: the peak, then a linear fall; ``constant``: the peak."""
    decay_fraction: Annotated[float, Field(ge=0, le=1, exclude_if=lambda value: value == DECAY_FRACTION)] = (
        DECAY_FRACTION
    )
    """``wsd``: share of all steps in which the rate falls."""

    @property
    def described(self) -> str:
        """The optimizer's name, as it is written."""
        return {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adafactor": "Adafactor"}[self.name]


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of ``step`` (1-based) of ``steps``, of the peak after warm-up what the schedule says."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        falling = max(1.0, steps * config.decay_fraction)
        share = min(1.0, max(0.0, (steps - step) / falling))
    else:
        decay_steps = max(1, steps - config.warmup_steps)
        progress = min(1.0, (step - config.warmup_steps) / decay_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * share)
