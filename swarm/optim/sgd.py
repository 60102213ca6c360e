"""Stochastic gradient descent with momentum and decoupled weight decay: 8 bytes of state a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm.models.layout import FlatLayout
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import (
    ElementRun,
    StepNumbers,
    StepPlan,
    Vectors,
    check_mean,
    single,
)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sgd:
    """With μ the momentum, m₀ = 0: m ← μ·m + g; p ← p·(1 − lr·decay) − lr·(g + μ·m), Nesterov's form (Sutskever et al.,
    ICML 2013), the first factor only where the layout decays (SGDW: Loshchilov and Hutter, arXiv 1711.05101,
    algorithm 1). ``momentum`` = 0 is plain gradient descent."""

    config: OptimizerConfig

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`."""
        return "params", "momentum"

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update`: all of them."""
        return slice(0, layout.elements)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update`."""
        check_mean(mean, state)
        scalars = _Scalars(
            clip=single(numbers.clip),
            momentum=single(self.config.momentum),
            lr=single(numbers.lr),
            shrink=single(1.0 - numbers.lr * self.config.weight_decay),
        )
        step = {True: partial(_step, scalars, scalars.shrink), False: partial(_step, scalars, 1.0)}
        return StepPlan(
            (mean,), tuple(ElementRun(start, stop, step[decay]) for start, stop, decay in layout.decay_runs())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scalars:
    """Every number of one step, each rounded to float32 once."""

    clip: float
    momentum: float
    lr: float
    shrink: float


def _step(s: _Scalars, shrink: float, old: Vectors, sources: Vectors, new: Vectors) -> None:
    gradient = torch.mul(sources[0], s.clip)
    params, momentum = new
    torch.mul(old[1], s.momentum, out=momentum)
    torch.add(momentum, gradient, out=momentum)
    ahead = torch.mul(momentum, s.momentum)
    torch.add(ahead, gradient, out=ahead)
    torch.mul(ahead, s.lr, out=ahead)
    torch.mul(old[0], shrink, out=params)
    torch.sub(params, ahead, out=params)
