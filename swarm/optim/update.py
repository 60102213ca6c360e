"""Turn the mean that a step's replicas agree on into the next state of a part: AdamW, or DiLoCo's outer optimizer.

In `sync` the mean is a gradient and AdamW takes it (:class:`AdamW`). In `local` replicas begin at one anchor, train
alone for H steps, and average their *deltas*, anchor − parameters. The mean delta is taken for a gradient at the anchor
and stepped along with Nesterov momentum (:class:`Outer`); the result is the next anchor, from which everybody goes on,
each with its own inner moments.

Every replica computes that itself, and all must get the same bits, so the rules of :mod:`swarm.optim.adamw` hold:
separately rounded float32 +, − and ×, no fused kernels, scalars rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.optim.adamw import CHUNK_ELEMENTS, AdamWState, StepNumbers, adamw_step, single
from swarm.optim.schedules import OptimizerConfig


@dataclass(frozen=True, slots=True, eq=False)
class OuterState:
    """The state that all replicas share: the parameters on which they last agreed, and the momentum. Two flat float32
    vectors (elements,), never written to again."""

    anchor: Tensor
    momentum: Tensor

    @classmethod
    def first(cls, anchor: Tensor) -> OuterState:
        """Return the state of a run before its first synchronisation: no momentum. ``anchor`` is taken as it is, not
        copied."""
        return cls(anchor, torch.zeros_like(anchor))


@dataclass(frozen=True, slots=True)
class OuterNesterov:
    """Gradient descent with Nesterov momentum over mean deltas Δ, m₀ = 0:

        m ← μ·m + Δ
        anchor ← anchor − lr·(Δ + μ·m)

    Source: DiLoCo, Douillard et al., arXiv 2311.08105, algorithm 1, with the rates it found best; momentum as in
    Sutskever et al., ICML 2013, in the form of ``torch.optim.SGD(nesterov=True)``.
    ``lr`` = 1 and ``momentum`` = 0 average the parameters: the result is anchor − Δ to the bit, and that is their mean
    up to three roundings: of each replica's difference, of Δ and of this one.
    """

    lr: float = 0.7
    momentum: float = 0.9

    @torch.no_grad()
    def step(self, state: OuterState, delta: Tensor) -> OuterState:
        """The next anchor and momentum, in new vectors; ``state`` and ``delta`` stay as they are, so the result can be
        a shadow until the step is decided.

        ``delta`` is the mean of anchor − parameters over replicas, float32 (elements,), finite, on the state's device,
        the same bits everywhere. Memory: the two vectors of the result, and one chunk. Cost: 7 passes over memory.
        Raises BugError for a delta of another shape or dtype, and for a rate that is no float32.
        """
        if delta.shape != state.anchor.shape or delta.dtype != torch.float32:
            raise BugError(f"delta is {delta.dtype} {tuple(delta.shape)}, expected float32 {tuple(state.anchor.shape)}")
        lr, momentum = single(self.lr), single(self.momentum)
        shadow = OuterState(torch.empty_like(state.anchor), torch.empty_like(state.momentum))
        scratch = torch.empty(min(CHUNK_ELEMENTS, delta.numel()), dtype=torch.float32, device=delta.device)
        for first in range(0, delta.numel(), CHUNK_ELEMENTS):
            chunk = slice(first, min(first + CHUNK_ELEMENTS, delta.numel()))
            velocity, ahead = shadow.momentum[chunk], scratch[: chunk.stop - chunk.start]
            torch.mul(state.momentum[chunk], momentum, out=velocity)
            torch.add(velocity, delta[chunk], out=velocity)
            torch.mul(velocity, momentum, out=ahead)
            torch.add(ahead, delta[chunk], out=ahead)
            torch.mul(ahead, lr, out=ahead)
            torch.sub(state.anchor[chunk], ahead, out=shadow.anchor[chunk])
        return shadow


# --- update rules ----------------------------------------------------------------------------------------------------
# With an outer optimizer the state is anchor and momentum, and its third vector, the one that AdamW needs, stays zero:
# code that copies, checks and stores states need not know which of the two it is.


class Update(Protocol):
    """The same bits on every replica, whatever machine computes it."""

    def __call__(self, state: AdamWState, mean: Tensor, layout: FlatLayout, numbers: StepNumbers) -> AdamWState:
        """The state after a step, in new vectors; ``mean`` is float32 (layout.elements,) on the state's device. Raises
        BugError for one of another shape or dtype."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """The mean is the gradient: see :func:`~swarm.optim.adamw.adamw_step`."""

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
        """See :class:`Update` and :class:`~swarm.optim.update.OuterNesterov`."""
        delta = mean if numbers.clip == 1.0 else mean * single(numbers.clip)
        after = self.nesterov.step(OuterState(state.params, state.exp_avg), delta)
        return AdamWState(after.anchor, after.momentum, state.exp_avg_sq)
