"""How the mean that a step's replicas agree on becomes the next state of a part.

In `sync` the mean is a gradient and AdamW takes it. In `local` it is how far replicas that trained apart have gone from
where they began together, and an outer optimizer takes it; then the state is anchor and momentum, and its third vector,
the one that AdamW needs, stays zero: whoever copies, checks and stores states need not know which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swarm.models.layout import FlatLayout
from swarm.optimization.adamw import AdamWState, StepNumbers, adamw_step, single
from swarm.optimization.outer import OuterNesterov, OuterState
from swarm.optimization.schedules import OptimizerConfig


class Update(Protocol):
    """The same bits on every replica, whatever machine computes it."""

    def __call__(self, state: AdamWState, mean: Tensor, layout: FlatLayout, numbers: StepNumbers) -> AdamWState:
        """The state after a step, in new vectors; ``mean`` is float32 (layout.elements,) on the state's device. Raises
        BugError for one of another shape or dtype."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """The mean is the gradient: see :func:`~swarm.optimization.adamw.adamw_step`."""

    config: OptimizerConfig

    def __call__(self, state: AdamWState, mean: Tensor, layout: FlatLayout, numbers: StepNumbers) -> AdamWState:
        """See :class:`Update`."""
        return adamw_step(state, mean, layout, self.config, numbers)


@dataclass(frozen=True, slots=True)
class Outer:
    """The mean is that of anchor − parameters over replicas that trained apart. The record's learning rate is not used:
    it is the inner optimizer's. Its clip factor is 1 but where Δ is longer than honest steps can lead."""

    nesterov: OuterNesterov

    def __call__(self, state: AdamWState, mean: Tensor, layout: FlatLayout, numbers: StepNumbers) -> AdamWState:
        """See :class:`Update` and :class:`~swarm.optimization.outer.OuterNesterov`."""
        delta = mean if numbers.clip == 1.0 else mean * single(numbers.clip)
        after = self.nesterov.step(OuterState(state.params, state.exp_avg), delta)
        return AdamWState(after.anchor, after.momentum, state.exp_avg_sq)
